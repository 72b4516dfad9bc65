"""Output and ends: behaviour.md sections 4 and 5."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.agent_process import Agent, Running, alive, code_of, eventually, gone

KILL, TERM = process_pb2.SIGNAL_SIGKILL, process_pb2.SIGNAL_SIGTERM


async def test_bytes_pass_unchanged(agent: Agent) -> None:
    """O2, O6, B09: no decoding, no joining."""
    result = await agent.run("python3", "-c", "import os; os.write(1, bytes(range(256)) * 64)")
    assert result.stdout == bytes(range(256)) * 64


async def test_cut_character_is_not_waited_for(agent: Agent) -> None:
    """O2."""
    async with agent.running("/bin/sh", "-c", "printf '\\342'; read x; printf '\\202\\254'", stdin=True) as running:
        assert await running.read_until(b"\xe2") == b"\xe2"
        await running.send(b"\n")
        assert (await running.rest()).stdout == b"\x82\xac"


async def test_much_output_arrives_complete_and_in_order(agent: Agent) -> None:
    """O1, O3, O17, B11: a full stderr does not block stdout."""
    script = (
        "import sys\nfor i in range(20000):\n    sys.stdout.write(f'{i:0>999}\\n'); sys.stderr.write(f'{i:0>332}\\n')\n"
    )
    result = await agent.run("python3", "-c", script)
    expected = hashlib.sha256("".join(f"{i:0>999}\n" for i in range(20000)).encode())
    assert hashlib.sha256(result.stdout).digest() == expected.digest()
    assert len(result.stderr) == 333 * 20000
    assert max(len(piece) for piece in result.pieces) <= 32 * 1024


async def test_end_waits_for_background_children_that_hold_the_pipe(agent: Agent) -> None:
    """O8."""
    result = await agent.sh("(sleep 0.3; echo late) & echo early")
    assert result.text == "early\nlate\n"


async def test_redirected_child_does_not_hold_the_end_up_and_lives_on(agent: Agent) -> None:
    """O8, B01, X7."""
    result = await agent.sh("sleep 60 >/dev/null 2>&1 & echo $!")
    child = int(result.text)
    assert alive(child)
    os.kill(child, signal.SIGKILL)


async def test_killed_process_reports_the_signal(agent: Agent) -> None:
    """O12, B05."""
    result = await agent.sh("kill -9 $$")
    assert result.end is not None
    assert (result.end.exit_code, result.end.exited) == (-1, False)
    assert result.end.status == result.end.error == "signal: killed"
    assert (await agent.sh("kill -15 $$")).end.status == "signal: terminated"  # type: ignore[union-attr]
    assert (await agent.sh("sh -c 'kill -9 $$'; exit $?")).exit_code == 137


@pytest.mark.parametrize("number", [KILL, TERM])
async def test_signal_ends_the_stream_though_a_child_holds_the_pipe(any_agent: Agent, number: int) -> None:
    """O9, A26, A27, X3: a child that left the group holds the pipe, and is spared where only the group is meant."""
    script = "setsid sh -c 'echo $$; exec sleep 60' & exec sleep 61"
    async with any_agent.running("/bin/sh", "-c", script, term_grace=Duration()) as running:
        child = int(await running.read_until(b"\n"))
        await running.signal(number)
        result = await running.rest()
        assert result.exit_code == -1
        assert await any_agent.live() == []
        assert not alive(running.pid), "not reaped at the end event (A27)"
        assert alive(child)
        os.kill(child, signal.SIGKILL)


async def test_kill_reaches_children_in_the_group(any_agent: Agent) -> None:
    """X9, B03."""
    async with any_agent.running("/bin/sh", "-c", "sleep 60 & echo $!; wait") as running:
        child = int(await running.read_until(b"\n"))
        await running.signal(KILL)
        await running.rest()
        await eventually(lambda: gone(child))


async def test_kill_of_a_finished_leader_ends_what_holds_the_pipe(agent: Agent) -> None:
    """O9: the leader was reaped long ago; its group is still named by it."""
    async with agent.running("/bin/sh", "-c", "sleep 60 & echo $!") as running:
        child = int(await running.read_until(b"\n"))
        await eventually(lambda: not alive(running.pid))
        await running.signal(KILL)
        assert (await running.rest()).exit_code == 0
        await eventually(lambda: gone(child))


async def test_caught_sigterm_leaves_the_program_running(agent: Agent) -> None:
    """A28."""
    script = "trap 'echo caught' TERM; echo ready; while :; do sleep 0.05; done"
    async with agent.running("/bin/sh", "-c", script) as running:
        await running.read_until(b"ready\n")
        await running.signal(TERM)
        await running.read_until(b"caught\n")
        assert [info.pid for info in await agent.live()] == [running.pid]


async def test_output_before_a_kill_is_not_lost(agent: Agent) -> None:
    """O7."""
    async with agent.running("/bin/sh", "-c", "head -c 100000 /dev/zero; echo done >&2; sleep 60") as running:
        seen = await running.read_until(b"done\n")
        await running.signal(KILL)
        assert len(seen) + len((await running.rest()).stdout) == 100_000 + len(b"done\n")


async def test_time_limit_kills_the_group_and_fails_the_stream(any_agent: Agent) -> None:
    """T1, T2, B03."""
    async with any_agent.running("/bin/sh", "-c", "sleep 60 & echo $!; wait", timeout_ms=400) as running:
        child = int(await running.read_until(b"\n"))
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED, "0.4 s"):
            await running.rest()
        assert await any_agent.live() == []
        await eventually(lambda: gone(child))
        assert not alive(running.pid)


async def test_time_limit_holds_while_nobody_is_attached(agent: Agent) -> None:
    """T10."""
    async with agent.running("sleep", "60", timeout_ms=400) as running:
        running.call.cancel()
        await eventually(lambda: not alive(running.pid))


async def test_others_see_the_limit_as_a_death_by_signal(agent: Agent) -> None:
    async with agent.running("sleep", "60", timeout_ms=500) as running:
        attached = Running(agent, running.pid, await running.connect())
        assert (await attached.rest()).end.status == "signal: killed"  # type: ignore[union-attr]


async def test_limit_of_zero_is_none(agent: Agent) -> None:
    """T5."""
    assert (await agent.run("sleep", "0.1", timeout_ms=0)).exit_code == 0


@pytest.mark.parametrize("value", ["-1", "1.5", "abc", "12345678901", "1e3"])
async def test_limit_that_is_no_number_is_refused(agent: Agent, value: str) -> None:
    """T4."""
    async with code_of(grpc.StatusCode.INVALID_ARGUMENT):
        await agent.run("true", timeout_ms=value)


async def test_client_that_leaves_does_not_end_the_process(agent: Agent) -> None:
    """T8, O16: its output goes nowhere and never blocks it."""
    marker = agent.home / "written"
    async with agent.running("/bin/sh", "-c", f"sleep 0.1; head -c 5000000 /dev/zero; touch {marker}; sleep 60") as run:
        run.call.cancel()
        await eventually(marker.exists)
        assert [info.pid for info in await agent.live()] == [run.pid]


async def test_cancelled_starts_leave_only_what_runs(agent: Agent) -> None:
    """B08."""
    before = agent.descriptors()

    async def start_and_leave(number: int) -> None:
        call = agent.start_call("sleep", "60")
        await asyncio.sleep(number % 30 / 1000)
        call.cancel()

    await asyncio.gather(*(start_and_leave(number) for number in range(200)))
    assert (await agent.run("echo", "ok")).text == "ok\n"
    listed = await agent.live()
    assert all(alive(info.pid) for info in listed)
    for info in listed:
        await Running(agent, info.pid, None).signal(KILL)
    await eventually(lambda: agent.descriptors() <= before + 2)
    assert await agent.live() == []


async def test_slow_follower_slows_the_process_and_loses_nothing(agent: Agent) -> None:
    """O15."""
    total = 40_000_000
    async with agent.running("/bin/sh", "-c", f"head -c {total} /dev/zero; echo end >&2") as running:
        await asyncio.sleep(0.7)
        assert [info.pid for info in await agent.live()] == [running.pid], "nobody held the writer up"
        assert len((await running.rest()).stdout) == total


async def test_stalled_follower_that_leaves_frees_the_process(agent: Agent) -> None:
    """O15, A4: leaving resumes the reading at once."""
    marker = agent.home / "written"
    async with agent.running("/bin/sh", "-c", f"head -c 40000000 /dev/zero; touch {marker}; sleep 60") as running:
        await asyncio.sleep(0.3)
        assert not marker.exists()
        running.call.cancel()
        await eventually(marker.exists)


async def test_kill_ends_a_process_whose_follower_stalls(agent: Agent) -> None:
    """A27: a client that does not read cannot keep a killed process in the list."""
    async with agent.running("cat", "/dev/zero") as running:
        await asyncio.sleep(0.3)
        await running.signal(KILL)

        async with asyncio.timeout(10):
            while await agent.live():  # noqa: ASYNC110 -- polling is what a client can do
                await asyncio.sleep(0.01)


async def test_keepalive_comes_while_nothing_else_does(agent: Agent) -> None:
    """O14."""
    result = await agent.sh("sleep 2.5; echo x", keepalive=1)
    assert result.keepalives == 2
    noisy = await agent.sh("for i in 1 2 3 4 5 6; do echo; sleep 0.3; done", keepalive=1)
    assert noisy.keepalives == 0


async def test_memory_stays_flat_under_much_output(agent: Agent) -> None:
    async def drain() -> None:
        async for _ in agent.start_call("head", "-c", "200000000", "/dev/zero"):
            pass

    await drain()
    before = _resident(agent.pid)
    await drain()
    assert _resident(agent.pid) < before + 20_000


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


async def test_stopping_the_agent_ends_streams_and_everything_started(any_agent: Agent) -> None:
    """docs/architecture.md: SIGTERM. What left its group and session ends too."""
    async with any_agent.running("/bin/sh", "-c", "setsid sh -c 'echo $$; exec sleep 60' & sleep 61") as running:
        daemon = int(await running.read_until(b"\n"))
        spawners = any_agent.spawners()
        assert len(spawners) >= 2
        any_agent.process.terminate()  # type: ignore[union-attr]
        async with code_of(grpc.StatusCode.UNAVAILABLE):
            await running.rest()
        assert await asyncio.to_thread(any_agent.process.wait, 30) == 0  # type: ignore[union-attr]
        for pid in (running.pid, daemon, *spawners):
            await eventually(lambda pid=pid: gone(pid))


async def test_killed_agent_takes_everything_with_it(agent: Agent) -> None:
    async with agent.running("/bin/sh", "-c", "setsid sh -c 'echo $$; exec sleep 60' & sleep 61") as running:
        daemon = int(await running.read_until(b"\n"))
        agent.process.kill()  # type: ignore[union-attr]
        for pid in (running.pid, daemon):
            await eventually(lambda pid=pid: gone(pid))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await running.rest()
