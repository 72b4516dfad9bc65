"""The processes that start programs, and what happens when the sandbox's code attacks them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import grpc
import pytest

from sandgate_testing.agent_process import Agent, alive, children_of, code_of, eventually, gone, name_of, state_of


def account_spawner(agent: Agent) -> int:
    return next(pid for pid in agent.spawners() if name_of(pid) == "sandgate-spawn")


async def test_exit_status_survives_the_death_of_the_spawner(any_agent: Agent) -> None:
    async with any_agent.running("/bin/sh", "-c", "echo up; read x; exit 7", stdin=True) as running:
        await running.read_until(b"up\n")
        for pid in any_agent.spawners()[1:]:
            os.kill(pid, signal.SIGKILL)
        await running.send(b"\n")
        assert (await running.rest()).exit_code == 7


async def test_killed_orphan_is_reported_and_reaped(any_agent: Agent) -> None:
    async with any_agent.running("sleep", "60") as running:
        for pid in any_agent.spawners()[1:]:
            os.kill(pid, signal.SIGKILL)
        await running.signal(9)
        assert (await running.rest()).exit_code == -1
        assert not alive(running.pid)


async def test_next_start_makes_a_new_spawner(any_agent: Agent) -> None:
    await any_agent.run("true")
    old = any_agent.spawners()[1:]
    for pid in old:
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda pid=pid: not alive(pid))
    assert (await any_agent.run("echo", "ok")).text == "ok\n"
    assert not set(any_agent.spawners()) & set(old)


async def test_starts_while_spawners_are_being_killed_succeed_or_say_why(agent: Agent) -> None:
    stop = False
    refusals: list[grpc.StatusCode] = []

    async def attack() -> None:
        while not stop:
            for pid in agent.spawners()[1:]:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)

    attacker = asyncio.create_task(attack())
    try:
        for _ in range(100):
            try:
                assert (await agent.run("echo", "ok")).exit_code == 0
            except grpc.aio.AioRpcError as error:
                refusals.append(error.code())
    finally:
        stop = True
        await attacker
    assert set(refusals) <= {grpc.StatusCode.UNAVAILABLE}
    assert (await agent.run("echo", "ok")).text == "ok\n"
    assert await agent.live() == []


async def test_ordinary_signals_do_not_end_a_spawner(agent: Agent) -> None:
    """`pkill -u user` by a careless script."""
    await agent.run("true")
    spawner = account_spawner(agent)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(spawner, number)
    assert (await agent.run("echo", "ok")).text == "ok\n"
    assert alive(spawner)


@pytest.mark.timeout(60)
async def test_stopped_spawner_is_replaced(agent: Agent) -> None:
    await agent.run("true")
    os.kill(account_spawner(agent), signal.SIGSTOP)
    async with code_of(grpc.StatusCode.UNAVAILABLE, "does not answer"):
        await agent.run("true")
    assert (await agent.run("echo", "ok")).text == "ok\n"


async def test_agent_ends_when_the_root_spawner_dies(agent: Agent) -> None:
    os.kill(agent.spawners()[0], signal.SIGKILL)
    assert await asyncio.to_thread(agent.process.wait, 10) == 1  # type: ignore[union-attr]


async def test_users_cannot_trace_or_signal_what_starts_programs_of_others(switching: Agent) -> None:
    await switching.run("true", user="root")
    for pid in (switching.pid, *switching.spawners()):
        # The kernel gives the memory of a process that must not be traced to root.
        assert os.stat(f"/proc/{pid}/mem").st_uid == 0
    result = await switching.sh(f"kill -9 {switching.spawners()[0]}; kill -9 {switching.pid}")
    assert result.stderr.count(b"not permitted") == 2


async def test_ended_processes_leave_no_zombie_and_no_descriptor(agent: Agent) -> None:
    await asyncio.gather(*(agent.run("true") for _ in range(20)))
    before = agent.descriptors()
    for _ in range(5):
        await asyncio.gather(*(agent.sh("exit 1", stdin=True) for _ in range(20)))
    assert agent.descriptors() <= before
    assert not [pid for pid in agent.spawners() for child in children_of(pid) if state_of(child) == "Z"]


async def test_orphans_of_ended_commands_are_reaped(agent: Agent) -> None:
    await agent.sh("(sleep 0.1 &) >/dev/null 2>&1")
    root = agent.spawners()[0]
    await eventually(lambda: not [pid for pid in children_of(root) if name_of(pid) != "sandgate-spawn"])


async def test_sweep_happens_though_the_agent_left_notices_unread(agent: Agent) -> None:
    """The socket then ends with a reset instead of an end of file."""
    async with agent.running("/bin/sh", "-c", "setsid sh -c 'echo $$; exec sleep 60' & sleep 61") as running:
        daemon = int(await running.read_until(b"\n"))
        root = agent.spawners()[0]
        os.kill(agent.pid, signal.SIGSTOP)
        # Orphans that end now are reported to an agent that does not read any more.
        for pid in agent.spawners()[1:]:
            os.kill(pid, signal.SIGKILL)
        os.kill(running.pid, signal.SIGKILL)
        await eventually(lambda: not alive(running.pid))
        os.kill(agent.pid, signal.SIGKILL)
        await eventually(lambda: gone(daemon))
        await eventually(lambda: gone(root))
        running.call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await running.rest()
