"""What commands wrote: kept once, in order, within bounds, over pauses and restarts, and after the end of the sandbox."""

from __future__ import annotations

import asyncio

import pytest

from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.core.v1 import logs_pb2
from sandgate_core import clock, command_logs
from sandgate_errors import InvalidArgument, SandboxNotFound
from sandgate_plugin_api import Capability

SECOND = clock.MICROSECONDS


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Everything that takes seconds takes hundredths."""
    for name in ("_FLUSH", "_LOOK", "_RETRY"):
        monkeypatch.setattr(command_logs, name, 0.02)
    monkeypatch.setattr(command_logs, "_SETTLING", 0)


async def logs(client, sandbox, *, limit=1000, commands=True, **fields):
    answer = await client.call("GetLogs", id=sandbox, limit=limit, **fields)
    return [line for line in answer.lines if not commands or line.logger != "sandgate"]


async def until_written(client, sandbox, *texts, **fields):
    """Waits until exactly these lines are there."""
    async with asyncio.timeout(30):
        while (found := [line.message for line in await logs(client, sandbox, **fields)]) != list(texts):
            assert len(found) <= len(texts), found
            await asyncio.sleep(0.02)


async def stored(deployment):
    return [row[0] for row in await deployment.sql("SELECT size FROM command_logs ORDER BY sandbox_id, number")]


async def until(question):
    """Waits until the answer is true."""
    async with asyncio.timeout(30):
        while not await question():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_lines_are_among_the_changes_of_state_in_the_order_of_time(deployment, world):
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        agent = world.boxes[sandbox].agent
        assert agent.inits[-1].log_commands == agent_pb2.LOG_COMMANDS_ALL
        await agent.write("one", tag="job")
        await agent.write("two", stream=agent_pb2.CommandLine.STREAM_STDERR)
        await agent.write("three", stream=agent_pb2.CommandLine.STREAM_PTY)
        await until_written(core.owner, sandbox, "one", "two", "three")
        lines = await logs(core.owner, sandbox, commands=False)
        assert [line.logger for line in lines] == ["sandgate", "sandgate", "process", "process", "terminal"]
        times = [line.time.ToMicroseconds() for line in lines]
        assert times == sorted(times)
        one, two, three = lines[2:]
        assert dict(one.fields) == {"pid": "7", "stream": "stdout", "tag": "job"}
        assert dict(three.fields) == {"pid": "7", "stream": "pty"}
        assert (one.level, two.level) == (logs_pb2.LOG_LEVEL_INFO, logs_pb2.LOG_LEVEL_WARN)
        backward = await logs(core.owner, sandbox, commands=False, backward=True)
        assert backward == lines[::-1]
        assert await logs(core.owner, sandbox, limit=2, backward=True) == [three, two]
        assert await logs(core.owner, sandbox, since=two.time) == [two, three]
        assert await logs(core.owner, sandbox, until=two.time, backward=True) == [two, one]
        assert await logs(core.owner, sandbox, level=logs_pb2.LOG_LEVEL_WARN) == [two]
        assert await logs(core.owner, sandbox, search="hre") == [three]


async def test_lines_outlive_the_core_and_the_sandbox_and_none_comes_twice(deployment, world):
    async with deployment.core(log_commands="tagged") as core:
        sandbox = (await core.owner.create()).id
        agent = world.boxes[sandbox].agent
        assert agent.inits[-1].log_commands == agent_pb2.LOG_COMMANDS_TAGGED
        await agent.write("one", "two")
        await until_written(core.owner, sandbox, "one", "two")
    # The agent has all of them still, and one more by now.
    await agent.write("three")
    async with deployment.core(log_commands="tagged") as core:
        await until_written(core.owner, sandbox, "one", "two", "three")
        assert agent.followed[-1] == (agent.journal, 2)
        await core.owner.call("Kill", id=sandbox)
        await until_written(core.owner, sandbox, "one", "two", "three")
        assert (await logs(core.owner, sandbox, commands=False))[-1].fields["to"] == "killed"
    async with deployment.core() as core:
        await until_written(core.owner, sandbox, "one", "two", "three")


async def test_lines_outlive_a_pause_and_go_on_with_the_agent_that_comes_after_it(deployment, world):
    deployment.backend.capabilities = frozenset({Capability.PAUSE_FILESYSTEM})
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        await world.boxes[sandbox].agent.write("before")
        await until_written(core.owner, sandbox, "before")
        await core.owner.call("Pause", id=sandbox, memory=False)
        await until_written(core.owner, sandbox, "before")
        await core.owner.call("Connect", id=sandbox, timeout={"seconds": 60})
        await world.boxes[sandbox].agent.write("after")
        await until_written(core.owner, sandbox, "before", "after")


async def test_nothing_is_asked_of_agents_and_nothing_kept_unless_it_is_wanted(deployment, world):
    async with deployment.core() as core:
        sandbox = (await core.owner.create()).id
        agent = world.boxes[sandbox].agent
        await agent.write("unheard")
        await asyncio.sleep(0.2)
        assert agent.inits[-1].log_commands == agent_pb2.LOG_COMMANDS_NONE
        assert agent.followed == []
        assert await logs(core.owner, sandbox) == []
    assert await stored(deployment) == []


async def test_lines_are_bounded_and_the_newest_stay(deployment, world, monkeypatch):
    monkeypatch.setattr(command_logs, "ROOM", 100_000)
    monkeypatch.setattr(command_logs, "_PIECE", 10_000)
    monkeypatch.setattr(command_logs, "_SMALL", 2_000)
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        texts = [f"{number:0936}" for number in range(300)]
        await world.boxes[sandbox].agent.write(*texts)

        async def written():
            newest = await logs(core.owner, sandbox, limit=1, backward=True)
            return [line.message for line in newest] == texts[-1:] and 0 < sum(await stored(deployment)) <= 100_000

        await until(written)
        kept = [line.message for line in await logs(core.owner, sandbox)]
        assert 50 < len(kept) <= 100
        assert kept == texts[-len(kept) :]


async def test_few_lines_at_a_time_make_few_rows(deployment, world):
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        texts = [f"line {number}" for number in range(80)]
        for number, text in enumerate(texts):
            await world.boxes[sandbox].agent.write(text)
            if number % 10 == 0:
                await until_written(core.owner, sandbox, *texts[: number + 1])
            await asyncio.sleep(0.03)
        await until_written(core.owner, sandbox, *texts)
        assert len(await stored(deployment)) < 40
        assert [line.message for line in await logs(core.owner, sandbox, backward=True)] == texts[::-1]


async def test_old_lines_are_forgotten(deployment, world, monkeypatch):
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        await world.boxes[sandbox].agent.write("old", at=clock.now() - 8 * 24 * 3600 * SECOND)
        await until_written(core.owner, sandbox, "old")
        await until(lambda: stored(deployment))
    async with deployment.core() as core:
        await until_written(core.owner, sandbox)


async def test_page_of_a_thousand_is_never_within_one_millisecond(deployment, world):
    """Clients go on from the last line's millisecond: they would never get past it."""
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        now = clock.now()
        await world.boxes[sandbox].agent.write(*map(str, range(2000)), at=now - SECOND)

        async def arrived():
            return len(await logs(core.owner, sandbox)) == 1000

        await until(arrived)
        seen: list[str] = []
        since = now - 2 * SECOND
        for _ in range(10):
            page = await logs(core.owner, sandbox, since=timestamp(since))
            seen += [line.message for line in page if line.message not in seen]
            since = page[-1].time.ToMicroseconds() // 1000 * 1000
        assert seen == [*map(str, range(2000))]


def timestamp(microseconds):
    found = agent_pb2.CommandLine().time
    found.FromMicroseconds(microseconds)
    return found


async def test_agent_that_was_tampered_with_harms_no_other(deployment, world):
    async with deployment.core(log_commands="all") as core:
        bad, good = [(await core.owner.create()).id for _ in range(2)]
        agent = world.boxes[bad].agent
        agent.journal = 2**64 - 1
        for number, seconds in ((2**64 - 1, 1), (3, 2**62), (4, -(2**62)), (9, 0)):
            line = agent_pb2.CommandLine(number=number, pid=1, stream=77, text="\0", tag="t" * 1000)
            line.time.seconds = seconds
            line.time.nanos = -1
            agent.lines.append(line)
        await agent.write()
        await until_written(core.owner, bad, "2 lines were left out", "\0", "\0", "4 lines were left out", "\0")
        lines = await logs(core.owner, bad)
        assert [line.time.ToMicroseconds() for line in lines] == sorted(line.time.ToMicroseconds() for line in lines)
        assert lines[-1].time.ToMicroseconds() <= clock.now() + SECOND
        agent.lines = [agent_pb2.CommandLine(number=10, text="x" * 2 * 1024 * 1024)] * 11
        await agent.write()
        await world.boxes[good].agent.write("well")
        await until_written(core.owner, good, "well")
        await core.owner.call("Kill", id=bad)


async def test_logs_of_another_team_and_of_nobody_are_not_found(deployment, world):
    async with deployment.core(log_commands="all") as core:
        sandbox = (await core.owner.create()).id
        key = (await core.internal.call("CreateKey", name="other", owner="other", create_team=True)).secret
        for client, name in ((core.client(("api-key", key)), sandbox), (core.owner, "i" + "0" * 20)):
            with pytest.raises(SandboxNotFound):
                await logs(client, name)
        for limit in (0, 1001):
            with pytest.raises(InvalidArgument):
                await logs(core.owner, sandbox, limit=limit)
