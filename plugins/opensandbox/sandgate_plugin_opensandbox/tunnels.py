"""The ways to the agents: a unix socket of this machine for each sandbox, behind which every connection is a WebSocket.

Core and edges speak gRPC to the socket as they do everywhere. What they say goes as it is through the server, an ingress or
execd's relay, none of which would let gRPC pass, to the door in the sandbox (``sandgate_agent.doorway``). Where a sandbox is
reached is asked of the server once, and again when nobody answers there: a port may have moved while it stood still.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from sandgate_errors import SandboxUnreachable, SandgateError
from sandgate_plugin_opensandbox.server import Endpoint, Refused

__all__ = ["Tunnel", "Tunnels"]

_log = logging.getLogger(__name__)

_TOKEN_HEADER = "X-Sandgate-Tunnel"  # noqa: S105 - a name
#: What the door says first.
_READY = "ready"
#: Seconds from the connection to the door's first word.
_CONNECT_LIMIT = 10.0
#: Seconds for a door to say goodbye; one that stands still does not.
_CLOSE_LIMIT = 1.0
_PIECE = 64 * 1024
_LONGEST_MESSAGE = 16 * 1024 * 1024

#: Where the door of a sandbox is now.
Where = Callable[[], Awaitable[Endpoint]]


class Tunnel:
    """The socket of one sandbox."""

    def __init__(self, session: aiohttp.ClientSession, where: Where, *, server_id: str, path: Path, token: str) -> None:
        self._session = session
        self.server_id = server_id
        self._where = where
        self._path = path
        self._token = token
        self._endpoint: Endpoint | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        # Of an earlier start: nobody else makes anything here.
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path, limit=2 * _PIECE)
        self._path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)
        await self.hang_up()

    async def hang_up(self) -> None:
        """End all connections: who holds one learns of it."""
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def moved(self) -> None:
        """Look for the door anew at the next connection."""
        self._endpoint = None

    async def check(self) -> None:
        """Return when the agent takes connections. Raises SandboxUnreachable when it does not."""
        async with await self._connect() as door:
            await door.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own, and not the streams': those take the cancellation of one for a fault.
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(functools.partial(self._ended, writer))

    def _ended(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        """Here and not in the task: one that is cancelled before its first step never comes to its end."""
        self._connections.discard(task)
        writer.close()
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("the way to the agent behind %s ended by a fault", self._path.name, exc_info=fault)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await self._connect() as door:
                await _join(reader, writer, door)
        except (SandgateError, OSError, aiohttp.ClientError) as error:
            _log.warning("the agent behind %s cannot be reached: %s", self._path.name, error)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        known = self._endpoint
        if known is not None:
            with contextlib.suppress(SandboxUnreachable):
                return await self._knock(known)
        try:
            found = await self._where()
        except Refused as refused:
            raise SandboxUnreachable("the sandbox is nowhere to be reached") from refused
        door = await self._knock(found)
        self._endpoint = found
        return door

    async def _knock(self, endpoint: Endpoint) -> aiohttp.ClientWebSocketResponse:
        door: aiohttp.ClientWebSocketResponse | None = None
        try:
            async with asyncio.timeout(_CONNECT_LIMIT):
                door = await self._session.ws_connect(
                    endpoint.url(websocket=True),
                    headers={**endpoint.headers, _TOKEN_HEADER: self._token},
                    max_msg_size=_LONGEST_MESSAGE,
                    # No heartbeat: a sandbox that stands still answers none, and its streams go on afterwards.
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_LIMIT),
                )
                # A relay may open a WebSocket and then find nobody behind it.
                first = await door.receive()
            if first.type is aiohttp.WSMsgType.TEXT and first.data == _READY:
                return door
            raise SandboxUnreachable(f"the sandbox's agent does not open: {first.data or first.type.name}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await _drop(door)
            raise SandboxUnreachable(f"the sandbox's agent cannot be reached: {type(error).__name__}") from error
        except BaseException:
            await _drop(door)
            raise


async def _drop(door: aiohttp.ClientWebSocketResponse | None) -> None:
    if door is not None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            await door.close()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: aiohttp.ClientWebSocketResponse
) -> None:
    """Carry bytes both ways until one side has gone, and with it the connection."""
    tasks = {asyncio.ensure_future(_outwards(reader, door)), asyncio.ensure_future(_inwards(door, writer))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a connection to an agent ended: %s", error)


async def _outwards(reader: asyncio.StreamReader, door: aiohttp.ClientWebSocketResponse) -> None:
    while piece := await reader.read(_PIECE):
        # Returns once it is taken on: what flows is bounded by the slower side.
        await door.send_bytes(piece)


async def _inwards(door: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    async for message in door:
        if message.type is not aiohttp.WSMsgType.BINARY:
            return
        writer.write(message.data)
        await writer.drain()


class Tunnels:
    """All sockets of one gateway, by sandbox."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._tunnels: dict[str, Tunnel] = {}
        for left in folder.glob("*.sock"):
            # Of a gateway that was killed; what goes on gets another.
            left.unlink()

    def path(self, sandbox: str) -> Path:
        return self._folder / f"{sandbox}.sock"

    async def open(self, sandbox: str, server_id: str, where: Where, *, token: str) -> Tunnel:
        """The sandbox's tunnel; the one that there is, if it leads to what has this id on the server."""
        known = self._tunnels.get(sandbox)
        if known is not None and known.server_id == server_id:
            return known
        await self.forget(sandbox)
        tunnel = Tunnel(self._session, where, server_id=server_id, path=self.path(sandbox), token=token)
        self._tunnels[sandbox] = tunnel
        await tunnel.open()
        return tunnel

    async def forget(self, sandbox: str) -> None:
        if (tunnel := self._tunnels.pop(sandbox, None)) is not None:
            await tunnel.close()

    async def close(self) -> None:
        tunnels = list(self._tunnels.values())
        self._tunnels.clear()
        await asyncio.gather(*(tunnel.close() for tunnel in tunnels))
