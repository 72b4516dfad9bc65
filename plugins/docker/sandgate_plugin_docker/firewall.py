"""Where sandboxes may go: packet filter rules of the engine's host, where that is this machine and the gateway may.

Two chains of the gateway's own hang in front of what is passed on, and in front of what the host itself takes::

    DOCKER-USER, FORWARD --(from our bridge)--> SG-<gateway>      private ranges are closed; then, by the sender's address,
                                                SGB-<box>         one sandbox's own rules, where it has any
    INPUT                --(from our bridge)--> SG-<gateway>-IN   nothing on the host itself, the gateway included

DOCKER-USER is the engine's hook for users' rules and stays first, also when an engine that starts anew puts its own rules in
front. But whenever anybody makes a network, the engine takes the hook out for some milliseconds to put it first again: what
is passed on then meets the chain in FORWARD.

Rules are by the address of a sandbox, which it cannot change: it has neither NET_ADMIN nor NET_RAW.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from sandgate_errors import InvalidArgument, Unavailable
from sandgate_plugin_api import Egress
from sandgate_plugin_docker.engine import Engine
from sandgate_plugin_docker.networks import Network
from sandgate_plugin_docker.settings import DockerSettings

__all__ = ["Firewall"]

_log = logging.getLogger(__name__)

#: Seconds for one call, most of which it may wait for others that change rules.
_LIMIT = 20.0
_HOOKS = ("DOCKER-USER", "FORWARD")
#: Closed whatever a client's rules say: private, shared, link-local (cloud metadata), multicast, reserved.
_CLOSED = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
_ESTABLISHED = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"
_CLOSE = "-j REJECT --reject-with icmp-admin-prohibited"


class Firewall:
    """The rules of one gateway."""

    def __init__(self, program: str, network: Network, gateway: str) -> None:
        self._program = program
        self._network = network
        self._gateway = gateway
        self._out = f"SG-{gateway}"
        self._in = f"SG-{gateway}-IN"
        self._lock = asyncio.Lock()
        #: Boxes that have rules of their own: name -> (address, rules).
        self._boxes: dict[str, tuple[ipaddress.IPv4Address, tuple[str, ...]]] = {}

    @classmethod
    def open(cls, settings: DockerSettings, engine: Engine, network: Network, gateway: str) -> Firewall | None:
        """None where the gateway cannot or may not; the log says why that matters."""
        if not settings.firewall:
            return None
        reason = cls.why_not(engine.is_local)
        if reason is None:
            return cls(str(shutil.which("iptables")), network, gateway)
        _log.warning("sandboxes can reach the networks of the engine's host, private ones too: %s", reason)
        return None

    @staticmethod
    def why_not(is_local: bool) -> str | None:
        """One line for the operator; None where it can be tried."""
        if not is_local:
            return "the engine is on another machine"
        if os.geteuid() != 0:
            return "only a gateway that runs as root can keep them from it"
        return None if shutil.which("iptables") else "iptables is not installed"

    @staticmethod
    def check(egress: Egress) -> None:
        """Raises InvalidArgument for a rule that cannot be kept."""
        for rule in (*egress.allow, *egress.deny):
            try:
                ipaddress.ip_network(rule, strict=False)
            except ValueError:
                raise InvalidArgument(
                    f"backend 'docker' keeps network rules for addresses and ranges, not for names: '{rule}'"
                ) from None

    def note(self, box: str, address: ipaddress.IPv4Address | None, egress: Egress) -> None:
        """What a sandbox of an earlier start has; it holds from the next change on."""
        if address is not None and egress.internet and not egress.open:
            self._boxes[box] = address, tuple(_rules(box, egress))

    async def ensure(self) -> None:
        """The rules for all sandboxes, in place of those of an earlier start."""
        async with self._lock:
            boxes = [line for box, (_, rules) in self._boxes.items() for line in (f":{_chain(box)} - [0:0]", *rules)]
            chains = [*boxes, f":{self._out} - [0:0]", f":{self._in} - [0:0]", *self._common()]
            await self._restore([*chains, *[line async for line in self._first()]])

    async def _first(self) -> AsyncIterator[str]:
        """Jumps in front of all else that there is: what makes a network puts rules there that let it through."""
        for hook, chain in _jumps(self._out, self._in):
            jump = f"-i {self._network.bridge} -j {chain}"
            if await self._run("-C", hook, *jump.split(), may_fail=True):
                yield f"-D {hook} {jump}"
            yield f"-I {hook} 1 {jump}"

    async def sweep(self) -> None:
        """Remove what gateways that were killed have left: chains for a bridge that is no more."""
        async with self._lock:
            chains = re.findall(r"^-N SG-([0-9a-f]{8})$", await self._listed(), re.MULTILINE)
            for gateway in chains:
                if not Path(f"/sys/class/net/sg-{gateway}").exists():
                    await self._remove(gateway)

    async def _listed(self, *chain: str) -> str:
        done = await asyncio.to_thread(
            subprocess.run, [self._program, "-w", "10", "-S", *chain], capture_output=True, timeout=_LIMIT, check=False
        )
        return done.stdout.decode()

    def _common(self) -> Sequence[str]:
        names = [
            f"-A {self._out} -p {kind} -d {server} --dport 53 -j RETURN"
            for server in _resolvers()
            for kind in ("udp", "tcp")
        ]
        jumps = [f"-A {self._out} -s {address} -j {_chain(box)}" for box, (address, _) in sorted(self._boxes.items())]
        return [
            f"-A {self._out} {_ESTABLISHED}",
            *names,
            *(f"-A {self._out} -d {closed} {_CLOSE}" for closed in _CLOSED),
            *jumps,
            f"-A {self._in} {_ESTABLISHED}",
            f"-A {self._in} {_CLOSE}",
        ]

    async def apply(self, box: str, address: ipaddress.IPv4Address | None, egress: Egress) -> None:
        """Let rules hold for the sandbox at ``address``, in place of those it had. Raises Unavailable."""
        async with self._lock:
            old = self._boxes.get(box)
            if address is None or egress.open or not egress.internet:
                # Who is on no network needs no rules.
                if old is not None:
                    await self._drop(box)
                return
            rules = tuple(_rules(box, egress))
            self._boxes[box] = address, rules
            await self._restore([f":{_chain(box)} - [0:0]", *rules, f":{self._out} - [0:0]", *self._out_rules()])

    async def forget(self, box: str) -> None:
        """The sandbox is gone; its address may soon be another's."""
        async with self._lock:
            if box in self._boxes:
                await self._drop(box)

    async def _drop(self, box: str) -> None:
        del self._boxes[box]
        await self._restore(
            [f":{self._out} - [0:0]", *self._out_rules(), f":{_chain(box)} - [0:0]", f"-X {_chain(box)}"]
        )

    def _out_rules(self) -> Sequence[str]:
        return [rule for rule in self._common() if rule.startswith(f"-A {self._out} ")]

    async def remove(self) -> None:
        """Everything of this gateway; for who gives up its network."""
        async with self._lock:
            await self._remove(self._gateway)

    async def _remove(self, gateway: str) -> None:
        out, into = f"SG-{gateway}", f"SG-{gateway}-IN"
        boxes = re.findall(rf"^-A {out} .*-j (SGB-\w+)$", await self._listed(out), re.MULTILINE)
        for hook, chain in _jumps(out, into):
            await self._run("-D", hook, "-i", f"sg-{gateway}", "-j", chain, may_fail=True)
        for chain in (out, into, *boxes):
            await self._run("-F", chain, may_fail=True)
            await self._run("-X", chain, may_fail=True)

    async def _restore(self, lines: Sequence[str]) -> None:
        """All or nothing."""
        text = "\n".join(("*filter", *lines, "COMMIT", ""))
        await self._call([f"{self._program}-restore", "--noflush", "-w", "10"], text)

    async def _run(self, *words: str, may_fail: bool = False) -> bool:
        return await self._call([self._program, "-w", "10", *words], "", may_fail=may_fail)

    async def _call(self, argv: Sequence[str], text: str, *, may_fail: bool = False) -> bool:
        try:
            done = await asyncio.to_thread(
                subprocess.run, argv, input=text.encode(), capture_output=True, timeout=_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable("the sandbox's network rules cannot be set at the moment") from error
        if done.returncode != 0 and not may_fail:
            _log.error(
                "network rules were refused: %s: %s", " ".join(argv), done.stderr.decode(errors="replace").strip()
            )
            raise Unavailable("the sandbox's network rules cannot be set at the moment")
        return done.returncode == 0


def _jumps(out: str, into: str) -> Sequence[tuple[str, str]]:
    """(where, to which chain)"""
    return [*((hook, out) for hook in _HOOKS), ("INPUT", into)]


def _chain(box: str) -> str:
    """At most 28 characters."""
    return f"SGB-{box}"


def _rules(box: str, egress: Egress) -> Sequence[str]:
    chain = _chain(box)
    allowed = [f"-A {chain} -d {network} -j RETURN" for network in _networks(egress.allow)]
    return [*allowed, *(f"-A {chain} -d {network} {_CLOSE}" for network in _networks(egress.deny))]


def _networks(rules: Sequence[str]) -> Sequence[ipaddress.IPv4Network]:
    """Those that mean anything here: sandboxes have no addresses of version 6."""
    networks = (ipaddress.ip_network(rule, strict=False) for rule in rules)
    return [network for network in networks if isinstance(network, ipaddress.IPv4Network)]


def _resolvers() -> Sequence[str]:
    """The name servers that the engine hands on to containers: often in a private range, and needed all the same."""
    paths = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))
    found: list[str] = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if len(words) >= 2 and words[0] == "nameserver" and _usable(words[1]) and words[1] not in found:
                found.append(words[1])
    return found


def _usable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback
