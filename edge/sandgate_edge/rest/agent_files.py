"""Calls that carry file content between the edge and a sandbox's agent, with what is common to both directions.

A call is always ended when its block is left, so that an agent never keeps a file open for a client that went away, was
refused, or had enough. The bounded queues of gRPC hold back whichever side is faster; nothing is gathered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from aiohttp import web

from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge import routing
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, HANDOVER, REQUEST_ID, TELEMETRY
from sandgate_edge.rest.call_status import CallStatus
from sandgate_edge.rest.file_parts import Content, Part
from sandgate_edge.rest.handover import HandedFile
from sandgate_edge.telemetry import Telemetry
from sandgate_errors import Internal, NotFound, SandgateError

__all__ = ["PIECE", "AgentFiles", "Reading", "Writing"]

#: The size of one message. Larger ones gain nothing; smaller ones cost a task switch each.
PIECE = 512 * 1024


@dataclass(frozen=True)
class AgentFiles:
    """The files of one sandbox, on behalf of one request and its acting user (None: the default one)."""

    request: web.Request
    located: Located
    user: str | None

    @asynccontextmanager
    async def read(self, message: agent_pb2.ReadFileRequest) -> AsyncIterator[Reading]:
        """Open a file. Raises what the agent says about the path, before anything is read."""
        call = self.request.app[AGENTS].read_file(self.located)(message, metadata=self._metadata())
        try:
            try:
                async with routing.answering(self.request, self.located, within=routing.FIRST_MESSAGE_SECONDS):
                    first = await call.read()
            except grpc.aio.AioRpcError as error:
                raise await self.error(error) from error
            if not isinstance(first, agent_pb2.ReadFileResponse) or first.WhichOneof("part") != "header":
                raise Internal("the sandbox's agent sent no file header")
            yield Reading(call=call, header=first.header, telemetry=self.request.app[TELEMETRY])
        finally:
            call.cancel()

    @asynccontextmanager
    async def write(self, message: agent_pb2.WriteFileRequest.Header) -> AsyncIterator[Writing]:
        """Write a file. What arrived stays if the block is left before :meth:`Writing.finish`."""
        call = self.request.app[AGENTS].agent(self.located).WriteFile(metadata=self._metadata())
        status = CallStatus(call)
        writing = Writing(call=call, telemetry=self.request.app[TELEMETRY])
        try:
            await writing.start(message)
            yield writing
        except grpc.aio.AioRpcError as error:
            raise await self.error(await status.behind(error)) from error
        finally:
            call.cancel()

    @asynccontextmanager
    async def handed(self, reading: Reading) -> AsyncIterator[HandedFile | None]:
        """The same file as a descriptor, where its agent is on this machine; the stream is then not to be read on."""
        file = await self.request.app[HANDOVER].take(self.located, user=self.user, header=reading.header)
        if file is None:
            yield None
            return
        try:
            reading.call.cancel()
            yield file
        finally:
            file.close()

    async def resolve_existing(self, path: str) -> str | None:
        """Where a path leads, if there is anything."""
        stub = self.request.app[AGENTS].filesystem(self.located)
        try:
            async with routing.answering(self.request, self.located, within=routing.REPLY_SECONDS):
                answer = await stub.Stat(filesystem_pb2.StatRequest(path=path), metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            failure = await self.error(error)
            if isinstance(failure, NotFound) and error.code() is not grpc.StatusCode.UNAVAILABLE:
                return None
            raise failure from error
        return answer.entry.path

    async def error(self, error: grpc.aio.AioRpcError) -> SandgateError:
        """What to tell the client; the answer must not have begun."""
        return await routing.lost(self.request, self.located, error)

    def cut(self, error: Exception | None = None) -> None:
        """Reset the connection in the middle of an answer: an orderly end would pass a part off as the whole file.

        What has become of an agent that does not answer is for the next request to find out, on a new channel.
        """
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE:
            self.request.app[AGENTS].forget(self.located)
        routing.cut(self.request)

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        agents = self.request.app[AGENTS]
        return agents.metadata(self.located, request_id=self.request[REQUEST_ID], acting_user=self.user)


@dataclass(frozen=True)
class Reading:
    """One open file."""

    call: grpc.aio.UnaryStreamCall[agent_pb2.ReadFileRequest, Part]
    header: agent_pb2.ReadFileResponse.Header
    telemetry: Telemetry

    async def piece(self) -> Content:
        """The next bytes; none at the end of the file. Raises AioRpcError."""
        while isinstance(part := await self.call.read(), (agent_pb2.ReadFileResponse, memoryview)):
            content = part if isinstance(part, memoryview) else part.data
            if content:
                self.passed(len(content))
                return content
        return b""

    def passed(self, count: int) -> None:
        """Bytes of the file that have come, by whatever road."""
        self.telemetry.downloaded += count

    async def start(self, size: int) -> tuple[bytes, bool]:
        """At least ``size`` bytes from here, and whether that is all there is."""
        pieces: list[Content] = []
        found = 0
        while found < size:
            piece = await self.piece()
            if not piece:
                return b"".join(pieces), True
            pieces.append(piece)
            found += len(piece)
        return b"".join(pieces), False


class Writing:
    """One file being written; small pieces are put together."""

    def __init__(
        self,
        *,
        call: grpc.aio.StreamUnaryCall[agent_pb2.WriteFileRequest, agent_pb2.WriteFileResponse],
        telemetry: Telemetry,
    ) -> None:
        self._call = call
        self._telemetry = telemetry
        self._pieces: list[bytes] = []
        self._size = 0

    async def start(self, header: agent_pb2.WriteFileRequest.Header) -> None:
        await self._send(agent_pb2.WriteFileRequest(header=header))

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises AioRpcError once the agent has refused."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= PIECE:
            await self._flush()

    async def finish(self) -> filesystem_pb2.EntryInfo:
        """The file's entry once everything is on disk."""
        await self._flush()
        try:
            await self._call.done_writing()
        except asyncio.InvalidStateError:
            pass  # the call has ended already; the next line says how
        return (await self._call).entry

    async def _flush(self) -> None:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._telemetry.uploaded += self._size
        self._pieces.clear()
        self._size = 0
        # A single piece can be larger than an agent takes when the client sent a great chunk.
        for start in range(0, len(data), 2 * PIECE):
            piece = data if len(data) <= 2 * PIECE else data[start : start + 2 * PIECE]
            await self._send(agent_pb2.WriteFileRequest(data=piece))

    async def _send(self, message: agent_pb2.WriteFileRequest) -> None:
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            # The agent ended the call while we were busy reading from the client: its status is the answer.
            await self._call
            raise Internal("the sandbox's agent ended the upload early") from None
