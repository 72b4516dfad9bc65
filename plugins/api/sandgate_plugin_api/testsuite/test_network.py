"""Where connections from inside may go: what is claimed is kept, what is not is refused.

A listener on this machine stands for the world: it must not hear anything on any of the machine's addresses, those of
``addresses`` in ``[testsuite]`` included. A backend that gives a sandbox without rules no way to the machine either passes
these tests more easily, and rightly so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sandgate_errors import CapabilityMissing, InvalidArgument, NotFound, SandgateError, Unavailable
from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.records import Egress
from sandgate_plugin_api.testsuite.box import Box, made, request_for
from sandgate_plugin_api.testsuite.deployment import Deployment, Options

pytestmark = pytest.mark.asyncio

# One of these is in most images. Each gives up by itself.
_CONNECT = """
if command -v python3 >/dev/null; then
    python3 -c 'import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()' {host} {port}
elif command -v bash >/dev/null; then timeout 3 bash -c 'exec 3<>/dev/tcp/{host}/{port}'
elif command -v nc >/dev/null; then timeout 3 nc {host} {port} </dev/null
elif command -v wget >/dev/null; then timeout 3 wget -q -O /dev/null http://{host}:{port}/
else exit 99; fi
"""
_NO_PROGRAM = 99


class _Ear:
    """A port of this machine, and how often somebody came."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.port = 0
        self.heard = 0

    def hear(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += 1
        writer.close()

    async def tried_from(self, box: Box) -> bool:
        """Whether a connection from inside arrives. Skips where the template has nothing to try with."""
        before = self.heard
        for host in self.addresses:
            done = await box.run(_CONNECT.format(host=host, port=self.port))
            if done.exit_code == _NO_PROGRAM:
                pytest.skip("the template has no program that could open a connection")
        await asyncio.sleep(0.1)
        return self.heard > before


@pytest_asyncio.fixture
async def ear(options: Options) -> AsyncIterator[_Ear]:
    ear = _Ear(["127.0.0.1", *_own_address(), *options.addresses])
    server = await asyncio.start_server(ear.hear, "0.0.0.0", 0)
    ear.port = server.sockets[0].getsockname()[1]
    async with server:
        yield ear


def _own_address() -> list[str]:
    """The address by which this machine would reach others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]


async def test_sandbox_without_internet_reaches_nothing(deployment: Deployment, backend: Backend, ear: _Ear) -> None:
    closed: dict[str, Any] = {"allow_internet_access": False, "egress": Egress(internet=False)}
    if Capability.NO_INTERNET not in backend.capabilities:
        request = await request_for(deployment, backend, **closed)
        reserved = backend.reserve(request)
        with pytest.raises(SandgateError):
            await backend.create(request, reserved)
        assert list(await backend.survey()) == [], "refused, and made all the same"
        return
    async with made(deployment, backend, **closed) as box:
        assert not await ear.tried_from(box), "a sandbox without internet access has reached this machine"
        # Its own loopback is its own business, and the agent still answers.
        assert (await box.run("echo works")).text() == "works"


async def test_rules_that_are_not_claimed_are_refused(box: Box) -> None:
    if Capability.NETWORK_RULES in box.backend.capabilities:
        pytest.skip("it claims network rules")
    with pytest.raises(CapabilityMissing, match=box.backend.name):
        await box.backend.update_egress(box.handle, Egress(deny=("0.0.0.0/0",)))


async def test_rules_hold_from_the_first_instruction(deployment: Deployment, backend: Backend, ear: _Ear) -> None:
    _needs_rules(backend)
    rules = Egress(allow=("192.0.2.1",), deny=("0.0.0.0/0",))
    async with made(deployment, backend, egress=rules) as box:
        assert not await ear.tried_from(box), "a rule that denies everything else let a connection through"


async def test_rules_can_be_replaced_while_it_runs(box: Box, ear: _Ear) -> None:
    _needs_rules(box.backend)
    await box.backend.update_egress(box.handle, Egress(internet=False))
    assert not await ear.tried_from(box), "new rules do not hold when update_egress() has returned"
    await box.backend.update_egress(box.handle, Egress())
    assert (await box.run("echo works")).text() == "works"


async def test_private_ranges_stay_closed_whatever_the_rules_say(
    deployment: Deployment, backend: Backend, ear: _Ear
) -> None:
    """The machine itself is where a gateway's own services listen."""
    _needs_rules(backend)
    async with made(deployment, backend, egress=Egress(allow=(f"{ear.addresses[0]}/32",))) as box:
        assert not await ear.tried_from(box)


async def test_rules_hold_over_a_pause(box: Box, ear: _Ear) -> None:
    _needs_rules(box.backend)
    if Capability.PAUSE not in box.backend.capabilities:
        pytest.skip("it does not claim pause")
    await box.backend.update_egress(box.handle, Egress(internet=False))
    handle = await box.backend.pause(box.handle, memory=True)
    resumed = box.moved(await box.backend.resume(handle))
    assert not await ear.tried_from(resumed)


async def test_rules_of_a_paused_sandbox_can_be_replaced_or_stay(box: Box, ear: _Ear) -> None:
    _needs_rules(box.backend)
    if Capability.PAUSE not in box.backend.capabilities:
        pytest.skip("it does not claim pause")
    closed, other = Egress(internet=False), Egress(deny=("0.0.0.0/0", "::/0"))
    await box.backend.update_egress(box.handle, closed)
    handle = await box.backend.pause(box.handle, memory=True)
    # Unavailable: not now, and then the rules of before hold.
    with contextlib.suppress(Unavailable):
        await box.backend.update_egress(handle, other)
    resumed = box.moved(await box.backend.resume(handle))
    assert not await ear.tried_from(resumed)


async def test_rules_hold_after_the_gateway_has_started_again(deployment: Deployment, ear: _Ear) -> None:
    async with deployment.backend() as before:
        _needs_rules(before)
        async with made(deployment, before, egress=Egress(internet=False)) as box, deployment.backend() as after:
            found = await after.locate(box.handle)
            assert found is not None
            assert not await ear.tried_from(box.moved(found)), "a start of the gateway opened what was closed"


async def test_rules_by_name_are_kept_or_refused(deployment: Deployment, backend: Backend, ear: _Ear) -> None:
    """What is refused must not be made, and what is made must not be open."""
    _needs_rules(backend)
    rules = Egress(allow=("no-such-name.example.org",), deny=("0.0.0.0/0", "::/0"))
    try:
        async with made(deployment, backend, egress=rules) as box:
            assert not await ear.tried_from(box)
    except (CapabilityMissing, InvalidArgument):
        assert list(await backend.survey()) == []


async def test_rules_of_one_that_is_gone_are_not_found(deployment: Deployment, backend: Backend) -> None:
    _needs_rules(backend)
    async with made(deployment, backend) as box:
        handle = box.handle
    with pytest.raises(NotFound):
        await backend.update_egress(handle, Egress(internet=False))


def _needs_rules(backend: Backend) -> None:
    if Capability.NETWORK_RULES not in backend.capabilities:
        pytest.skip(f"backend '{backend.name}' does not claim {Capability.NETWORK_RULES.value}")
