"""The baseline of transfers: an aiohttp server that writes a body to a file and sends a file, and does nothing else.

Prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop
from aiohttp import web

__all__ = ["main"]

_PIECE = 1 << 18


def application(folder: Path) -> web.Application:
    file = folder / "file"

    async def upload(request: web.Request) -> web.Response:
        with file.open("wb") as out:
            async for piece in request.content.iter_chunked(_PIECE):
                out.write(piece)
        return web.json_response([{"name": file.name}])

    async def download(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = file.stat().st_size
        await response.prepare(request)
        with file.open("rb") as content:
            while piece := content.read(_PIECE):
                await response.write(piece)
        return response

    app = web.Application(client_max_size=1 << 60)
    app.add_routes([web.post("/files", upload), web.get("/files", download)])
    return app


async def serve(folder: Path) -> None:
    runner = web.AppRunner(application(folder), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    uvloop.run(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
