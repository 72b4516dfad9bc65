"""Where a sandbox may go: rules that the packet filter keeps, beside the network that is always closed."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_errors import CapabilityMissing, InvalidArgument, Unavailable
from sandgate_plugin_api import Capability, Egress
from sandgate_plugin_docker.engine import Engine
from sandgate_testing.engine import docker
from sandgate_testing.gateway import wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root sets packet filter rules"),
    # One address range of this machine.
    pytest.mark.xdist_group("docker-outside"),
]

#: A range for documentation: public as far as rules go, and nobody's.
_RANGE = ipaddress.ip_network("198.51.100.0/24")
_WEB_SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, h.ThreadingHTTPServer, port=8080)"


@pytest.fixture
def outside() -> Iterator[str]:
    """Somebody on the internet, with a web server: a network namespace that ends with the server, which ends with us."""
    server = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", sys.executable, "-c", _WEB_SERVER],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/proc/self/fdinfo",
    )
    try:
        yield _joined(server)
    finally:
        server.kill()
        server.wait()


def _joined(server: subprocess.Popen[bytes]) -> str:
    """Connect a namespace with this machine's own, and return its address."""
    ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{server.pid}/ns/net")
    wait_until(lambda: theirs.readlink() != ours.readlink())
    # Whoever was killed may have left addresses of the range behind.
    taken = ip("-o", "-4", "address", "show")
    subnets = _RANGE.subnets(new_prefix=30)
    here, there = next(list(map(str, subnet.hosts())) for subnet in subnets if f"{subnet[1]}/30" not in taken)
    name, peer = f"sgh{server.pid}", f"sgn{server.pid}"
    ip("link", "add", name, "type", "veth", "peer", "name", peer)
    ip("link", "set", peer, "netns", str(server.pid))
    ip("address", "add", f"{here}/30", "dev", name)
    ip("link", "set", name, "up")
    inside = ["nsenter", "--target", str(server.pid), "--net", "ip"]
    for step in (f"address add {there}/30 dev {peer}", f"link set {peer} up", f"route add default via {here}"):
        subprocess.run([*inside, *step.split()], check=True, capture_output=True)
    return there


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def iptables(*words: str) -> str:
    return subprocess.run(["iptables", "-w", "10", *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def reaches(run):
    async def reaches(placement, address: str, port: int = 8080) -> bool:
        probe = f"for i in 1 2 3 4 5 6; do timeout 2 bash -c ': < /dev/tcp/{address}/{port}' && exit 0; sleep 0.3; done"
        # A refusal by the packet filter is an answer, so nothing is waited for.
        return (await run(placement, f"( {probe}; exit 1 ) 2>/dev/null", "root"))[0] == 0

    return reaches


async def test_rules_hold_from_the_first_moment_and_change_at_once(gateway, backend, outside, reaches):
    """C54: allow wins over deny; an update replaces all; other sandboxes are not affected."""
    assert Capability.NETWORK_RULES in backend.capabilities
    free = await gateway.create(backend)
    bound = await gateway.create(backend, egress=Egress(deny=("0.0.0.0/0",)))
    assert await reaches(free, outside)
    assert not await reaches(bound, outside)
    await backend.update_egress(bound.handle, Egress(allow=(f"{outside}/32",), deny=("0.0.0.0/0",)))
    assert await reaches(bound, outside)
    await backend.update_egress(bound.handle, Egress(deny=("198.51.100.0/24",)))
    assert not await reaches(bound, outside)
    await backend.update_egress(bound.handle, Egress())
    assert await reaches(bound, outside)
    assert await reaches(free, outside)


async def test_internet_access_can_be_taken_and_given_while_it_runs(gateway, backend, outside, reaches):
    placement = await gateway.create(backend)
    await backend.update_egress(placement.handle, Egress(internet=False))
    assert not await reaches(placement, outside)
    await backend.update_egress(placement.handle, Egress())
    assert await reaches(placement, outside)


async def test_rules_outlive_pauses_and_the_core(gateway, outside, reaches):
    rules = Egress(deny=("0.0.0.0/0",))
    async with gateway.backend() as backend:
        placement = await gateway.create(backend, egress=rules)
        handle = await backend.pause(placement.handle, memory=False)
        # Its address may be somebody else's meanwhile.
        other = await gateway.create(backend)
        assert await reaches(other, outside)
        placement = await backend.resume(handle)
        assert not await reaches(placement, outside)
        handle = await backend.pause(placement.handle, memory=True)
    async with gateway.backend() as backend:
        placement = await backend.resume(handle)
        assert not await reaches(placement, outside)
        assert await reaches(other, outside)


async def test_private_ranges_stay_closed_whatever_is_allowed(gateway, backend, outside, reaches):
    placement = await gateway.create(backend, egress=Egress(allow=("0.0.0.0/0", "169.254.0.0/16", "10.0.0.0/8")))
    assert await reaches(placement, outside)
    for address in ("169.254.169.254", "10.255.255.1", "192.168.0.1"):
        assert not await reaches(placement, address, 80)


async def test_rules_for_names_are_refused(gateway, backend):
    with pytest.raises(InvalidArgument, match=r"'\*\.example\.org'"):
        await gateway.create(backend, egress=Egress(allow=("*.example.org",), deny=("0.0.0.0/0",)))
    assert not gateway.containers()


async def test_without_the_packet_filter_rules_are_refused_by_name(gateway):
    async with gateway.backend(firewall=False) as backend:
        assert Capability.NETWORK_RULES not in backend.capabilities
        with pytest.raises(CapabilityMissing, match="network rules"):
            await gateway.create(backend, egress=Egress(deny=("0.0.0.0/0",)))


async def test_network_that_somebody_removed_is_made_again(gateway, backend, run):
    docker("network", "rm", f"sandgate-{gateway.id}")
    request = await gateway.request(backend)
    with pytest.raises(Unavailable) as error:
        await backend.create(request, backend.reserve(request))
    assert error.value.retry_after
    assert not gateway.containers()
    assert await run(await gateway.create(backend), "true", "root") == (0, "")


async def test_sandbox_is_on_its_network_before_it_is_given_away_and_after_a_start_on_its_files(
    gateway, backend, outside, reaches, run
):
    placement = await gateway.create(backend)
    look = "hostname -i; grep -c . /etc/resolv.conf; tail -n +3 /proc/net/route | wc -l"
    code, before = await run(placement, look)
    address, servers, routes = before.split()
    assert (code, routes) == (0, "1")
    assert address == await backend.address(placement.handle)
    assert int(servers)
    assert await reaches(placement, outside)
    placement = await backend.resume(await backend.pause(placement.handle, memory=False))
    assert await reaches(placement, outside)
    assert (await run(placement, "hostname -i"))[1].split() == [await backend.address(placement.handle)]


async def test_lost_answer_to_joining_the_network_leaves_nothing_of_the_sandbox(gateway, backend, monkeypatch):
    """Its agent starts meanwhile. The fixture looks for what is left on the network."""
    join = Engine.join

    async def joined_unheard(engine: Engine, network: str, container: str) -> None:
        await join(engine, network, container)
        raise Unavailable("the answer is lost")

    monkeypatch.setattr(Engine, "join", joined_unheard)
    with pytest.raises(Unavailable, match="the answer is lost"):
        await gateway.create(backend)
    assert not gateway.containers()


async def test_warm_sandbox_gets_rules_before_it_is_given_away(gateway, outside, reaches):
    templates = {"base": {"image": gateway.images.debian(), "warm": 1}}
    async with gateway.backend(templates=templates) as backend:
        for _ in range(600):
            if backend._pools["base"]._ready:
                break
            await asyncio.sleep(0.1)
        placement = await gateway.create(backend, egress=Egress(deny=("0.0.0.0/0",)))
        assert str(placement.handle["box"]).startswith("w")
        assert not await reaches(placement, outside)


@pytest.mark.parametrize("remade", [False, True], ids=["network of the start", "network made anew"])
async def test_rules_hold_while_the_engine_makes_other_networks(gateway, backend, outside, reaches, run, remade):
    """It takes its hook for users' rules out for a moment each time, to put it first again."""
    if remade:
        docker("network", "rm", f"sandgate-{gateway.id}")
        with pytest.raises(Unavailable):
            await gateway.create(backend)
    free = await gateway.create(backend)
    bound = await gateway.create(backend, egress=Egress(deny=("0.0.0.0/0",)))
    assert await reaches(free, outside)
    # Hundreds of tries in a second, each of which may wait for an answer: refusals are rationed by the kernel.
    attempt = f": < /dev/tcp/{outside}/8080 && echo reached"
    tries = f"(until [ -e /tmp/over ]; do ({attempt}) & sleep 0.002; done; kill $(jobs -p); wait) 2>/dev/null; true"
    probing = asyncio.create_task(run(bound, tries, "root"))
    networks = [f"sgn-{secrets.token_hex(6)}" for _ in range(8)]
    try:
        for name in networks:
            await asyncio.to_thread(docker, "network", "create", name)
    finally:
        for name in networks:
            await asyncio.to_thread(docker, "network", "rm", name, check=False)
        await run(bound, "touch /tmp/over", "root")
    assert "reached" not in (await probing)[1]


async def test_rules_hold_whatever_an_engine_that_starts_anew_puts_in_front(gateway, backend, outside, reaches):
    """Its rules let all through that comes from a network, and may then be the first of all."""
    bound = await gateway.create(backend, egress=Egress(deny=("0.0.0.0/0",)))
    bridge = f"sg-{gateway.id}"
    iptables("-I", "FORWARD", "1", "-i", bridge, "-j", "ACCEPT")
    try:
        assert not await reaches(bound, outside)
        await backend.update_egress(bound.handle, Egress(allow=(f"{outside}/32",), deny=("0.0.0.0/0",)))
        assert await reaches(bound, outside)
    finally:
        iptables("-D", "FORWARD", "-i", bridge, "-j", "ACCEPT")


async def test_rules_of_a_gateway_that_was_killed_go_with_the_next_start(gateway, backend):
    """Its chains and its sandboxes', once its bridge is no more."""
    dead, box = secrets.token_hex(4), f"SGB-i{secrets.token_hex(10)}"
    # At once: a gateway of another test may start in between, and clear away what there is so far.
    lines = (
        "*filter",
        f":SG-{dead} - [0:0]",
        f":SG-{dead}-IN - [0:0]",
        f":{box} - [0:0]",
        f"-A SG-{dead} -s 192.0.2.9 -j {box}",
        f"-A DOCKER-USER -i sg-{dead} -j SG-{dead}",
        f"-A INPUT -i sg-{dead} -j SG-{dead}-IN",
        "COMMIT",
        "*mangle",
        f":SG-{dead} - [0:0]",
        f":{box} - [0:0]",
        f"-A SG-{dead} -s 192.0.2.9 -j {box}",
        f"-A POSTROUTING -s 192.0.2.0/24 -j SG-{dead}",
        "COMMIT\n",
    )
    restore = ["iptables-restore", "--noflush", "-w", "10"]
    await asyncio.to_thread(subprocess.run, restore, input="\n".join(lines), text=True, check=True)
    async with gateway.backend():
        rules = iptables("-S") + iptables("-t", "mangle", "-S")
    assert dead not in rules
    assert box not in rules
