"""``/pty``: commands with an input, on pipes or a terminal, whose output waits for whoever attaches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from typing import Any

from sandgate_testing.execd_stand_in.http import Exchange, Failure, Route, answer, answer_json, route
from sandgate_testing.execd_stand_in.session import Session
from sandgate_testing.execd_stand_in.websocket import BINARY, TEXT, WebSocket

__all__ = ["Sessions"]

_TAKEN_OVER = 4001
_PROCESS_ENDED = 1000
_STDIN = 0


class Sessions:
    """All that were made and not deleted; a session stays when its process has ended."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        #: Who listens and writes to which. There is at most one.
        self._holders: dict[str, WebSocket] = {}

    @property
    def routes(self) -> list[Route]:
        return [
            route("POST", "/pty", self._create),
            route("GET", "/pty/([^/]+)", self._tell),
            route("DELETE", "/pty/([^/]+)", self._delete),
            route("GET", "/pty/([^/]+)/ws", self._connect),
        ]

    def _find(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise Failure(404, "CONTEXT_NOT_FOUND", f"pty session {session_id} not found")
        return self._sessions[session_id]

    async def _create(self, exchange: Exchange) -> None:
        spec = await exchange.request.body.json(dict)
        cwd, command = spec.get("cwd") or "", spec.get("command") or ""
        if not isinstance(cwd, str) or not isinstance(command, str):
            raise Failure(400, "INVALID_REQUEST_BODY", "error parsing request: cwd and command are text")
        cwd = os.path.expanduser(cwd)
        try:
            if cwd:
                os.makedirs(cwd, exist_ok=True)
        except OSError as error:
            raise Failure(500, "RUNTIME_ERROR", f"error creating pty session: {error.strerror}") from error
        session_id = str(uuid.uuid4())
        self._sessions[session_id] = Session(cwd=cwd or None, command=command)
        await answer_json(exchange.writer, {"session_id": session_id}, status=201)

    async def _tell(self, exchange: Exchange, session_id: str) -> None:
        session = self._find(session_id)
        about = {"session_id": session_id, "running": session.running, "output_offset": session.ring.total}
        await answer_json(exchange.writer, about)

    async def _delete(self, exchange: Exchange, session_id: str) -> None:
        session = self._find(session_id)
        del self._sessions[session_id]
        await session.end()
        await answer(exchange.writer, 200)

    async def _connect(self, exchange: Exchange, session_id: str) -> None:
        session, request = self._find(session_id), exchange.request
        if session_id in self._holders and request.first("takeover") != "1":
            raise Failure(409, "ALREADY_CONNECTED", f"another client is already connected to pty session {session_id}")
        socket = WebSocket.accept(exchange)
        if evicted := self._holders.pop(session_id, None):
            session.detach(evicted)
            evicted.evict(_TAKEN_OVER, "TAKEN_OVER")
        self._holders[session_id] = socket
        try:
            if await _started(session, socket, terminal=request.first("pty") != "0"):
                await self._talk(session_id, session, socket, since=_number(request.first("since")))
        finally:
            session.detach(socket)
            if self._holders.get(session_id) is socket:
                del self._holders[session_id]

    async def _talk(self, session_id: str, session: Session, socket: WebSocket, *, since: int) -> None:
        mode = "pty" if session.terminal else "pipe"
        session.attach(socket, since, {"type": "connected", "session_id": session_id, "mode": mode})
        pinging = asyncio.create_task(socket.ping())
        telling = asyncio.create_task(_tell_exit(session, socket))
        try:
            async with contextlib.aclosing(socket.messages()) as messages:
                async for opcode, payload in messages:
                    if not await _hear(session, socket, opcode=opcode, payload=payload):
                        break
        finally:
            for task in (pinging, telling):
                task.cancel()
            await asyncio.wait({pinging, telling})


async def _started(session: Session, socket: WebSocket, *, terminal: bool) -> bool:
    """Whether there is something to talk with, and still somebody who wants to."""
    try:
        await session.start(terminal=terminal)
    except OSError as error:
        await _say(socket, type="error", code="START_FAILED", error=str(error))
        return False
    return not socket.gone.done()


async def _tell_exit(session: Session, socket: WebSocket) -> None:
    """Once all that the process wrote is on its way to the socket."""
    code = await session.exit_code()
    try:
        await _say(socket, type="exit", exit_code=code)
        await socket.close(_PROCESS_ENDED, "process exited")
    except OSError:
        # Whoever reads from it sees the same.
        pass


async def _hear(session: Session, socket: WebSocket, *, opcode: int, payload: bytes) -> bool:
    """Do what was said; whether to go on listening."""
    if opcode == BINARY:
        return payload[:1] != bytes([_STDIN]) or await _feed(session, socket, payload[1:])
    frame = _parsed(payload)
    match frame.get("type"):
        case "stdin":
            return await _feed(session, socket, str(frame.get("data", "")).encode())
        case "signal":
            session.signal(str(frame.get("signal")))
        case "resize":
            session.resize(cols=_number(frame.get("cols")), rows=_number(frame.get("rows")))
        case "ping":
            await _say(socket, type="pong")
        case None:
            pass
        case other:
            await _say(socket, type="error", code="INVALID_FRAME", error=f'unknown frame type "{other}"')
    return True


async def _feed(session: Session, socket: WebSocket, data: bytes) -> bool:
    """While the process does not take it, nothing else is heard."""
    try:
        await session.write(data, until=socket.gone)
    except OSError as error:
        await _say(socket, type="error", code="STDIN_WRITE_FAILED", error=error.strerror)
        return False
    return True


async def _say(socket: WebSocket, **frame: object) -> None:
    await socket.send(TEXT, json.dumps(frame).encode())


def _parsed(text: bytes) -> dict[str, Any]:
    """Nothing of what is no JSON object, as the genuine program ignores it."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return {"type": "", **value} if isinstance(value, dict) else {}


def _number(text: object) -> int:
    """0 for what is none."""
    try:
        return int(str(text))
    except ValueError:
        return 0
