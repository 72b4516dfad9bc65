"""``/proxy/{port}/...``: to a port of the sandbox, HTTP and what becomes of it after an upgrade alike, as bytes."""

from __future__ import annotations

import asyncio
import contextlib

from sandgate_testing.execd_stand_in.http import Exchange, answer

__all__ = ["PREFIX", "relay"]

PREFIX = "/proxy/"


async def relay(exchange: Exchange) -> None:
    request, reader, writer = exchange.request, exchange.reader, exchange.writer
    port, _, path = request.target.removeprefix(PREFIX).partition("/")
    try:
        near = await asyncio.open_connection("127.0.0.1", int(port))
    except (OSError, OverflowError, ValueError):
        await answer(writer, 502, b"Bad Gateway", kind="text/plain")
        return
    near[1].write(f"{request.method} /{path} HTTP/1.1\r\n".encode("latin-1") + request.head)
    tasks = {asyncio.create_task(_pump(reader, near[1])), asyncio.create_task(_pump(near[0], writer))}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    near[1].close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
