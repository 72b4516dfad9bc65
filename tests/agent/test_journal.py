"""Lines of commands for the gateway's logs: those that were asked for, in order, bounded, and never in a command's way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sandgate_agent import journal
from sandgate_agent.journal import LEFT_OUT, Journal, LogCommands
from sandgate_agent.output import Stream
from sandgate_api.agent.v1 import agent_pb2 as pb
from sandgate_testing.agent_process import Agent


@asynccontextmanager
async def following(agent: Agent, **known: Any) -> AsyncIterator[Any]:
    call = agent.agent.FollowLogs(pb.FollowLogsRequest(**known), metadata=agent.metadata())
    try:
        yield call
    finally:
        call.cancel()


async def lines(call: Any, count: int) -> list[pb.CommandLine]:
    found: list[pb.CommandLine] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += (await call.read()).lines
    return found


async def test_lines_come_with_process_tag_and_stream(agent: Agent) -> None:
    await agent.init(log_commands=pb.LOG_COMMANDS_ALL)
    async with following(agent) as call:
        result = await agent.run("/bin/sh", "-c", "echo out; echo err >&2; printf 'a\\r\\n\\377'", tag="job")
        found = await lines(call, 4)
    by_stream = {stream: [line.text for line in found if line.stream == stream] for stream in (1, 2)}
    assert by_stream == {1: ["out", "a", "\ufffd"], 2: ["err"]}
    assert {(line.pid, line.tag) for line in found} == {(result.pid, "job")}
    assert [line.number for line in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keeps", "texts"),
    [(pb.LOG_COMMANDS_TAGGED, ["tagged", "end"]), (pb.LOG_COMMANDS_ALL, ["untagged", "tagged", "end"])],
)
async def test_only_what_was_asked_for_is_kept(agent: Agent, keeps: int, texts: list[str]) -> None:
    await agent.sh("echo before Init asked for it", tag="early")
    await agent.init(log_commands=keeps)
    await agent.sh("echo untagged")
    await agent.sh("echo tagged", tag="job")
    await agent.sh("echo end", tag="job")
    async with following(agent) as call:
        assert [line.text for line in await lines(call, len(texts))] == texts


async def test_who_comes_again_gets_what_is_new_to_him_and_all_of_a_journal_he_does_not_know(agent: Agent) -> None:
    await agent.init(log_commands=pb.LOG_COMMANDS_ALL)
    await agent.sh("echo one; echo two")
    async with following(agent) as call:
        first = await call.read()
        assert [line.text for line in first.lines] == ["one", "two"]
    for known, texts in (
        ({"journal": first.journal, "after": 1}, ["two"]),
        ({"journal": 5, "after": 2}, ["one", "two"]),
    ):
        async with following(agent, **known) as call:
            assert [line.text for line in await lines(call, len(texts))] == texts


async def test_flood_reaches_its_reader_whole_and_the_log_in_part(agent: Agent) -> None:
    await agent.init(log_commands=pb.LOG_COMMANDS_ALL)
    script = "import sys\nfor i in range(100000): sys.stdout.write(f'{i:0>99}\\n')"
    result = await agent.run("python3", "-c", script)
    expected = hashlib.sha256("".join(f"{i:0>99}\n" for i in range(100000)).encode())
    assert hashlib.sha256(result.stdout).digest() == expected.digest()
    async with following(agent) as call:
        found: list[pb.CommandLine] = []
        async with asyncio.timeout(30):
            while LEFT_OUT not in [line.text for line in found]:
                found += (await call.read()).lines
    assert found[-1].number < 50_000
    assert all(len(line.text) == 99 or line.text == LEFT_OUT for line in found)


def recorded(*writes: bytes, keeps: LogCommands = LogCommands.ALL) -> Journal:
    kept = Journal()
    kept.keeps = keeps
    recorder = kept.recorder(pid=1, tag="t")
    assert recorder is not None
    for data in writes:
        recorder.write(Stream.STDOUT, data)
    recorder.end()
    return kept


async def texts_of(kept: Journal) -> list[str]:
    found: list[str] = []
    follower = kept.follow(0)
    async for batch in follower:
        found += [line.text for line in batch]
        if batch[-1].number == kept._next - 1:
            break
    await follower.aclose()
    return found


async def test_line_is_put_together_however_it_was_cut() -> None:
    whole = b"one\ntwo\n\nlast"
    for cut in range(len(whole)):
        assert await texts_of(recorded(whole[:cut], whole[cut:])) == ["one", "two", "", "last"]


async def test_long_line_comes_in_several() -> None:
    longest = journal.LONGEST_LINE
    for data in ([b"x" * (2 * longest + 1)], [b"x" * longest] * 2 + [b"x\n"]):
        assert await texts_of(recorded(*data)) == ["x" * longest, "x" * longest, "x"]


async def test_rate_is_bounded_and_the_gap_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "BURST", 1000)
    monkeypatch.setattr(journal, "RATE", 0)
    kept = recorded(b"x" * 100 + b"\n", *[b"y" * 100 + b"\n"] * 20)
    found = await texts_of(kept)
    assert found[0] == "x" * 100
    assert found.count(LEFT_OUT) == 1
    assert found[-1] == LEFT_OUT
    assert len(found) < 10
    # Once there is room, it goes on with a whole line.
    recorder = kept.recorder(pid=1, tag="")
    assert recorder is not None
    recorder.write(Stream.STDOUT, b"cut off by the gap, ")
    kept._budget = 1000
    recorder.write(Stream.STDOUT, b"and its end\nwhole\n")
    assert (await texts_of(kept))[-1] == "whole"


async def test_room_is_bounded_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ROOM", 1000)
    found = await texts_of(recorded(*[f"{number}\n".encode() for number in range(100)]))
    assert 5 < len(found) <= 1000 // 64
    assert found == [*map(str, range(100))][-len(found) :]


def test_nothing_is_recorded_unless_asked_for() -> None:
    kept = Journal()
    assert kept.recorder(pid=1, tag="t") is None
    kept.keeps = LogCommands.TAGGED
    assert kept.recorder(pid=1, tag=None) is None
    assert kept.recorder(pid=1, tag="t") is not None
