"""Attaching, listing, input, signals, terminals: behaviour.md section 6."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_testing.agent_process import Agent, Running, code_of

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INTERNAL = grpc.StatusCode.INTERNAL
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PTY = process_pb2.PTY(size=process_pb2.PTY.Size(cols=80, rows=24))


async def test_unknown_name_is_refused_on_calls_that_act_as_nobody_too(agent: Agent) -> None:
    """U3, U5, P27: on every route; the process is as before, and those without a name or with a known one pass."""
    async with agent.running("cat", stdin=True) as running:
        process = process_pb2.ProcessSelector(pid=running.pid)
        data = process_pb2.ProcessInput(stdin=b"x")
        start = process_pb2.StreamInputRequest.StartEvent(process=process)
        calls: dict[Any, Any] = {
            agent.processes.List: process_pb2.ListRequest(),
            agent.processes.Update: process_pb2.UpdateRequest(process=process),
            agent.processes.SendInput: process_pb2.SendInputRequest(process=process, input=data),
            agent.processes.CloseStdin: process_pb2.CloseStdinRequest(process=process),
            agent.processes.StreamInput: iter([process_pb2.StreamInputRequest(start=start)]),
            agent.processes.SendSignal: process_pb2.SendSignalRequest(
                process=process, signal=process_pb2.SIGNAL_SIGKILL
            ),
            agent.files.GetWatcherEvents: filesystem_pb2.GetWatcherEventsRequest(watcher_id="w"),
            agent.files.RemoveWatcher: filesystem_pb2.RemoveWatcherRequest(watcher_id="w"),
        }
        for method, request in calls.items():
            async with code_of(grpc.StatusCode.UNAUTHENTICATED, "ghost"):
                await method(request, metadata=agent.metadata(user="ghost"))
        async with code_of(grpc.StatusCode.UNAUTHENTICATED, "ghost"):
            await agent.processes.Connect(
                process_pb2.ConnectRequest(process=process), metadata=agent.metadata(user="ghost", timeout_ms="x")
            ).read()
        for user in ("user", None):
            listed = await agent.processes.List(process_pb2.ListRequest(), metadata=agent.metadata(user=user))
            assert [info.pid for info in listed.processes] == [running.pid]
        await agent.processes.CloseStdin(process_pb2.CloseStdinRequest(process=process), metadata=agent.metadata())
        assert (await running.rest()).stdout == b""


async def test_stream_of_input_ends_at_its_limit_and_the_process_goes_on(agent: Agent) -> None:
    """T7, A20: what was sent before has arrived."""

    async def stream(text: bytes) -> AsyncIterator[process_pb2.StreamInputRequest]:
        start = process_pb2.StreamInputRequest.StartEvent(process=running.selector)
        yield process_pb2.StreamInputRequest(start=start)
        given = process_pb2.ProcessInput(stdin=text)
        yield process_pb2.StreamInputRequest(data=process_pb2.StreamInputRequest.DataEvent(input=given))
        await asyncio.sleep(60)

    async with agent.running("cat", stdin=True) as running:
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED, "0.3 s"):
            await agent.processes.StreamInput(stream(b"a\n"), metadata=agent.metadata(timeout_ms=300))
        await running.read_until(b"a\n")
        async with code_of(INVALID, "timeout"):
            await agent.processes.StreamInput(stream(b""), metadata=agent.metadata(timeout_ms="x"))
        await running.send(b"b\n")
        await running.read_until(b"b\n")


async def test_late_follower_gets_what_comes_from_now_on(agent: Agent) -> None:
    """A2, A3, A4."""
    async with agent.running("/bin/sh", "-c", "echo early; read x; echo late; exit 4", stdin=True) as running:
        await running.read_until(b"early\n")
        followers = [Running(agent, running.pid, await running.connect()) for _ in range(3)]
        left = await running.connect()
        left.cancel()
        await running.send(b"\n")
        for follower in (running, *followers):
            result = await follower.rest()
            assert result.stdout == b"late\n"
            assert result.exit_code == 4


async def test_end_is_told_for_a_while_to_whoever_attaches_late(agent: Agent) -> None:
    """A9."""
    result = await agent.sh("exit 5", tag="job")
    for selector in (process_pb2.ProcessSelector(pid=result.pid), process_pb2.ProcessSelector(tag="job")):
        request = process_pb2.ConnectRequest(process=selector)
        events = [message.event async for message in agent.processes.Connect(request, metadata=agent.metadata())]
        assert [event.WhichOneof("event") for event in events] == ["start", "end"]
        assert events[0].start.pid == result.pid
        assert events[1].end.exit_code == 5


async def test_attaching_during_the_end_never_hangs(agent: Agent) -> None:
    """A8: whatever the moment, it is told the end or that there is no such process."""

    async def attach(pid: int) -> str:
        request = process_pb2.ConnectRequest(process=process_pb2.ProcessSelector(pid=pid))
        call = agent.processes.Connect(request, metadata=agent.metadata())
        try:
            events = [message.event async for message in call]
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "-".join(str(event.WhichOneof("event")) for event in events)

    for number in range(40):
        async with agent.running("sleep", f"0.0{number % 4}") as running:
            async with asyncio.timeout(20):
                assert set(await asyncio.gather(*(attach(running.pid) for _ in range(5)))) <= {"start-end", "NOT_FOUND"}


async def test_input_to_an_ended_process_is_not_found(agent: Agent) -> None:
    """X17, A16, A25."""
    ended = Running(agent, (await agent.run("true")).pid, None)
    async with code_of(NOT_FOUND):
        await ended.send(b"x")
    async with code_of(NOT_FOUND):
        await ended.signal(9)


async def test_end_of_a_predecessor_is_not_told_for_a_tag_in_use(agent: Agent) -> None:
    """A10, P33."""
    await agent.sh("exit 5", tag="job")
    async with agent.running("sleep", "60", tag="job") as running:
        request = process_pb2.ConnectRequest(process=process_pb2.ProcessSelector(tag="job"))
        call = agent.processes.Connect(request, metadata=agent.metadata())
        assert (await call.read()).event.start.pid == running.pid
        call.cancel()


async def test_limit_of_an_attached_stream_ends_that_stream_only(agent: Agent) -> None:
    """T6, B14."""
    async with agent.running("sleep", "60") as running:
        attached = Running(agent, running.pid, await running.connect(timeout_ms=300))
        async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED):
            await attached.rest()
        assert [info.pid for info in await agent.live()] == [running.pid]


async def test_unknown_processes_are_not_found(agent: Agent) -> None:
    """A6, A16, A25, A30."""
    for running in (Running(agent, 4_000_000_000, None), Running(agent, 1, None)):
        async with code_of(NOT_FOUND, f"process with pid {running.pid} not found"):
            await running.send(b"x")
        async with code_of(NOT_FOUND):
            await running.signal(9)
        async with code_of(NOT_FOUND):
            await running.close_stdin()
        async with code_of(NOT_FOUND):
            await agent.processes.Update(process_pb2.UpdateRequest(process=running.selector), metadata=agent.metadata())
        async with code_of(NOT_FOUND):
            call = agent.processes.Connect(
                process_pb2.ConnectRequest(process=running.selector), metadata=agent.metadata()
            )
            async for _ in call:
                pass


async def test_calls_that_name_no_process_are_refused(agent: Agent) -> None:
    """A1, A19, A24."""
    async with code_of(INVALID):
        await agent.processes.SendSignal(process_pb2.SendSignalRequest(signal=9), metadata=agent.metadata())  # type: ignore[arg-type]
    async with agent.running("cat", stdin=True) as running:
        async with code_of(INVALID):
            await agent.processes.SendInput(
                process_pb2.SendInputRequest(process=running.selector), metadata=agent.metadata()
            )
        for number in (0, 1, 10):
            async with code_of(INVALID):
                await running.signal(number)


async def test_list_shows_what_was_asked_for(agent: Agent) -> None:
    """A11-A14, A7, P31."""
    async with (
        agent.running("sleep", "60", tag="one", envs={"A": "1"}, cwd="~"),
        agent.running("/bin/sh", "-c", "sleep 61 & wait", tag="two"),
        agent.running("sleep", "62") as third,
    ):
        first, second, last = await agent.live()
        assert (first.config.cmd, list(first.config.args), dict(first.config.envs)) == ("sleep", ["60"], {"A": "1"})
        assert (first.config.cwd, first.tag) == ("~", "one")
        assert second.tag == "two"
        assert not second.config.HasField("cwd")
        assert last.pid == third.pid
        assert not last.HasField("tag")


async def test_input_arrives_whole_and_the_end_once(agent: Agent) -> None:
    """A15, A21."""
    data = bytes(range(256)) * 8192
    async with agent.running(
        "/bin/sh", "-c", "sha256sum; while [ ! -e go ]; do sleep 0.02; done", cwd="~", stdin=True
    ) as running:
        await running.send(b"")
        await running.send(data)
        await running.close_stdin()
        await running.close_stdin()
        async with code_of(INTERNAL, "closed"):
            await running.send(b"more")
        (agent.home / "go").touch()
        assert hashlib.sha256(data).hexdigest() in (await running.rest()).text


async def test_callers_do_not_interleave(agent: Agent) -> None:
    """A23."""
    size = 300_000
    async with agent.running("cat", stdin=True) as running:
        letters = b"abcde"
        sends = asyncio.gather(*(running.send(bytes([letter]) * size) for letter in letters))
        seen = bytearray()
        while len(seen) < size * len(letters):
            message = await running.call.read()
            seen += message.event.data.stdout
        await sends
    assert sorted(seen[index * size : (index + 1) * size] for index in range(5)) == [
        bytes([letter]) * size for letter in letters
    ]


async def test_cancelled_input_does_not_break_later_input(agent: Agent) -> None:
    """The reader does not read; the writer gives up; others go on."""
    async with agent.running("/bin/sh", "-c", "sleep 1; cat | tail -c 5", stdin=True) as running:
        stuck = asyncio.create_task(running.send(b"x" * 1_000_000))
        await asyncio.sleep(0.2)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        await running.send(b"fresh")
        await running.close_stdin()
        assert (await running.rest()).stdout == b"fresh"


async def test_stuck_input_holds_nobody_else_up(agent: Agent) -> None:
    async with agent.running("sleep", "60", stdin=True) as running:
        stuck = asyncio.create_task(running.send(b"x" * 1_000_000))
        assert (await agent.run("echo", "ok")).text == "ok\n"
        await running.signal(9)
        async with code_of(INTERNAL):
            await stuck


async def test_wrong_kind_of_input_says_which(agent: Agent) -> None:
    """A17, A18, A21."""
    async with agent.running("sleep", "60", stdin=False) as running:
        async with code_of(INTERNAL, "disabled"):
            await running.send(b"x")
        async with code_of(INTERNAL, "no terminal"):
            await running.send(b"x", pty=True)
        await running.close_stdin()
    async with agent.running("/bin/sh", "-c", "exec 0<&-; echo closed; sleep 60", stdin=True) as running:
        await running.read_until(b"closed\n")
        async with code_of(INTERNAL, "does not read"):
            await running.send(b"x")
    async with agent.running("/bin/sh", "-i", pty=PTY) as running, code_of(INTERNAL, "terminal"):
        await running.send(b"x")


async def test_streamed_input(agent: Agent) -> None:
    """A20."""

    async def send(*requests: process_pb2.StreamInputRequest) -> None:
        async def stream() -> AsyncIterator[process_pb2.StreamInputRequest]:
            for request in requests:
                yield request

        await agent.processes.StreamInput(stream(), metadata=agent.metadata())

    def data(text: bytes) -> process_pb2.StreamInputRequest:
        given = process_pb2.ProcessInput(stdin=text)
        return process_pb2.StreamInputRequest(data=process_pb2.StreamInputRequest.DataEvent(input=given))

    keepalive = process_pb2.StreamInputRequest(keepalive=process_pb2.StreamInputRequest.KeepAlive())
    async with agent.running("cat", stdin=True) as running:
        opening = process_pb2.StreamInputRequest.StartEvent(process=running.selector)
        start = process_pb2.StreamInputRequest(start=opening)
        await send(keepalive, start, data(b"one "), keepalive, data(b"two\n"))
        assert await running.read_until(b"\n") == b"one two\n"
        for requests in ([data(b"x")], [], [keepalive]):
            async with code_of(INVALID, "start"):
                await send(*requests)
        await running.close_stdin()
        assert (await running.rest()).exit_code == 0
    async with code_of(NOT_FOUND):
        await send(start, data(b"x"))


async def test_terminal_has_size_echo_and_job_control(any_agent: Agent) -> None:
    """P29, O5, A15, A29, B21."""
    async with any_agent.running("/bin/bash", "--norc", "-i", pty=PTY, envs={"TERM": "xterm", "PS1": "$"}) as running:
        await running.send("stty size; tty; echo '─漢😀'; set -o | grep monitor\n".encode(), pty=True)
        seen = await running.read_until(b"monitor        \ton")
        assert b"24 80" in seen
        assert b"/dev/pts/" in seen
        assert b"job control" not in seen
        assert "─漢😀".encode() in seen
        size = process_pb2.PTY(size=process_pb2.PTY.Size(cols=133, rows=40))
        await any_agent.processes.Update(
            process_pb2.UpdateRequest(process=running.selector, pty=size), metadata=any_agent.metadata()
        )
        await running.send(b"stty size\n", pty=True)
        await running.read_until(b"40 133")
        await running.send(b"exit 3\n", pty=True)
        result = await running.rest()
        assert result.exit_code == 3
        assert not result.stdout


async def test_terminal_ends_with_its_shell_though_a_child_has_it_open(agent: Agent) -> None:
    """B23."""
    async with agent.running("/bin/sh", "-i", pty=PTY) as running:
        await running.send(b"(trap '' HUP; sleep 30) & echo pid $!\nexit 7\n", pty=True)
        result = await running.rest()
        assert result.exit_code == 7


async def test_all_output_of_a_terminal_comes_before_its_end(agent: Agent) -> None:
    """O7."""
    for _ in range(20):
        result = await agent.run("/bin/sh", "-c", "seq 2000", pty=PTY)
        assert result.pty.endswith(b"2000\r\n")
        assert result.exit_code == 0


async def test_end_of_input_on_a_terminal_is_a_byte(agent: Agent) -> None:
    """A22."""
    async with agent.running("/bin/sh", "-c", "cat; echo over", pty=PTY) as running:
        async with code_of(INVALID, "0x04"):
            await running.close_stdin()
        await running.send(b"\x04", pty=True)
        assert b"over" in (await running.rest()).pty


async def test_terminal_can_be_attached_and_killed(agent: Agent) -> None:
    """A5."""
    async with agent.running("/bin/sh", "-i", pty=PTY) as running:
        attached = Running(agent, running.pid, await running.connect())
        await running.signal(9)
        assert (await attached.rest()).exit_code == -1


async def test_resize_rules(agent: Agent) -> None:
    """A30."""
    async with agent.running("sleep", "60") as running:

        async def update(**fields: object) -> None:
            request = process_pb2.UpdateRequest(process=running.selector, **fields)  # type: ignore[arg-type]
            await agent.processes.Update(request, metadata=agent.metadata())

        await update()
        async with code_of(INTERNAL, "no terminal"):
            await update(pty=PTY)


@pytest.mark.parametrize(("cols", "rows"), [(65536, 24), (80, 4_000_000_000)])
async def test_impossible_size_is_refused(agent: Agent, cols: int, rows: int) -> None:
    """P29, P30: 16 bits each; a terminal that cannot be made is the caller's fault."""
    before = agent.descriptors()
    async with code_of(INVALID):
        await agent.run("true", pty=process_pb2.PTY(size=process_pb2.PTY.Size(cols=cols, rows=rows)))
    assert agent.descriptors() == before
