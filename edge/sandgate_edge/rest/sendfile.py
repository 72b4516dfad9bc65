"""Sending a handed file into a client's connection by the kernel alone: sendfile(2), so no byte of it passes this process.

The event loop has no such call (uvloop leaves it out, and asyncio's reads the file on the loop's own thread). Here a thread
fills the connection's buffer and returns when it is full, so a client that reads slowly, or not at all, holds no thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiohttp import web

from sandgate_edge.rest.handover import HandedFile

__all__ = ["CutOff", "send"]

#: What a thread sends at most before others get their turn.
_TURN = 4 * 1024 * 1024
#: The longest that a disk may take for a turn.
_TURN_SECONDS = 60.0


class CutOff(Exception):
    """The file got shorter while it was read, or cannot be read to the end that was told."""


async def send(request: web.Request, file: HandedFile, *, offset: int, count: int, sent: Callable[[int], None]) -> None:
    """Send ``count`` bytes of an answer that has begun, behind what was written of it; ``sent`` is told how many went.

    Raises CutOff, and ConnectionResetError when the client has left.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    await _flush(request, transport)
    if transport.is_closing():
        raise ConnectionResetError("the client has left")
    # The connection's own number is the transport's: it may be closed, and given to another, while a thread is at work.
    out = os.dup(transport.get_extra_info("socket").fileno())
    file.keep(out)
    end = offset + count
    while offset < end:
        position = offset
        try:
            number, full = await file.call(lambda fd: _turn(out, fd, position, end), within=_TURN_SECONDS)  # noqa: B023
        except TimeoutError:
            raise CutOff from None
        offset += number
        sent(number)
        # What was written without it is part of the answer all the same.
        request.writer.output_size += number
        if full:
            await _writable(out, file)
        if file.sandbox_ended.done():
            raise CutOff


async def _flush(request: web.Request, transport: asyncio.Transport) -> None:
    """Until all that was written is in the kernel's hands, which keeps the order."""
    transport.set_write_buffer_limits(high=0)
    try:
        while transport.get_write_buffer_size() and not transport.is_closing():
            await request.writer.drain()
            await asyncio.sleep(0)
    finally:
        transport.set_write_buffer_limits()


async def _writable(out: int, file: HandedFile) -> None:
    """Until there is room, or nothing to wait for any more."""
    loop = asyncio.get_running_loop()
    room: asyncio.Future[None] = loop.create_future()
    loop.add_writer(out, _wake, room)
    try:
        await asyncio.wait({room, file.sandbox_ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_writer(out)


def _wake(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)


def _turn(out: int, fd: int, offset: int, end: int) -> tuple[int, bool]:
    """How many bytes were sent, and whether there is no room for more. Raises CutOff, ConnectionError."""
    begin = offset
    stop = min(end, offset + _TURN)
    while offset < stop:
        try:
            number = os.sendfile(out, fd, offset, stop - offset)
        except BlockingIOError:
            return offset - begin, True
        except ConnectionError:
            raise
        except OSError as error:
            raise CutOff from error
        if number == 0:
            raise CutOff
        offset += number
    return offset - begin, False
