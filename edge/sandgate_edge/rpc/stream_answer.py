"""The answer of a stream call: frames written as they come, and the end frame that carries success or error (W2, W10)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from aiohttp import web
from google.protobuf.message import Message

from sandgate_edge import draining, routing
from sandgate_edge.connect.codec import Codec
from sandgate_edge.connect.envelope import pack
from sandgate_edge.core_client import Located
from sandgate_edge.keys import ERROR_CODE, POLICY, REQUEST_ID, STREAMS
from sandgate_edge.responses import end_frame, internal, meaning_of
from sandgate_errors import SandgateError

__all__ = ["StreamAnswer"]


class StreamAnswer:
    """Nothing is sent before the first frame, so that until then the sandbox's end can be told by status 502."""

    def __init__(self, request: web.Request, codec: Codec) -> None:
        self._request = request
        self._codec = codec
        # The content type must have no parameters: one SDK compares it whole.
        self.response = web.StreamResponse(headers={"Content-Type": codec.stream_type})
        self._held = b""

    def hold(self, message: Message) -> None:
        """Keeps the last message, to be written together with the end frame."""
        self._held = pack(0, self._codec.encode(message))

    async def send(self, message: Message) -> None:
        """Writes one message; waits while the client is slow."""
        await self._write(pack(0, self._codec.encode(message)))

    @asynccontextmanager
    async def ending(self, located: Located) -> AsyncIterator[None]:
        """Around the whole call: sends the end frame, with the error where there was one.

        Raises SandboxGone when nothing was sent yet; later the connection is cut instead, and no end frame follows.
        """
        streams, transport = self._request.app[STREAMS], self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        # Where it was asked for before the end of the edge, and comes to it now: nothing was begun.
        draining.check(self._request)
        streams.add(transport)
        try:
            error = None
            try:
                yield
            except grpc.aio.AioRpcError as failure:
                error = await routing.lost(self._request, located, failure)
            except SandgateError as failure:
                error = failure
            except ConnectionError:
                raise  # the client is gone: there is nobody to tell
            except Exception as failure:
                error = internal(failure, request_id=self._request[REQUEST_ID])
            await self._end(error)
        finally:
            streams.discard(transport)

    async def _end(self, error: SandgateError | None) -> None:
        if error is not None and not isinstance(error, routing.SandboxGone):
            error = await self._request.app[POLICY].error(self._request, error)
        if error is not None:
            self._request[ERROR_CODE] = meaning_of(error).connect.value
        if isinstance(error, routing.SandboxGone):
            if not self.response.prepared:
                raise error
            return  # the connection was cut
        await self._prepare()
        await self.response.write_eof(self._held + end_frame(error))

    async def _write(self, frame: bytes) -> None:
        await self._prepare()
        await self.response.write(frame)

    async def _prepare(self) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
