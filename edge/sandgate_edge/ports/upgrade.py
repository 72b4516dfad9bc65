"""After a change of protocol: bytes both ways until both sides have ended (RFC 9110 section 7.8; behaviour.md R12)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
from aiohttp import web

from sandgate_edge.keys import STREAMS
from sandgate_edge.ports.tunnel import Tunnel

__all__ = ["pass_bytes"]

# What may wait for the tunnel before the client's connection is read no further.
_BUFFER_BYTES = 64 * 1024
# From the end of the server's side: what a client then still says, hardly anybody hears.
_LAST_WORDS_SECONDS = 30.0


async def pass_bytes(
    request: web.Request, tunnel: Tunnel, *, already: bytes, confirm_end: Callable[[], Awaitable[None]]
) -> None:
    """``already`` came right behind the server's answer. Raises ConnectionError or AioRpcError when a side breaks."""
    streams, transport = request.app[STREAMS], request.transport
    if transport is None:
        return
    received = _Inbox(transport)
    request.protocol.set_parser(received)  # type: ignore[arg-type]  # typed for the one parser that aiohttp has
    streams.add(transport)
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(_from_client(received, tunnel))
            await _to_client(request, tunnel, already)
            await confirm_end()
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            await asyncio.wait({sending}, timeout=_LAST_WORDS_SECONDS)
            sending.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        streams.discard(transport)


class _Inbox:
    """What the connection feeds instead of its parser of requests, and holds when too much waits.

    aiohttp's own reader would do, but that it stops the parser too, which has no request before it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting = bytearray()
        self._ended = False
        self._fed = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """The connection's call: not the end, and nothing left over."""
        self._waiting += data
        self._fed.set()
        if len(self._waiting) > _BUFFER_BYTES:
            self._transport.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        self._ended = True
        self._fed.set()

    async def read(self) -> bytes:
        """What has come; nothing once the client has ended its side."""
        while not self._waiting and not self._ended:
            self._fed.clear()
            await self._fed.wait()
        data = bytes(self._waiting)
        if len(data) > _BUFFER_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()
        self._waiting.clear()
        return data


async def _from_client(received: _Inbox, tunnel: Tunnel) -> None:
    try:
        while data := await received.read():
            await tunnel.write(data)
        await tunnel.end()
    except grpc.aio.AioRpcError:
        pass  # whoever reads from the tunnel gets it too


async def _to_client(request: web.Request, tunnel: Tunnel, already: bytes) -> None:
    data = already or await tunnel.read()
    while data:
        await request.writer.write(data)
        data = await tunnel.read()
