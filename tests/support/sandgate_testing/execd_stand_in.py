#!/usr/bin/env python3
"""A stand-in for OpenSandbox's execd, written for sandgate's tests. It is NOT the genuine program.

It follows the parts of execd 1.1's published interface that the backend uses: ``/ping``, ``/files/upload`` (multipart,
``metadata`` and ``file`` alternating, both as files; ``mode`` in octal digits), ``/command`` (foreground and background, as
root or another uid; bare JSON objects with empty lines between, and a stream that stays open for a second after its last),
``/command/status/{id}``, ``/command/{id}/logs``, ``/proxy/{port}/...`` for HTTP and WebSocket, and the access token, which
the relay does not ask for.

Left out: sessions, terminals, code execution, metrics, searching and listing files, downloads, isolated sub-sessions,
interruption, hooks, log cursors, keep-alive of connections. Needs Python in the sandbox's image; the genuine one does not.
"""

import asyncio
import contextlib
import email.parser
import json
import os
import re
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__: list[str] = []

PORT = 44772
TOKEN = os.environ.get("EXECD_ACCESS_TOKEN", "")
STAYS_OPEN_SECONDS = 1.0

commands: dict[str, "Command"] = {}


class Command:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.id = uuid.uuid4().hex
        self.output = b""
        self.following: asyncio.Future[None] | None = None
        self.process = subprocess.Popen(
            [next(shell for shell in ("/bin/bash", "/bin/sh") if os.path.exists(shell)), "-c", spec["command"]],
            cwd=spec.get("cwd") or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=spec.get("uid"),
            group=spec.get("gid"),
            extra_groups=[] if spec.get("uid") else None,
        )
        commands[self.id] = self

    async def follow(self) -> None:
        loop = asyncio.get_running_loop()
        stdout: Any = self.process.stdout
        while piece := await loop.run_in_executor(None, stdout.read1, 65536):
            self.output += piece
        await loop.run_in_executor(None, self.process.wait)


async def answer(writer: asyncio.StreamWriter, status: int, body: bytes = b"", kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = line.decode().split(" ")
        headers = dict(email.parser.BytesParser().parsebytes(rest).items())
        fields = {name.lower(): value for name, value in headers.items()}
        if target.startswith("/proxy/"):
            await relay(method, target, rest, reader, writer)
        elif TOKEN and fields.get("x-execd-access-token") != TOKEN:
            await answer(writer, 401, b'{"error": "Unauthorized"}')
        else:
            await handle(method, target, fields, await body_of(fields, reader), writer)
    writer.close()


async def body_of(fields: Mapping[str, str], reader: asyncio.StreamReader) -> bytes:
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return body
    return await reader.readexactly(int(fields.get("content-length", 0)))


async def handle(
    method: str, target: str, fields: Mapping[str, str], body: bytes, writer: asyncio.StreamWriter
) -> None:
    path = target.partition("?")[0]
    if path == "/ping":
        await answer(writer, 200)
    elif path == "/files/upload" and method == "POST":
        await upload(fields, body, writer)
    elif path == "/command" and method == "POST":
        await run(json.loads(body), writer)
    elif (found := re.fullmatch(r"/command/status/(\w+)", path)) and found[1] in commands:
        process = commands[found[1]].process
        status = {"id": found[1], "running": process.poll() is None, "exit_code": process.poll()}
        await answer(writer, 200, json.dumps(status).encode())
    elif (found := re.fullmatch(r"/command/(\w+)/logs", path)) and found[1] in commands:
        await answer(writer, 200, commands[found[1]].output, "text/plain")
    else:
        await answer(writer, 404, b'{"code": "NOT_FOUND"}')


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


async def upload(fields: Mapping[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
    boundary = b"--" + _found('boundary="?([^";]+)', fields["content-type"]).encode()
    parts: dict[str, list[bytes]] = {"metadata": [], "file": []}
    for part in body.split(boundary)[1:-1]:
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = _found(r'[; ]name="(\w+)"', head.decode())
        if b"filename=" not in head:
            await answer(writer, 400, b'{"code": "INVALID_FILE_METADATA", "message": "metadata file is missing"}')
            return
        parts[name].append(content.removesuffix(b"\r\n"))
    for about, content in zip(parts["metadata"], parts["file"], strict=True):
        meta = json.loads(about)
        os.makedirs(os.path.dirname(meta["path"]), exist_ok=True)
        Path(meta["path"]).write_bytes(content)
        os.chown(meta["path"], 0, 0)
        os.chmod(meta["path"], int(str(meta["mode"]), 8))
    await answer(writer, 200)


async def run(spec: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    async def tell(**event: object) -> None:
        writer.write(json.dumps({**event, "timestamp": 0}).encode() + b"\n\n")
        await writer.drain()

    command = Command(spec)
    await tell(type="init", text=command.id)
    following = asyncio.ensure_future(command.follow())
    if spec.get("background"):
        command.following = following
        await tell(type="execution_complete", execution_time=0)
    else:
        await tell(type="ping", text="pong")
        await following
        for line in command.output.decode(errors="replace").splitlines():
            await tell(type="stdout", text=line or "\n")
        if command.process.returncode == 0:
            await tell(type="execution_complete", execution_time=1)
        else:
            code = str(command.process.returncode)
            await tell(type="error", error={"ename": "CommandExecError", "evalue": code, "traceback": []})
    await asyncio.sleep(STAYS_OPEN_SECONDS)


async def relay(
    method: str, target: str, rest: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    port, _, path = target.removeprefix("/proxy/").partition("/")
    try:
        near = await asyncio.open_connection("127.0.0.1", int(port))
    except OSError:
        await answer(writer, 502, b"Bad Gateway", "text/plain")
        return
    near[1].write(f"{method} /{path} HTTP/1.1\r\n".encode() + rest)
    tasks = {asyncio.ensure_future(pump(reader, near[1])), asyncio.ensure_future(pump(near[0], writer))}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    near[1].close()


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()


async def main() -> None:
    server = await asyncio.start_server(serve, "0.0.0.0", PORT, limit=1 << 20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
