"""One request and its answer over a tunnel: HTTP/1.1 as its client, to whatever serves the port (behaviour.md R12).

h11 keeps the protocol: it has no I/O of its own, tells interim answers, trailers and a change of protocol apart, and takes
nothing for an answer that is none. Both bodies pass piece by piece as they come, at the pace of whoever reads them, and the
answer may begin and end before the request has. Nothing has a deadline: an event stream may be silent for hours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc.aio
import h11
from aiohttp import web

from sandgate_edge.keys import ANSWER_BEGAN
from sandgate_edge.ports.heads import AnswerHead, answer_head, interim_head, last_chunk
from sandgate_edge.ports.tunnel import Tunnel
from sandgate_edge.ports.upgrade import pass_bytes
from sandgate_errors import SandboxUnreachable

__all__ = ["Exchange", "NoAnswer", "Passed"]

# Servers have limits between 8 and 64 KiB themselves; cookies and security policies fill them.
_MAX_HEAD_BYTES = 256 * 1024

_Event: TypeAlias = h11.Event | type[h11.PAUSED] | type[h11.NEED_DATA]


class NoAnswer(SandboxUnreachable):
    """What listens on the port takes connections and does not answer, or not in HTTP/1.1: status 502, in words of its own."""

    def __init__(self) -> None:
        super().__init__("The sandbox is running but what listens on the port did not give a valid answer")


class Passed(web.StreamResponse):
    """Stands for an answer that was written to the connection already, as aiohttp wants one."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._passed_keep_alive = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._passed_keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to be sent."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to be sent."""


class Exchange:
    """``confirm_end`` raises when the sandbox is gone: an end that its death has caused must not look like one (R13)."""

    def __init__(self, request: web.Request, tunnel: Tunnel, *, confirm_end: Callable[[], Awaitable[None]]) -> None:
        self._request = request
        self._tunnel = tunnel
        self._confirm_end = confirm_end
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def run(self, head: h11.Request) -> Passed:
        """Raises NoAnswer, RequestPayloadError, ConnectionError (the client left) or AioRpcError (the tunnel broke)."""
        await self._send(head)
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_body())
                passed = await self._answer()
                # An answer that is complete may leave the rest of the request unread.
                sending.cancel()
        except BaseExceptionGroup as failed:
            # When one direction fails, the other was only cancelled.
            raise failed.exceptions[0] from None
        return passed

    async def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self._tunnel.write(data)

    async def _send_body(self) -> None:
        try:
            async for piece in self._request.content.iter_any():
                await self._send(h11.Data(data=piece))
            await self._send(h11.EndOfMessage())
        except grpc.aio.AioRpcError:
            pass  # whoever reads the answer gets it too, after what was answered before

    async def _answer(self) -> Passed:
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            if event.status_code == 101:
                return await self._switch(event)
            if self._request.version >= (1, 1):
                await self._request.writer.write(interim_head(event))
            event = await self._next()
        if not isinstance(event, h11.Response):
            raise NoAnswer
        # A client that is not done with its request may go on with it for long: nothing else can follow on its connection.
        done = self._request.content.is_eof()
        head = answer_head(self._request, event, keep_alive=self._request.keep_alive and done)
        self._request[ANSWER_BEGAN] = time.perf_counter()
        await self._request.writer.write(head.data)
        await self._pass_body(head)
        return Passed(event.status_code, keep_alive=head.keep_alive)

    async def _pass_body(self, head: AnswerHead) -> None:
        writer = self._request.writer
        while isinstance(event := await self._next(), h11.Data):
            await writer.write(b"%x\r\n%b\r\n" % (len(event.data), event.data) if head.chunked else event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise NoAnswer
        if head.ends_by_closing:
            await self._confirm_end()
        if head.chunked:
            await writer.write(last_chunk(event))

    async def _switch(self, answer: h11.InformationalResponse) -> Passed:
        self._request[ANSWER_BEGAN] = time.perf_counter()
        await self._request.writer.write(interim_head(answer))
        already, _ = self._http.trailing_data
        await pass_bytes(self._request, self._tunnel, already=already, confirm_end=self._confirm_end)
        return Passed(answer.status_code, keep_alive=False)

    async def _next(self) -> _Event:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._tunnel.read())
        except h11.RemoteProtocolError as error:
            raise NoAnswer from error
        return event
