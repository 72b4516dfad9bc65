"""Where sandboxes may go: packet filter rules of the engine's host, where that is this machine and the gateway may.

Chains of the gateway's own hang in front of what is passed on, and in front of what the host itself takes::

    filter DOCKER-USER  --(from our bridge)--> SG-<gateway>      private ranges are closed; then, by the sender's address,
                                               SGB-<box>         one sandbox's own rules, where it has any
    filter INPUT        --(from our bridge)--> SG-<gateway>-IN   nothing on the host itself, the gateway included
    mangle POSTROUTING  --(our subnet)-------> SG-<gateway>      the same as the first once more, on the way to elsewhere

DOCKER-USER is the engine's hook for users' rules, where a refusal is told to the sandbox. But whenever anybody makes a network
the engine takes the hook out for some milliseconds, and one that starts anew puts rules of its own in front of others'. So
everything is looked at once more on its way out, where no engine has rules. What the first line should have refused is only
dropped there: that table can tell nobody.

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
from collections.abc import Sequence
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
            first = [f"-I {hook} 1 -i {self._network.bridge} -j {chain}" for hook, chain in _hooks(self._out, self._in)]
            # Not what the host itself sends to a sandbox, by the bridge's own address: agents are reached so by their ports.
            last = [f"-I POSTROUTING 1 -s {await self._network.subnet()} ! -o {self._network.bridge} -j {self._out}"]
            await self._restore(
                chains,
                filter_jumps=[*await self._old_jumps("filter", self._out, self._in), *first],
                mangle_jumps=[*await self._old_jumps("mangle", self._out), *last],
            )

    async def _old_jumps(self, table: str, *chains: str) -> Sequence[str]:
        """Lines that take out every jump to one of the chains."""
        found = re.findall(rf"^-A (.* -j (?:{'|'.join(chains)}))$", await self._listed(table), re.MULTILINE)
        return [f"-D {jump}" for jump in found]

    async def sweep(self) -> None:
        """Remove what gateways that were killed have left: chains for a bridge that is no more."""
        async with self._lock:
            listed = await self._listed("filter") + await self._listed("mangle")
            for gateway in set(re.findall(r"^-N SG-([0-9a-f]{8})$", listed, re.MULTILINE)):
                if not Path(f"/sys/class/net/sg-{gateway}").exists():
                    await self._remove(gateway)

    async def _listed(self, table: str) -> str:
        argv = [self._program, "-w", "10", "-t", table, "-S"]
        try:
            done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=_LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable("the sandbox's network rules cannot be read at the moment") from error
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
        for table in ("filter", "mangle"):
            listed = await self._listed(table)
            own = [chain for chain in (out, into) if f"-N {chain}\n" in listed]
            boxes = sorted(set(re.findall(rf"^-A {out} .*-j (SGB-\w+)$", listed, re.MULTILINE)))
            lines = [*await self._old_jumps(table, out, into), *(f":{chain} - [0:0]" for chain in (*own, *boxes))]
            lines += [f"-X {chain}" for chain in (*own, *boxes)]
            if lines:
                await self._load(_table(table, lines))

    async def _restore(
        self, lines: Sequence[str], *, filter_jumps: Sequence[str] = (), mangle_jumps: Sequence[str] = ()
    ) -> None:
        """Each table all or nothing."""
        # What the host itself takes never goes out again.
        out = [line.replace(_CLOSE, "-j DROP") for line in lines if f"{self._in} " not in line]
        await self._load(_table("mangle", [*out, *mangle_jumps]) + _table("filter", [*lines, *filter_jumps]))

    async def _load(self, text: str) -> None:
        await self._call([f"{self._program}-restore", "--noflush", "-w", "10"], text)

    async def _call(self, argv: Sequence[str], text: str) -> None:
        try:
            done = await asyncio.to_thread(
                subprocess.run, argv, input=text.encode(), capture_output=True, timeout=_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable("the sandbox's network rules cannot be set at the moment") from error
        if done.returncode != 0:
            _log.error(
                "network rules were refused: %s: %s", " ".join(argv), done.stderr.decode(errors="replace").strip()
            )
            raise Unavailable("the sandbox's network rules cannot be set at the moment")


def _hooks(out: str, into: str) -> Sequence[tuple[str, str]]:
    """(where, to which chain)"""
    return (("DOCKER-USER", out), ("INPUT", into))


def _table(name: str, lines: Sequence[str]) -> str:
    return "\n".join((f"*{name}", *lines, "COMMIT", ""))


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
