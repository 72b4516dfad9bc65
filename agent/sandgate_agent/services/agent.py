"""``agent.v1.Agent``: who the sandbox is, content of files, measurements, lines that commands wrote, tunnels to its ports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeVar

import sandgate_agent
from sandgate_agent.accounts import Account, OwnerNames
from sandgate_agent.calls import BothStreams, Call, ClientStream, Method, ServerStream, Unary
from sandgate_agent.content import Reader, Writer, begin_to_write
from sandgate_agent.journal import Journal, Line, LogCommands
from sandgate_agent.metrics import Usage
from sandgate_agent.paths import resolve
from sandgate_agent.retention import Stream
from sandgate_agent.sandbox import Identity, Sandbox
from sandgate_agent.services.filesystem import entry_info, timestamp
from sandgate_api.agent.v1 import agent_pb2 as pb
from sandgate_errors import DataLoss, InvalidArgument, SandgateError

__all__ = ["AgentService", "Ports", "Tunnel"]

_File = TypeVar("_File", Reader, Writer)

#: The field's number and the type of what has a length in front.
_DATA_TAG = pb.ReadFileResponse.DATA_FIELD_NUMBER << 3 | 2

_KEEPS: Mapping[int, LogCommands] = {
    pb.LOG_COMMANDS_TAGGED: LogCommands.TAGGED,
    pb.LOG_COMMANDS_ALL: LogCommands.ALL,
}


class Tunnel(Protocol):
    """One connection to a port (:class:`sandgate_agent.tunnels.Tunnel`)."""

    async def read(self) -> bytes:
        """The next bytes; none at the end."""

    async def write(self, data: bytes) -> None:
        """Returns once it is on its way."""

    def end(self) -> None:
        """The other side sees the end of ours."""


class Ports(Protocol):
    """The ports of the sandbox (:class:`sandgate_agent.tunnels.Tunnels`)."""

    def open(self, port: int) -> AbstractAsyncContextManager[Tunnel]:
        """A connection, closed at the end."""


class AgentService:
    """Handlers of the agent's own service."""

    name = "sandgate_api.agent.v1.Agent"

    def __init__(
        self,
        sandbox: Sandbox,
        ports: Ports,
        journal: Journal,
        *,
        warm: Callable[[Account], None],
        measure: Callable[[], Awaitable[Usage]],
    ) -> None:
        self._sandbox = sandbox
        self._ports = ports
        self._journal = journal
        self._warm = warm
        self._measure = measure

    def methods(self) -> Mapping[str, Method]:
        return {
            "Init": Unary(pb.InitRequest, self.init),
            "ReadFile": ServerStream(pb.ReadFileRequest, self.read_file),
            "WriteFile": ClientStream(pb.WriteFileRequest, self.write_file),
            "Metrics": Unary(pb.MetricsRequest, self.metrics),
            "GetEnvs": Unary(pb.GetEnvsRequest, self.get_envs),
            "FollowLogs": ServerStream(pb.FollowLogsRequest, self.follow_logs),
            "Dial": BothStreams(pb.DialRequest, self.dial),
        }

    async def init(self, request: pb.InitRequest, _call: Call) -> pb.InitResponse:
        self.introduce(request)
        return pb.InitResponse(agent_version=sandgate_agent.__version__)

    def introduce(self, request: pb.InitRequest) -> None:
        """Say whose sandbox this is. Raises InvalidArgument."""
        for name, value in request.envs.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise InvalidArgument(f"'{name[:100]}' is not a valid variable, or its value contains a NUL byte")
        identity = Identity(
            sandbox_id=request.sandbox_id,
            template_id=request.template_id,
            envs=dict(request.envs),
            default_user=request.default_user or "user",
            default_workdir=request.default_workdir,
        )
        self._journal.keeps = _KEEPS.get(request.log_commands, LogCommands.NONE)
        self._sandbox.init(identity)
        self._warm_default()

    async def read_file(self, request: pb.ReadFileRequest, call: Call) -> None:
        reader = await self._open(request, call.acting_user)
        try:
            if request.header_only:
                await call.send(pb.ReadFileResponse(header=_header(reader)))
            else:
                await _send_file(reader, call)
        finally:
            _close(reader)

    async def open_to_hand_over(self, path: str, acting_user: str | None) -> tuple[Reader, bytes]:
        """A whole file as :meth:`read_file` opens it, with its header (:mod:`sandgate_agent.handover`)."""
        reader = await self._open(pb.ReadFileRequest(path=path), acting_user)
        return reader, _header(reader).SerializeToString()

    async def write_file(self, call: Call) -> pb.WriteFileResponse:
        account = self._sandbox.acting(call.acting_user)
        requests = call.requests
        first = await anext(requests, None)
        if first is None or not first.HasField("header"):
            raise InvalidArgument("the first message of WriteFile must be a header")
        path = resolve(first.header.path, account, default=self._sandbox.default_workdir)
        metadata = dict(first.header.metadata)
        owner = (account.uid, account.gid) if self._sandbox.accounts.owns_files else None
        names = OwnerNames(self._sandbox.accounts, account)
        # Most files come in one piece: opening and writing it together saves them a change of threads.
        begun = await _next_piece(requests)
        writer = await _opened(lambda: begin_to_write(path, owner, begun or b""))
        try:
            if begun is not None:
                await _receive_content(writer, requests)
            entry = await asyncio.to_thread(writer.finish, metadata, names)
        finally:
            _close(writer)
        return pb.WriteFileResponse(entry=entry_info(entry))

    async def metrics(self, _request: pb.MetricsRequest, _call: Call) -> pb.MetricsResponse:
        usage = await self._measure()
        return pb.MetricsResponse(
            time=timestamp(usage.time_ns),
            cpu_count=usage.cpu_count,
            cpu_used_pct=usage.cpu_used_pct,
            mem_total=usage.mem_total,
            mem_used=usage.mem_used,
            mem_cache=usage.mem_cache,
            disk_used=usage.disk_used,
            disk_total=usage.disk_total,
        )

    async def get_envs(self, _request: pb.GetEnvsRequest, _call: Call) -> pb.GetEnvsResponse:
        return pb.GetEnvsResponse(envs=self._sandbox.variables)

    async def dial(self, call: Call) -> None:
        requests = call.requests
        first = await anext(requests, None)
        if first is None or not first.HasField("open"):
            raise InvalidArgument("the first message of Dial must be open")
        async with self._ports.open(first.open.port) as tunnel:
            await call.send(pb.DialResponse(opened=pb.DialResponse.Opened()))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_to_port(tunnel, requests))
                    group.create_task(_from_port(tunnel, call))
            except BaseExceptionGroup as failed:
                # When one side fails, the other was only cancelled.
                raise failed.exceptions[0] from None

    async def follow_logs(self, request: pb.FollowLogsRequest, call: Call) -> None:
        journal = self._journal
        after = request.after if request.journal == journal.id else 0
        async with aclosing(journal.follow(after)) as batches:
            async for batch in batches:
                await call.send(pb.FollowLogsResponse(journal=journal.id, lines=map(_line, batch)))

    async def _open(self, request: pb.ReadFileRequest, acting_user: str | None) -> Reader:
        account = self._sandbox.acting(acting_user)
        path = resolve(request.path, account, default=self._sandbox.default_workdir)
        length = request.length if request.HasField("length") else None
        return await _opened(lambda: Reader(path, offset=request.offset, length=length))

    def _warm_default(self) -> None:
        try:
            self._warm(self._sandbox.acting(None))
        except SandgateError:
            # The default user may be made later, by a command of root; a call that acts as it gets the error.
            pass


async def _opened(make: Callable[[], _File]) -> _File:
    """Open in a thread; what is opened for a caller who has gone meanwhile is closed again."""

    def leave(opened: asyncio.Future[_File]) -> None:
        if opened.exception() is None:
            _close(opened.result())

    opening = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(leave)
        raise


def _close(file: Reader | Writer) -> None:
    """Close without waiting: a thread may still be in a call that its cancelled caller has left."""
    if not file.try_close():
        asyncio.get_running_loop().run_in_executor(None, file.close)


async def _send_file(reader: Reader, call: Call) -> None:
    loop = asyncio.get_running_loop()
    message = pb.ReadFileResponse(header=_header(reader)).SerializeToString()
    while True:
        # The next piece is read while this one is sent. At the end there is none, and a change of threads less.
        ahead = None if reader.at_end else loop.run_in_executor(None, reader.read)
        try:
            await call.send_encoded(message)
            data = b"" if ahead is None else await ahead
        finally:
            if ahead is not None:
                _leave(ahead)
        if not data:
            return
        message = _content_message(data)


def _content_message(data: bytes) -> bytes:
    """``ReadFileResponse(data=data)`` as it is on the wire. Made by hand, for the library copies content once more."""
    head = bytearray([_DATA_TAG])
    length = len(data)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join((head, data))


async def _next_piece(requests: AsyncIterator[pb.WriteFileRequest]) -> bytes | None:
    """None at the end."""
    request = await anext(requests, None)
    if request is None:
        return None
    if request.WhichOneof("part") != "data":
        raise InvalidArgument("a message of WriteFile after the first is not data")
    return request.data


async def _receive_content(writer: Writer, requests: AsyncIterator[pb.WriteFileRequest]) -> None:
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] = loop.create_future()
    writing.set_result(None)
    try:
        while (piece := await _next_piece(requests)) is not None:
            # One piece is written while the next comes in.
            await writing
            writing = loop.run_in_executor(None, writer.write, piece)
        await writing
    finally:
        _leave(writing)


async def _to_port(tunnel: Tunnel, requests: AsyncIterator[pb.DialRequest]) -> None:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise InvalidArgument("a message of Dial after the first is not data")
        try:
            await tunnel.write(request.data)
        except DataLoss:
            # A server may answer before it has read all, and close. What it said is still to be read, and so is its end.
            return
    tunnel.end()


async def _from_port(tunnel: Tunnel, call: Call) -> None:
    while data := await tunnel.read():
        await call.send(pb.DialResponse(data=data))
    await call.send(pb.DialResponse(end=pb.DialResponse.End()))


def _leave(work: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; its error, if there is one, has been told or comes too late."""
    if not work.cancel() and not work.cancelled():
        work.exception()


def _header(reader: Reader) -> pb.ReadFileResponse.Header:
    return pb.ReadFileResponse.Header(
        path=reader.path,
        name=os.path.basename(reader.path),
        size=reader.size,
        modified_time=timestamp(reader.modified_ns),
    )


def _line(line: Line) -> pb.CommandLine:
    return pb.CommandLine(
        number=line.number,
        time=timestamp(line.at),
        pid=line.pid,
        tag=line.tag,
        stream=pb.CommandLine.STREAM_UNSPECIFIED if line.stream is None else _STREAMS[line.stream],
        text=line.text,
    )


_STREAMS = {
    Stream.STDOUT: pb.CommandLine.STREAM_STDOUT,
    Stream.STDERR: pb.CommandLine.STREAM_STDERR,
    Stream.PTY: pb.CommandLine.STREAM_PTY,
}
