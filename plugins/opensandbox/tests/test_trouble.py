"""A server that is killed, started again, stands still or hangs up in the middle of everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from sandgate_errors import FailedPrecondition, ResourceExhausted, SandgateError, Unavailable
from sandgate_testing.cutting_proxy import CuttingProxy
from sandgate_testing.opensandbox import OpenSandboxServer


@contextlib.contextmanager
def _away(server: OpenSandboxServer, *, hard: bool = True):
    server.stop(hard=hard)
    try:
        yield
    finally:
        server.start()


async def test_sandboxes_go_on_and_are_served_while_the_server_is_away(gateway, backend, server, run):
    placement = await gateway.create(backend)
    request = await gateway.request(backend)
    with _away(server):
        assert await run(placement, "echo still here > kept; cat kept") == (0, "still here\n")
        for refused in (
            backend.create(request, backend.reserve(request)),
            backend.survey(),
            backend.locate(placement.handle),
            backend.destroy(placement.handle),
        ):
            with pytest.raises(Unavailable) as error:
                await refused
            assert error.value.retry_after
    # The server has found them again, and so does the gateway.
    assert (await backend.locate(placement.handle)).agent == placement.agent
    assert await run(placement, "cat kept") == (0, "still here\n")


async def test_pause_outlives_the_server(gateway, backend, server, run):
    placement = await gateway.create(backend)
    handle = await backend.pause(placement.handle, memory=True)
    with _away(server), pytest.raises(Unavailable):
        await backend.resume(handle)
    assert await run(await backend.resume(handle), "echo works") == (0, "works\n")


@pytest.mark.parametrize("moment", [0.3, 0.6])
async def test_server_killed_in_the_middle_of_a_create_leaves_nothing(gateway, backend, server, moment):
    request = await gateway.request(backend)
    creating = asyncio.create_task(backend.create(request, backend.reserve(request)))
    await asyncio.sleep(moment)
    with _away(server):
        await asyncio.sleep(0.2)
    try:
        placement = await creating
    except SandgateError:
        # What appeared after all is found by its labels.
        await backend.destroy(backend.reserve(request))
    else:
        assert await backend.locate(placement.handle) is not None
        await backend.destroy(placement.handle)
    assert not await backend.survey()
    assert server.sandboxes() == []


async def test_create_whose_answer_was_lost_is_taken_over(make_gateway, server, run):
    """The connection breaks while the server works: it is made once, and it is the caller's."""
    with CuttingProxy(("127.0.0.1", int(server.url.rpartition(":")[2]))) as proxy:
        gateway = make_gateway(server=f"http://{proxy.address}")
        async with gateway.backend() as backend:
            request = await gateway.request(backend)
            creating = asyncio.create_task(backend.create(request, backend.reserve(request)))
            # Until the server has its container, and has not answered.
            while not server.sandboxes():
                assert not creating.done()
                await asyncio.sleep(0.02)
            proxy.cut()
            placement = await creating
            assert await run(placement, "echo works") == (0, "works\n")
            assert [each["id"] for each in server.sandboxes()] == [placement.handle["id"]]
            await backend.destroy(placement.handle)


async def test_create_whose_caller_goes_away_leaves_nothing(gateway, backend, server):
    request = await gateway.request(backend)
    creating = asyncio.create_task(backend.create(request, backend.reserve(request)))
    await asyncio.sleep(0.2)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert server.sandboxes() == []


async def test_connections_that_break_are_made_anew(gateway, backend, server, run):
    """Through the server: its restart ends every tunnel, and the next call finds the way again."""
    async with gateway.backend(reach="server") as through:
        placement = await gateway.create(through)
        assert await run(placement, "echo before") == (0, "before\n")
        with _away(server):
            pass
        assert await run(placement, "echo after") == (0, "after\n")
        await through.destroy(placement.handle)


async def test_bytes_pass_through_the_server_as_they_are(gateway, run):
    """Both ways, more than any buffer holds, with every byte that there is."""
    async with gateway.backend(reach="server") as backend:
        placement = await gateway.create(backend)
        code, output = await run(placement, "python3 -c 'import sys; sys.stdout.write(\"x\" * 5_000_000)' | wc -c")
        assert (code, output) == (0, "5000000\n")
        code, output = await run(placement, "seq 1 200000 | tee all; md5sum < all")
        assert code == 0
        assert output.startswith("1\n2\n3\n")
        assert len(output) > 1_000_000
        handle = await backend.pause(placement.handle, memory=True)
        resumed = await backend.resume(handle)
        assert await run(resumed, "tail -n 1 all") == (0, "200000\n")
        await backend.destroy(handle)


async def test_gateway_does_not_start_on_a_server_that_it_cannot_use(gateway, server):
    for settings, words in (
        ({"api_key": "another"}, "api_key"),
        ({"lifetime": 90_000}, "exceeds configured maximum"),
        ({"server": "http://127.0.0.1:9"}, "127.0.0.1:9"),
        ({"severs": "x"}, "severs"),
        ({"ca": "/nowhere"}, "/nowhere"),
    ):
        with pytest.raises(FailedPrecondition, match=words):
            async with gateway.backend(**settings):
                pass
    assert server.sandboxes() == []


async def test_doctor_says_what_the_server_is_and_what_is_wrong_with_it(gateway, server):
    def rows(**settings):
        return asyncio.to_thread(type(backend).diagnose, gateway.context(**settings).settings)

    async with gateway.backend() as backend:
        (what, works, how), agents, rules = await rows()
        assert (what, works) == ("OpenSandbox server", True)
        assert "1.1.1" in how
        assert "docker" in how
        assert agents == ("agents", True, "sandgate's own, in each sandbox")
        assert rules[1] is True
        assert "dns+nft" in rules[2]
        assert [works for _, works, _ in await rows(api_key="another")] == [False]
        assert [works for _, works, _ in await rows(server="ftp://x")] == [False]
        assert server.sandboxes() == []


async def test_server_without_ports_for_more_says_so_and_can_be_asked_later(gateway, backend, server):
    """Two ports of its range go to each sandbox, and here all are taken."""
    request = await gateway.request(backend)
    with contextlib.ExitStack() as taken:
        for port in server.ports:
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(ResourceExhausted) as refused:
            await backend.create(request, backend.reserve(request))
    assert refused.value.retry_after
    await backend.destroy((await gateway.create(backend)).handle)


async def test_egress_sidecar_is_offered_where_it_keeps_addresses_too(make_gateway, start_server):
    """Found out without making a sandbox: none could be made here, as there is no such image."""
    found = {}
    for mode in ("dns", "dns+nft"):
        with start_server(extra=f'[egress]\nimage = "no-such-image:none"\nmode = "{mode}"') as server:
            async with make_gateway(**server.settings).backend() as backend:
                found[mode] = {each.value for each in backend.capabilities}
    assert found["dns+nft"] - found["dns"] == {"network rules", "switching internet access off"}
