"""Numbered output, replay and strict output: behaviour.md X11 to X14, A9, X10."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandgate_agent import output as agent_output
from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.agent_process import Agent, Running, eventually, gone

KILL = process_pb2.SIGNAL_SIGKILL
PTY = process_pb2.PTY(size=process_pb2.PTY.Size(cols=80, rows=24))
#: Writes a piece of its own each time it is told to.
STEPS = "n=0; while read x; do n=$((n+1)); echo $n; done"


async def attach(agent: Agent, pid: int, from_seq: int | None) -> Any:
    request = process_pb2.ConnectRequest(process=process_pb2.ProcessSelector(pid=pid), from_seq=from_seq)
    return agent.processes.Connect(request, metadata=agent.metadata())


async def pieces(call: Any, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            event = (await call.read()).event
            if event.WhichOneof("event") == "data":
                found.append((event.data.seq, event.data.stdout))
    return found


async def start_of(call: Any) -> process_pb2.ProcessEvent.StartEvent:
    message = await call.read()
    start: process_pb2.ProcessEvent.StartEvent = message.event.start
    return start


async def said(running: Running, count: int) -> None:
    """Let a STEPS process write so many pieces, and read them."""
    for _ in range(count):
        await running.send(b"\n")
        await pieces(running.call, 1)


async def test_pieces_are_numbered_over_all_streams_without_gaps(agent: Agent) -> None:
    """X11."""
    call = agent.start_call("/bin/sh", "-c", "for i in 1 2 3; do echo out; sleep 0.05; echo err >&2; sleep 0.05; done")
    events = [message.event async for message in call]
    assert events[0].start.seq == 1
    assert events[0].start.incarnation != 0
    numbers = [event.data.seq for event in events if event.WhichOneof("event") == "data"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 2


async def test_replay_goes_on_live_without_gap_or_double(agent: Agent) -> None:
    """X11, X14: from a number, from the first, and from now on; each follower for itself."""
    async with agent.running("/bin/sh", "-c", STEPS, stdin=True) as running:
        await said(running, 5)
        calls = {number: await attach(agent, running.pid, number) for number in (3, 0, None, 6, 900)}
        starts = {number: (await start_of(call)).seq for number, call in calls.items()}
        assert starts == {3: 3, 0: 1, None: 6, 6: 6, 900: 6}
        await running.send(b"\n")
        for number, call in calls.items():
            expected = [(seq, b"%d\n" % seq) for seq in range(starts[number], 7)]
            assert await pieces(call, len(expected)) == expected
            call.cancel()


async def test_replay_says_what_is_not_retained_any_more(agent: Agent) -> None:
    """X11: as many bytes as 64 full pieces have; the start event tells where they begin."""
    total = 8_000_000
    async with agent.running("/bin/sh", "-c", f"head -c {total} /dev/zero; sleep 60") as running:
        got = last = 0
        while got < total:
            [(last, data)] = await pieces(running.call, 1)
            got += len(data)
        call = await attach(agent, running.pid, 1)
        first = (await start_of(call)).seq
        assert first > 1
        again = await pieces(call, last - first + 1)
        assert [number for number, _ in again] == list(range(first, last + 1))
        kept = sum(len(data) for _, data in again)
        # And what this reader had not taken when the last came.
        assert agent_output.RETAINED_BYTES <= kept <= 3 * agent_output.RETAINED_BYTES
        call.cancel()


async def test_programs_that_write_line_by_line_can_be_replayed_as_far_back(agent: Agent) -> None:
    """X11, X13: what is retained is measured in bytes and not in writes."""
    lines = 400
    async with agent.running("/bin/sh", "-c", STEPS, stdin=True) as running:
        await said(running, lines)
        call = await attach(agent, running.pid, 2)
        assert (await start_of(call)).seq == 2
        assert await pieces(call, lines - 1) == [(number, b"%d\n" % number) for number in range(2, lines + 1)]
        # It goes on live, and nobody who reads so much of the past holds the process up.
        await running.send(b"\n")
        assert await pieces(call, 1) == [(lines + 1, b"%d\n" % (lines + 1))]
        call.cancel()


async def test_retention_never_holds_a_process_up(agent: Agent) -> None:
    """O16, X11."""
    marker = agent.home / "written"
    async with agent.running("/bin/sh", "-c", f"head -c 20000000 /dev/zero; touch {marker}; sleep 60") as running:
        running.call.cancel()
        await eventually(marker.exists)
        call = await attach(agent, running.pid, 0)
        start = await start_of(call)
        assert start.seq > 1
        got = await pieces(call, 64)
        assert [seq for seq, _ in got] == list(range(start.seq, start.seq + 64))
        call.cancel()


async def test_follower_that_is_cut_off_while_it_lags_misses_nothing(agent: Agent) -> None:
    """X12: what it had not taken is kept beside what it had, and strict output lets nothing push that out."""
    total = 6_000_000
    script = f"sleep 0.2; head -c {total} /dev/zero; sleep 60"
    async with agent.running("/bin/sh", "-c", script, strict_output=True) as running:
        first = await pieces(running.call, 3)
        # The queue of this stream is full now, and the process waits.
        await asyncio.sleep(0.5)
        running.call.cancel()
        call = await attach(agent, running.pid, first[-1][0] + 1)
        assert (await start_of(call)).seq == first[-1][0] + 1
        got = sum(len(data) for _, data in first)
        async with asyncio.timeout(20):
            while got < total:
                got += len((await pieces(call, 1))[0][1])
        call.cancel()


async def test_client_cut_off_just_before_the_end_gets_the_rest(agent: Agent) -> None:
    """X12, A9: output and end are kept for a while; without a number there is no output, as E2B has it."""
    result = await agent.sh("echo one; sleep 0.1; echo two; exit 6")
    call = await attach(agent, result.pid, 2)
    events = [message.event async for message in call]
    assert [event.WhichOneof("event") for event in events] == ["start", "data", "end"]
    assert (events[0].start.seq, events[1].data.seq, events[1].data.stdout) == (2, 2, b"two\n")
    assert events[2].end.exit_code == 6
    late = [message.event async for message in await attach(agent, result.pid, None)]
    assert [event.WhichOneof("event") for event in late] == ["start", "end"]
    assert late[0].start.seq == 3
    assert late[0].start.incarnation == events[0].start.incarnation


async def test_retained_output_of_many_ended_processes_is_bounded(agent: Agent) -> None:
    """The oldest lose their output first; their ends stay known (A9)."""
    results = [await agent.sh("head -c 2000000 /dev/zero") for _ in range(24)]
    kept = []
    for result in results:
        call = await attach(agent, result.pid, 0)
        output = [message.event async for message in call]
        assert output[-1].WhichOneof("event") == "end"
        kept.append(sum(len(event.data.stdout) for event in output))
    assert kept[0] == 0
    assert kept[-1] >= 64 * 1024
    assert sum(kept) <= 32 * 1024 * 1024


async def test_attached_later_hears_that_the_limit_ended_it(agent: Agent) -> None:
    """T2: the stream of Start says so with its status; whoever comes later has the end event only."""
    async with agent.running("sleep", "60", timeout_ms=400) as running:
        attached = Running(agent, running.pid, await running.connect())
        assert (await attached.rest()).end.timed_out  # type: ignore[union-attr]
        late = [message.event async for message in await attach(agent, running.pid, 0)]
        assert late[-1].end.timed_out


async def test_list_says_what_each_was_started_as(agent: Agent) -> None:
    """X10."""
    async with agent.running("sleep", "60"), agent.running("sleep", "61", pty=PTY):
        assert [info.kind for info in await agent.live()] == [
            process_pb2.PROCESS_KIND_COMMAND,
            process_pb2.PROCESS_KIND_TERMINAL,
        ]


async def test_strict_output_waits_for_a_reader(agent: Agent) -> None:
    """X13: nothing is thrown away while nobody reads; who comes back gets all of it."""
    total = 12_000_000
    marker = agent.home / "written"
    script = f"echo up; read x; head -c {total} /dev/zero; touch {marker}"
    async with agent.running("/bin/sh", "-c", script, strict_output=True, stdin=True) as running:
        await pieces(running.call, 1)
        running.call.cancel()
        await running.send(b"\n")
        await asyncio.sleep(1)
        assert not marker.exists(), "nobody held the writer up"
        call = await attach(agent, running.pid, 2)
        assert (await start_of(call)).seq == 2
        got = 0
        while got < total:
            got += len((await pieces(call, 1))[0][1])
        assert got == total
        assert (await call.read()).event.WhichOneof("event") == "end"


@pytest.mark.timeout(90)
async def test_strict_output_that_nobody_reads_ends_the_command(agent: Agent) -> None:
    """X13: after 30 s, with the error `output_truncated`, background included."""
    script = "(setsid sh -c 'echo $$; exec sleep 600' &); read x; exec cat /dev/zero"
    async with agent.running("/bin/sh", "-c", script, strict_output=True, stdin=True) as running:
        daemon = int((await pieces(running.call, 1))[0][1])
        running.call.cancel()
        await running.send(b"\n")
        await asyncio.sleep(agent_output.STALL_SECONDS - 5)
        assert [info.pid for info in await agent.live()] == [running.pid]
        async with asyncio.timeout(30):
            while await agent.live():  # noqa: ASYNC110 -- polling is what a client can do
                await asyncio.sleep(0.2)
        late = [message.event async for message in await attach(agent, running.pid, 0)]
        assert late[-1].end.error == "output_truncated"
        assert late[-1].end.exit_code == -1
        assert gone(daemon)
