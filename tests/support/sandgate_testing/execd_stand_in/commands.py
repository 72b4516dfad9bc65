"""``/command``: programs that get no input, and whose output is told by lines when they have ended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from typing import Any

from sandgate_testing.execd_stand_in.http import PIECE, Exchange, Failure, Route, answer, answer_json, route

__all__ = ["Commands"]

#: Seconds of the stream after its last event.
_STAYS_OPEN = 1.0


class Command:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.id = uuid.uuid4().hex
        self.output = bytearray()
        self.process = process
        self.following = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, spec: Mapping[str, Any]) -> Command:
        """Raises OSError."""
        return cls(
            await asyncio.create_subprocess_exec(
                shutil.which("bash") or "/bin/sh",
                "-c",
                spec["command"],
                cwd=spec.get("cwd") or None,
                env={**os.environ, **(spec.get("envs") or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                user=spec.get("uid"),
                group=spec.get("gid"),
                extra_groups=[] if spec.get("uid") else None,
            )
        )

    async def _follow(self) -> int:
        assert self.process.stdout is not None
        while piece := await self.process.stdout.read(PIECE):
            self.output += piece
        return await self.process.wait()


class Commands:
    """All that were ever started."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    @property
    def routes(self) -> list[Route]:
        return [
            route("POST", "/command", self._run),
            route("GET", r"/command/status/(\w+)", self._status),
            route("GET", r"/command/(\w+)/logs", self._logs),
        ]

    def _find(self, command_id: str) -> Command:
        if command_id not in self._commands:
            raise Failure(404, "NOT_FOUND", f"command {command_id} not found")
        return self._commands[command_id]

    async def _status(self, exchange: Exchange, command_id: str) -> None:
        code = self._find(command_id).process.returncode
        await answer_json(exchange.writer, {"id": command_id, "running": code is None, "exit_code": code})

    async def _logs(self, exchange: Exchange, command_id: str) -> None:
        await answer(exchange.writer, 200, bytes(self._find(command_id).output), kind="text/plain")

    async def _run(self, exchange: Exchange) -> None:
        spec = await exchange.request.body.json(dict)
        if not isinstance(spec.get("command"), str):
            raise Failure(400, "INVALID_REQUEST_BODY", "command is missing")
        # Its end is that of the connection.
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        try:
            command = await Command.start(spec)
        except OSError as error:
            await _tell(exchange, type="error", error=_error(str(error)))
            return
        self._commands[command.id] = command
        await _tell(exchange, type="init", text=command.id)
        if spec.get("background"):
            await _tell(exchange, type="execution_complete", execution_time=0)
        else:
            await _tell(exchange, type="ping", text="pong")
            await _tell_end(exchange, command)
        await asyncio.sleep(_STAYS_OPEN)


async def _tell_end(exchange: Exchange, command: Command) -> None:
    code = await command.following
    for line in command.output.decode(errors="replace").splitlines():
        await _tell(exchange, type="stdout", text=line or "\n")
    if code == 0:
        await _tell(exchange, type="execution_complete", execution_time=1)
    else:
        await _tell(exchange, type="error", error=_error(str(code)))


def _error(value: str) -> dict[str, object]:
    return {"ename": "CommandExecError", "evalue": value, "traceback": []}


async def _tell(exchange: Exchange, **event: object) -> None:
    exchange.writer.write(json.dumps({**event, "timestamp": time.time_ns() // 10**6}).encode() + b"\n\n")
    await exchange.writer.drain()
