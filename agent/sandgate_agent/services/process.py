"""``envd.v1.Process``: messages to and from :mod:`sandgate_agent.processes`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from sandgate_agent.calls import Call, ClientStream, Method, ServerStream, Unary
from sandgate_agent.command import Command, Reach
from sandgate_agent.ends import End
from sandgate_agent.mailbox import Mark
from sandgate_agent.output import Follower
from sandgate_agent.paths import resolve
from sandgate_agent.process import Process
from sandgate_agent.processes import Processes, Selector
from sandgate_agent.pty import Size
from sandgate_agent.remembered import Ended
from sandgate_agent.retention import Piece, Stream
from sandgate_agent.sandbox import Sandbox
from sandgate_agent.stdin import Stdin
from sandgate_api.envd.v1 import process_pb2 as pb
from sandgate_errors import DeadlineExceeded, Internal, InvalidArgument

__all__ = ["ProcessService"]

_Response = TypeVar("_Response", pb.StartResponse, pb.ConnectResponse)

_FIELDS = {Stream.STDOUT: "stdout", Stream.STDERR: "stderr", Stream.PTY: "pty"}
#: What a terminal has that was asked for without a size.
_DEFAULT_SIZE = Size(cols=80, rows=24)


class ProcessService:
    """Handlers; the rules stand in :mod:`sandgate_agent.processes`."""

    name = "sandgate_api.envd.v1.Process"

    def __init__(self, processes: Processes, sandbox: Sandbox) -> None:
        self._processes = processes
        self._sandbox = sandbox

    def methods(self) -> Mapping[str, Method]:
        return {
            "List": Unary(pb.ListRequest, self.list),
            "Start": ServerStream(pb.StartRequest, self.start),
            "Connect": ServerStream(pb.ConnectRequest, self.connect),
            "Update": Unary(pb.UpdateRequest, self.update),
            "StreamInput": ClientStream(pb.StreamInputRequest, self.stream_input),
            "SendInput": Unary(pb.SendInputRequest, self.send_input),
            "SendSignal": Unary(pb.SendSignalRequest, self.send_signal),
            "CloseStdin": Unary(pb.CloseStdinRequest, self.close_stdin),
        }

    async def list(self, _request: pb.ListRequest, call: Call) -> pb.ListResponse:
        self._sandbox.check_named(call.acting_user)
        return pb.ListResponse(processes=[_info(process) for process in self._processes])

    async def start(self, request: pb.StartRequest, call: Call) -> None:
        # First failure decides: user, timeout, cwd syntax, then the rest (P27).
        account = self._sandbox.acting(call.acting_user)
        limit = call.limit()
        asked = request.process
        cwd = resolve(asked.cwd, account, default=self._sandbox.default_workdir, what="cwd")
        process, follower = await self._processes.start(
            _command(request, limit), account, env=self._sandbox.environment(account, dict(asked.envs)), cwd=cwd
        )
        await _follow(process, follower, call, pb.StartResponse)

    async def connect(self, request: pb.ConnectRequest, call: Call) -> None:
        self._sandbox.check_named(call.acting_user)
        limit = call.limit()
        from_seq = request.from_seq if request.HasField("from_seq") else None
        found = self._processes.attach(_selector(request.process))
        if isinstance(found, Ended):
            await _tell(found, from_seq, call)
            return
        follower = found.output.follow(from_seq)
        if limit is not None:
            follower.fail_after(limit, DeadlineExceeded(f"the connection ran into its time limit of {limit:g} s"))
        await _follow(found, follower, call, pb.ConnectResponse)

    async def update(self, request: pb.UpdateRequest, call: Call) -> pb.UpdateResponse:
        self._sandbox.check_named(call.acting_user)
        process = self._processes.find(_selector(request.process))
        if request.HasField("pty") and request.pty.HasField("size"):
            if process.terminal is None:
                raise Internal(f"process {process.pid} has no terminal")
            process.terminal.resize(Size(cols=request.pty.size.cols, rows=request.pty.size.rows))
        return pb.UpdateResponse()

    async def send_input(self, request: pb.SendInputRequest, call: Call) -> pb.SendInputResponse:
        self._sandbox.check_named(call.acting_user)
        stdin, data = self._input(_selector(request.process), request.input)
        await stdin.write(data)
        return pb.SendInputResponse()

    async def stream_input(self, call: Call) -> pb.StreamInputResponse:
        self._sandbox.check_named(call.acting_user)
        limit = call.limit()
        try:
            async with asyncio.timeout(limit) as bound:
                return await self._take_input(call)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded(f"the stream of input ran into its time limit of {limit:g} s") from None

    async def _take_input(self, call: Call) -> pb.StreamInputResponse:
        selector: Selector | None = None
        async for request in call.requests:
            kind = request.WhichOneof("event")
            if kind == "start":
                selector = _selector(request.start.process)
                self._processes.find(selector)
            elif kind == "data":
                if selector is None:
                    raise InvalidArgument("the first message of StreamInput must be a start")
                stdin, data = self._input(selector, request.data.input)
                await stdin.write(data)
        if selector is None:
            raise InvalidArgument("StreamInput ended without a start")
        return pb.StreamInputResponse()

    async def send_signal(self, request: pb.SendSignalRequest, call: Call) -> pb.SendSignalResponse:
        self._sandbox.check_named(call.acting_user)
        if request.signal not in {pb.SIGNAL_SIGKILL, pb.SIGNAL_SIGTERM}:
            raise InvalidArgument("only SIGKILL and SIGTERM can be sent")
        number = signal.SIGKILL if request.signal == pb.SIGNAL_SIGKILL else signal.SIGTERM
        await self._processes.find(_selector(request.process)).signal(number)
        return pb.SendSignalResponse()

    async def close_stdin(self, request: pb.CloseStdinRequest, call: Call) -> pb.CloseStdinResponse:
        self._sandbox.check_named(call.acting_user)
        process = self._processes.find(_selector(request.process))
        if process.terminal is not None:
            raise InvalidArgument("a terminal's input cannot be closed; send the byte 0x04 instead")
        if process.stdin is not None:
            await process.stdin.close_in_turn()
        return pb.CloseStdinResponse()

    def _input(self, selector: Selector, given: pb.ProcessInput) -> tuple[Stdin, bytes]:
        kind = given.WhichOneof("input")
        if kind is None:
            raise InvalidArgument("the input is neither stdin nor pty")
        return self._processes.stdin_of(selector, terminal=kind == "pty"), getattr(given, kind)


async def _follow(process: Process, follower: Follower, call: Call, response: type[_Response]) -> None:
    try:
        follower.keep_alive(call.keepalive())
        await call.send(response(event=_start_event(process, follower.first_seq)))
        while (item := await follower.next()) is not Mark.END:
            await call.send(response(event=_KEEPALIVE if isinstance(item, Mark) else _data_event(item)))
        if process.end is not None:
            await call.send(response(event=_end_event(process.end)))
    finally:
        process.output.leave(follower)


async def _tell(ended: Ended, from_seq: int | None, call: Call) -> None:
    """What is left of a process that ended, to who attaches late (A9) or was cut off just before the end (X12)."""
    past = ended.past(from_seq)
    await call.send(pb.ConnectResponse(event=_start_event(ended, past.first_seq)))
    for piece in past:
        await call.send(pb.ConnectResponse(event=_data_event(piece)))
    await call.send(pb.ConnectResponse(event=_end_event(ended.end)))


_KEEPALIVE = pb.ProcessEvent(keepalive=pb.ProcessEvent.KeepAlive())


def _start_event(process: Process | Ended, first_seq: int) -> pb.ProcessEvent:
    return pb.ProcessEvent(
        start=pb.ProcessEvent.StartEvent(pid=process.pid, seq=first_seq, incarnation=process.incarnation)
    )


def _data_event(piece: Piece) -> pb.ProcessEvent:
    event = pb.ProcessEvent()
    data = event.data
    setattr(data, _FIELDS[piece.stream], piece.data)
    data.seq = piece.seq
    return event


def _end_event(end: End) -> pb.ProcessEvent:
    return pb.ProcessEvent(
        end=pb.ProcessEvent.EndEvent(
            exit_code=end.exit_code, exited=end.exited, status=end.status, error=end.error, timed_out=end.timed_out
        )
    )


def _command(request: pb.StartRequest, limit: float | None) -> Command:
    asked = request.process
    return Command(
        cmd=asked.cmd,
        args=list(asked.args),
        envs=dict(asked.envs),
        cwd=asked.cwd if asked.HasField("cwd") else None,
        tag=request.tag if request.HasField("tag") else None,
        stdin=request.stdin if request.HasField("stdin") else True,
        size=_size(request.pty) if request.HasField("pty") else None,
        limit=limit,
        reach=_reach(request),
        term_grace=_seconds(request.term_grace),
        strict_output=request.strict_output,
    )


def _reach(request: pb.StartRequest) -> Reach:
    if request.kill_tree:
        return Reach.TREE
    return Reach.GROUP if request.HasField("term_grace") else Reach.FAMILY


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _size(pty: pb.PTY) -> Size:
    return Size(cols=pty.size.cols, rows=pty.size.rows) if pty.HasField("size") else _DEFAULT_SIZE


def _selector(selector: pb.ProcessSelector) -> Selector:
    kind = selector.WhichOneof("selector")
    if kind is None:
        raise InvalidArgument("the process is named neither by pid nor by tag")
    return Selector(pid=selector.pid) if kind == "pid" else Selector(tag=selector.tag)


def _info(process: Process) -> pb.ProcessInfo:
    command = process.command
    config = pb.ProcessConfig(cmd=command.cmd, args=command.args, envs=command.envs, cwd=command.cwd)
    kind = pb.PROCESS_KIND_TERMINAL if process.terminal is not None else pb.PROCESS_KIND_COMMAND
    return pb.ProcessInfo(config=config, pid=process.pid, tag=command.tag, kind=kind)
