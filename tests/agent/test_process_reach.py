"""What signals and the time limit reach: behaviour.md 15.2, traps B03 and B01."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.agent_process import Agent, Running, alive, code_of, eventually, gone

KILL, TERM = process_pb2.SIGNAL_SIGKILL, process_pb2.SIGNAL_SIGTERM
PTY = process_pb2.PTY(size=process_pb2.PTY.Size(cols=80, rows=24))

#: Leaves group, session and parent, as daemons do, and says its pid.
DAEMON = "(setsid sh -c 'echo $$; exec env -i sleep 600' &)"
#: The same, deaf to SIGTERM.
DEAF_DAEMON = "(setsid sh -c \"trap '' TERM; echo \\$\\$; while :; do sleep 0.1; done\" &)"


@pytest.fixture
def survivors() -> Iterator[list[int]]:
    """Pids to be killed after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


async def next_pid(running: Running) -> int:
    return int((await running.read_until(b"\n")).split()[-1])


@pytest.mark.parametrize("number", [KILL, TERM])
async def test_signal_ends_what_the_command_left_in_the_background(any_agent: Agent, number: int) -> None:
    """B03: a daemon with a session of its own, no parent and no variable of the command."""
    async with any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 601") as running:
        daemon = await next_pid(running)
        await running.signal(number)
        await running.rest()
        await eventually(lambda: gone(daemon))


async def test_after_the_end_of_a_killed_command_nothing_of_it_is_left(any_agent: Agent) -> None:
    """B03: its port is free when the client hears of the end."""
    async with any_agent.running("/bin/sh", "-c", f"{DEAF_DAEMON}; sleep 601") as running:
        daemon = await next_pid(running)
        await running.signal(KILL)
        await running.rest()
        assert gone(daemon)


async def test_time_limit_ends_what_the_command_left_in_the_background(any_agent: Agent) -> None:
    """T2 as extended, B03."""
    async with any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 601", timeout_ms=700) as running:
        daemon = await next_pid(running)
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED):
            await running.rest()
        assert gone(daemon)
        assert await any_agent.live() == []


async def test_command_that_ends_by_itself_leaves_its_background_alone(any_agent: Agent, survivors: list[int]) -> None:
    """X7, B03; and a later command that is killed does not take it along (X8)."""
    for options in ({}, {"kill_tree": True}):
        result = await any_agent.sh(f"{DAEMON} 2>/dev/null >{any_agent.home}/pid", **options)
        assert result.exit_code == 0
        await eventually(lambda: (any_agent.home / "pid").read_text().endswith("\n"))
        survivors.append(int((any_agent.home / "pid").read_text()))
    async with any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 601") as running:
        await next_pid(running)
        await running.signal(KILL)
        await running.rest()
    assert [pid for pid in survivors if gone(pid)] == []


async def test_kill_spares_what_runs_beside(any_agent: Agent) -> None:
    """X8."""
    async with (
        any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 601") as running,
        any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 602") as other,
    ):
        await next_pid(running)
        daemon = await next_pid(other)
        await running.signal(KILL)
        await running.rest()
        assert alive(other.pid)
        assert alive(daemon)
        await other.signal(KILL)


async def test_kill_of_a_terminal_ends_its_jobs(any_agent: Agent) -> None:
    """Job control gives each job a group of its own."""
    async with any_agent.running("/bin/bash", "--norc", "-i", pty=PTY) as running:
        await running.send(b"sleep 603 & sleep 604 & echo jobs $(jobs -p | xargs) 'end'\n", pty=True)
        seen = await running.read_until(b" end\r\n")
        jobs = [int(word) for word in seen.rpartition(b"jobs ")[2].split()[:2]]
        await running.signal(KILL)
        await running.rest()
        assert [pid for pid in jobs if not gone(pid)] == []


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_kill_catches_what_keeps_forking(agent: Agent, busy: bool) -> None:
    """X6: frozen before it is killed, nothing forks away. Each generation leaves the group and loses its parent.

    Also where what hunts it gets less of one CPU than it does itself.
    """
    cpu = min(os.sched_getaffinity(0))
    if busy:
        for thread in map(int, os.listdir(f"/proc/{agent.pid}/task")):
            os.sched_setaffinity(thread, {cpu})
            os.setpriority(os.PRIO_PROCESS, thread, 5)
    script = agent.home / "hop"
    script.write_text(f"#!/bin/sh\necho $$ >>{agent.home}/hops\nsetsid {script} &\n")
    script.chmod(0o755)
    pin = f"taskset -p -c {cpu} $$" if busy else ":"
    async with agent.running("/bin/sh", "-c", f"{pin}; {script}; sleep 605", kill_tree=True) as running:
        await eventually(lambda: (agent.home / "hops").exists() and len((agent.home / "hops").read_text()) > 100)
        await running.signal(KILL)
        await running.rest()
    after = (agent.home / "hops").read_text()
    await asyncio.sleep(0.3)
    assert (agent.home / "hops").read_text() == after


async def test_orphans_hang_below_a_command_with_kill_tree(any_agent: Agent) -> None:
    """X4."""
    async with any_agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 606", kill_tree=True) as running:
        daemon = await next_pid(running)
        await eventually(lambda: parent_of(daemon) == running.pid)
        assert os.getpgid(running.pid) == running.pid
        await running.signal(KILL)
        await running.rest()
        assert gone(daemon)


async def test_terminal_with_kill_tree_has_both(any_agent: Agent) -> None:
    """X4 on a terminal."""
    async with any_agent.running("/bin/sh", "-c", f"tty; {DAEMON}; sleep 607", kill_tree=True, pty=PTY) as running:
        seen = await running.read_until(b"/dev/pts/")
        while seen.count(b"\n") < 2:
            seen += await running.read_until(b"\n")
        daemon = int(seen.split()[-1])
        await eventually(lambda: parent_of(daemon) == running.pid)
        await running.signal(KILL)
        await running.rest()
        assert gone(daemon)


async def test_missing_program_with_kill_tree_ends_with_127(agent: Agent) -> None:
    """P4 holds on every way of starting."""
    assert (await agent.run("/no/such/program", kill_tree=True)).exit_code == 127


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def test_limit_with_grace_asks_before_it_kills(any_agent: Agent) -> None:
    """X1: the whole group gets SIGTERM; all gone sooner ends the wait sooner."""
    script = "trap 'echo asked; exit 0' TERM; while :; do sleep 0.05; done"
    async with any_agent.running("/bin/sh", "-c", script, timeout_ms=500, term_grace=Duration(seconds=60)) as running:
        seen = b""
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED):
            async with asyncio.timeout(20):
                while True:
                    seen += (await running.call.read()).event.data.stdout
        assert seen == b"asked\n"


async def test_grace_passes_and_the_deaf_are_killed(any_agent: Agent, survivors: list[int]) -> None:
    """X1, X3: SIGKILL to the group after the grace; what has left the group is spared."""
    script = f"trap '' TERM; {DAEMON}; sh -c 'echo $$; while :; do sleep 0.1; done' & wait; wait"
    grace = Duration(nanos=300_000_000)
    async with any_agent.running("/bin/sh", "-c", script, timeout_ms=700, term_grace=grace) as running:
        text = b""
        while text.count(b"\n") < 2:
            text += await running.read_until(b"\n")
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED):
            await running.rest()
        in_group = [int(pid) for pid in text.split() if not gone(int(pid)) and os.getpgid(int(pid)) == running.pid]
        assert in_group == []
        survivors += [int(pid) for pid in text.split() if not gone(int(pid))]
        assert len(survivors) == 1


async def test_tree_gets_the_grace_and_then_the_kill(any_agent: Agent) -> None:
    """X5: SIGTERM to the whole tree, then all that is left is killed; the end comes when nothing is left."""
    script = f"{DAEMON}; {DEAF_DAEMON}; sleep 608"
    grace = Duration(nanos=300_000_000)
    options = {"timeout_ms": 700, "term_grace": grace, "kill_tree": True}
    async with any_agent.running("/bin/sh", "-c", script, **options) as running:
        text = b""
        while text.count(b"\n") < 2:
            text += await running.read_until(b"\n")
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED):
            await running.rest()
        assert [pid for pid in map(int, text.split()) if not gone(pid)] == []


@pytest.mark.parametrize("grace", [Duration(seconds=61), Duration(seconds=-1), Duration(seconds=1 << 40)])
async def test_impossible_grace_is_refused(agent: Agent, grace: Duration) -> None:
    async with code_of(grpc.StatusCode.INVALID_ARGUMENT, "term_grace"):
        await agent.run("true", term_grace=grace)


async def test_many_limits_at_once_are_kept(agent: Agent) -> None:
    """T1: a look at all processes for each of them would take longer than the limit itself."""

    async def one() -> grpc.StatusCode:
        call = agent.start_call("/bin/sh", "-c", "sleep 610 & wait", timeout_ms=3000)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with asyncio.timeout(60):
        codes = await asyncio.gather(*(one() for _ in range(300)))
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert await agent.live() == []


async def test_limit_stands_still_while_the_sandbox_does(agent: Agent) -> None:
    """T11, X2: paused for longer than the limit, the command has all of its time left."""
    async with agent.running("/bin/sh", "-c", "sleep 1; echo done", timeout_ms=2500) as running:
        stopped = [agent.pid, running.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3.5)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert (await running.rest()).text == "done\n"


async def test_cancelled_kill_is_finished(agent: Agent) -> None:
    """A caller who leaves right after asking has asked all the same."""
    async with agent.running("/bin/sh", "-c", f"{DAEMON}; sleep 609") as running:
        daemon = await next_pid(running)
        kill = asyncio.ensure_future(running.signal(KILL))
        await asyncio.sleep(0.002)
        kill.cancel()
        await asyncio.gather(kill, return_exceptions=True)
        if alive(running.pid):
            # It was cancelled before it was sent.
            await running.signal(KILL)
        await running.rest()
        assert gone(daemon)
