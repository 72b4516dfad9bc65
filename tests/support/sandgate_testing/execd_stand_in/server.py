"""Where requests come in: the token, the relay, and who answers what."""

from __future__ import annotations

import asyncio
import contextlib
import os

from sandgate_testing.execd_stand_in import files, metrics
from sandgate_testing.execd_stand_in.commands import Commands
from sandgate_testing.execd_stand_in.http import (
    Exchange,
    Failure,
    Request,
    Route,
    answer,
    answer_json,
    read_request,
    route,
)
from sandgate_testing.execd_stand_in.relay import PREFIX, relay
from sandgate_testing.execd_stand_in.sessions import Sessions

__all__ = ["main"]

_TOKEN = os.environ.get("EXECD_ACCESS_TOKEN", "")
_PORT = int(os.environ.get("EXECD_PORT", "44772"))
#: Bytes of a header, and of what is read ahead.
_LIMIT = 256 * 1024


class Server:
    def __init__(self) -> None:
        self._routes: list[Route] = [
            route("GET", "/ping", _ping),
            *Commands().routes,
            *Sessions().routes,
            *files.routes(),
            *metrics.routes(),
        ]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whoever breaks it off or speaks no HTTP gets no answer."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                request = await read_request(reader)
                await self._answer(Exchange(request=request, reader=reader, writer=writer))
        finally:
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.target.startswith(PREFIX):
            await relay(exchange)
            return
        if _TOKEN and request.fields.get("x-execd-access-token") != _TOKEN:
            await request.body.skip()
            await answer_json(exchange.writer, {"error": "Unauthorized"}, status=401)
            return
        try:
            if request.fields.get("expect", "").lower() == "100-continue":
                exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._dispatch(request, exchange)
        except Failure as failure:
            await request.body.skip()
            error = {"code": failure.code, "message": failure.message}
            await answer_json(exchange.writer, error, status=failure.status)

    async def _dispatch(self, request: Request, exchange: Exchange) -> None:
        for method, pattern, handler in self._routes:
            if method == request.method and (found := pattern.fullmatch(request.path)):
                await handler(exchange, *found.groups())
                return
        raise Failure(404, "NOT_FOUND", f"nothing is at {request.method} {request.path}")


async def _ping(exchange: Exchange) -> None:
    await answer(exchange.writer, 200)


async def _serve() -> None:
    server = await asyncio.start_server(Server().serve, "0.0.0.0", _PORT, limit=_LIMIT)
    if _PORT == 0:
        print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    asyncio.run(_serve())
