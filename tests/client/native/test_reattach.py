"""Handles over cuts and restarts: byte for byte what the command wrote, or an error, and never a made-up end (X11, X12)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sandgate import (
    AsyncSandbox,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxState,
    TimeoutException,
)
from sandgate.client import blocking, steps, waiting
from sandgate_testing.cutting_proxy import CuttingProxy
from sandgate_testing.either import done
from sandgate_testing.gateway import Gateway, wait_until

#: Two pieces each, and fewer in all than the agent retains, however long a gateway takes to come back.
_COUNT = 30
COUNTER = f"for n in $(seq {_COUNT}); do printf '%d\\n' $n; printf 'e%d\\n' $n >&2; sleep 0.1; done; exit 9"
COUNTED = "".join(f"{n}\n" for n in range(1, _COUNT + 1))
COUNTED_ERRORS = "".join(f"e{n}\n" for n in range(1, _COUNT + 1))


@pytest.fixture
async def box(kind: Any, open_gateway: tuple[Gateway, int], proxy: CuttingProxy):
    """A sandbox whose client comes through the proxy, with an API key."""
    box = await done(kind.create(core=proxy.address, api_key=open_gateway[0].api_key))
    yield box
    await done(box.close())


async def test_cuts_in_the_middle_of_the_output_cost_no_byte(box, proxy):
    handle = await done(box.commands.run(COUNTER, background=True))
    seen: list[str] = []

    def cut_now_and_then(text: str) -> None:
        seen.append(text)
        if len(seen) % 7 == 0:
            proxy.cut()

    with pytest.raises(CommandExitException) as ended:
        await done(handle.wait(on_stdout=cut_now_and_then))
    assert (ended.value.stdout, ended.value.stderr) == (COUNTED, COUNTED_ERRORS)
    assert "".join(seen) == COUNTED
    assert ended.value.exit_code == 9
    assert handle.reconnects >= 3
    assert _COUNT <= handle.last_seq <= 2 * _COUNT


async def test_a_connection_that_dies_without_a_word_is_noticed(kind, open_gateway, proxy, monkeypatch):
    """By pings of its own, here more often than usual: the core takes more for an attack."""
    hasty = {"grpc.keepalive_time_ms": 6000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = tuple({**dict(steps.OPTIONS), **hasty}.items())
    for driver in (blocking, waiting):
        monkeypatch.setattr(driver, "OPTIONS", options)
    box = await done(kind.create(core=proxy.address, api_key=open_gateway[0].api_key))
    handle = await done(box.commands.run("echo first; sleep 2; echo last", background=True))
    assert (await done(handle.read())).stdout == b"first\n"
    # What the library asks of itself after data is answered by then.
    await asyncio.sleep(1)
    proxy.silence()
    assert (await done(handle.wait())).stdout == "first\nlast\n"
    assert handle.reconnects == 1
    await done(box.close())


async def test_a_core_that_is_killed_during_output_costs_no_byte(box, open_gateway):
    gateway, _ = open_gateway
    handle = await done(box.commands.run(COUNTER, background=True))
    old: list[int] = []

    def kill_once(_text: str) -> None:
        if not old:
            old.append(gateway.kill_core())

    with pytest.raises(CommandExitException) as ended:
        await done(handle.wait(on_stdout=kill_once))
    assert (ended.value.stdout, ended.value.stderr) == (COUNTED, COUNTED_ERRORS)
    assert ended.value.exit_code == 9
    assert handle.reconnects >= 1
    gateway.wait_for_new_core(*old)


async def test_a_gateway_that_is_stopped_and_started_costs_no_byte(kind, make_gateway: Callable[..., Gateway]):
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    box = await done(kind.create(state_dir=gateway.state_dir))
    handle = await done(box.commands.run(COUNTER, background=True))
    restarted = threading.Thread(target=lambda: (gateway.stop(), gateway.start()))
    began = False
    while (output := await done(handle.read())) is not None:
        if not began and output.stdout:
            restarted.start()
            began = True
    restarted.join()
    assert (handle.stdout, handle.stderr, handle.exit_code) == (COUNTED, COUNTED_ERRORS, 9)
    assert handle.reconnects >= 1
    assert await done(box.kill()) is True
    await done(box.close())
    gateway.stop()


async def test_the_end_is_told_when_it_came_during_a_cut(box, proxy):
    """What a command wrote last, and how it ended, is there for who comes back within half a minute."""
    handle = await done(box.commands.run("echo first; sleep 0.5; echo last; exit 6", background=True))
    assert (await done(handle.read())).stdout == b"first\n"
    proxy.refuse()
    await asyncio.sleep(1)
    proxy.resume()
    with pytest.raises(CommandExitException) as ended:
        await done(handle.wait())
    assert (ended.value.stdout, ended.value.exit_code) == ("first\nlast\n", 6)


async def test_thousands_of_small_writes_without_a_gateway_are_had_later(box, proxy, open_gateway):
    """X11, X13: two megabytes are kept, whether a program writes them in lines or in one go."""
    lines = 3000
    script = f"for n in $(seq {lines}); do echo $n; done; touch /tmp/written; exit 4"
    handle = await done(box.commands.run(f"echo 0; read go; {script}", background=True, stdin=True))
    assert (await done(handle.read())).stdout == b"0\n"
    proxy.refuse()
    with contextlib.closing(Sandbox(box.sandbox_id, state_dir=open_gateway[0].state_dir)) as other:
        other.commands.send_stdin(handle.pid, "\n")
        wait_until(lambda: other.files.exists("/tmp/written"))
    proxy.resume()
    with pytest.raises(CommandExitException) as ended:
        await done(handle.wait())
    assert ended.value.stdout == "".join(f"{n}\n" for n in range(lines + 1))
    assert ended.value.exit_code == 4
    assert handle.reconnects >= 1


async def test_output_beyond_what_is_retained_is_an_error(box, proxy, open_gateway):
    handle = await done(
        box.commands.run(
            "echo first; sleep 0.3; head -c 20000000 /dev/zero; echo done > /tmp/done; exec sleep 60", True
        )
    )
    assert (await done(handle.read())).stdout == b"first\n"
    proxy.refuse()
    with contextlib.closing(Sandbox(box.sandbox_id, state_dir=open_gateway[0].state_dir)) as other:
        wait_until(lambda: other.files.exists("/tmp/done"))
    proxy.resume()
    for _ in range(2):
        with pytest.raises(SandboxException, match="not retained"):
            await done(handle.wait())
    assert handle.exit_code is None


async def test_fast_output_over_cuts_is_whole_or_an_error(box, proxy):
    """Nothing that a cut does to a fast stream may look like its plain end."""
    command = "seq 1 3000000; exit 3"
    handle = await done(box.commands.run(command, background=True))
    pieces = 0
    failure: SandboxException | None = None
    try:
        while await done(handle.read()) is not None:
            pieces += 1
            if pieces == 100:
                proxy.cut()
    except SandboxException as error:
        failure = error
    if failure is None:
        assert handle.stdout == "".join(f"{n}\n" for n in range(1, 3_000_001))
        assert handle.exit_code == 3
    else:
        assert "lost" in str(failure)
        assert handle.exit_code is None


async def test_the_time_limit_is_told_over_a_cut(box, proxy):
    handle = await done(box.commands.run("echo on; exec sleep 60", background=True, timeout=4))
    assert (await done(handle.read())).stdout == b"on\n"
    proxy.cut()
    with pytest.raises(TimeoutException):
        await done(handle.wait())


async def test_a_sandbox_killed_during_a_cut_is_told_as_gone(box, proxy, open_gateway):
    handle = await done(box.commands.run("echo on; exec sleep 60", background=True))
    await done(handle.read())
    proxy.refuse()
    other = Sandbox(box.sandbox_id, state_dir=open_gateway[0].state_dir)
    assert other.kill() is True
    other.close()
    proxy.resume()
    with pytest.raises(NotFoundException):
        await done(handle.wait())


async def test_a_sandbox_that_dies_during_output_is_told_as_gone(kind, gateway):
    """B05, B16: its agent is killed with it; neither a made-up end nor a wait for its return."""
    box = await done(kind.create(state_dir=gateway.state_dir))
    handle = await done(box.commands.run("while :; do echo on; sleep 0.05; done", background=True, timeout=0))
    await done(handle.read())
    for pid in gateway.boxes()[box.sandbox_id].processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(NotFoundException, match=box.sandbox_id):
            await done(handle.wait())
    assert (handle.exit_code, handle.reconnects) == (None, 0)
    await done(box.close())


async def test_a_start_that_is_cut_is_not_repeated(open_gateway):
    """The proxy breaks off each connection: the error says that it is not known, and one process runs at most."""
    gateway, port = open_gateway
    with Sandbox.create(state_dir=gateway.state_dir) as box, CuttingProxy(("127.0.0.1", port)) as proxy:
        remote = Sandbox(box.sandbox_id, core=proxy.address, api_key=gateway.api_key)
        proxy.refuse()
        with pytest.raises(SandboxException, match="may run or not"):
            remote.commands.run("sleep 30")
        remote.close()
        assert len(box.commands.list()) <= 1


async def test_disconnect_while_the_gateway_is_away_ends_the_reading(kind, open_gateway, proxy):
    box = await done(kind.create(core=proxy.address, api_key=open_gateway[0].api_key))
    handle = await done(box.commands.run("echo on; exec sleep 60", background=True))
    await done(handle.read())
    proxy.refuse()
    # The asynchronous one is its loop's own.
    later = asyncio.get_running_loop().call_later if kind is AsyncSandbox else threading.Timer
    leaving = later(0.5, handle.disconnect)
    if isinstance(leaving, threading.Timer):
        leaving.start()
    assert await done(handle.read()) is None
    await done(box.close())


async def test_a_paused_sandbox_is_waited_for(kind, gateway):
    """X12, X19: its handle goes on where it was, and does not wake it."""
    box = await done(kind.create(state_dir=gateway.state_dir))
    handle = await done(box.commands.run("echo 1; sleep 1; echo 2", background=True))
    assert (await done(handle.read())).stdout == b"1\n"
    paused = gateway.rest("POST", f"/sandboxes/{box.sandbox_id}/pause").status
    if paused == 501:
        await done(box.kill())
        await done(box.close())
        pytest.skip("this gateway does not pause")
    assert paused == 204
    assert (await done(box.get_info())).state is SandboxState.PAUSED
    timer = threading.Timer(
        1.5, lambda: gateway.rest("POST", f"/v2/sandboxes/{box.sandbox_id}/connect", {"timeout": 60})
    )
    timer.start()
    try:
        assert (await done(handle.wait())).stdout == "1\n2\n"
    finally:
        timer.join()
        await done(box.kill())
        await done(box.close())


async def test_nothing_is_left_of_a_client_that_vanishes(open_gateway):
    """A client that is gone without a word leaves the command, and no stream that holds it up."""
    gateway, port = open_gateway
    with CuttingProxy(("127.0.0.1", port)) as proxy:
        box = await AsyncSandbox.create(core=proxy.address, api_key=gateway.api_key)
        handle = await box.commands.run("yes | head -c 50000000; echo done > /tmp/done; exec sleep 60", background=True)
        proxy.refuse()
        with contextlib.closing(Sandbox(box.sandbox_id, state_dir=gateway.state_dir)) as other:
            wait_until(lambda: other.files.exists("/tmp/done"))
        handle.disconnect()
        await box.close()
