"""A way to the agent for where only HTTP and WebSocket pass: a WebSocket whose messages are the bytes of a connection.

Some platforms let nothing into a sandbox but HTTP requests and WebSockets (RFC 6455), by relays that are not ours; gRPC
does not survive them. This program listens on a port of the sandbox, asks whoever comes for a token before anything else
is looked at, and then carries bytes between the WebSocket and the agent's socket, both ways, as they are. A message's
borders mean nothing. The first message is the text ``ready``, from here: a relay may accept a WebSocket that nobody
behind it has.

A process of its own beside the agent, forked before gRPC is loaded; it ends when the agent does. Standard library only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import hashlib
import hmac
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["READY", "TOKEN_HEADER", "Door", "frame", "listen", "run_beside", "serve"]

#: Proves the caller. Not `Authorization`: relays keep that for themselves.
TOKEN_HEADER = "x-sandgate-tunnel"  # noqa: S105 - a name
READY = b"ready"
#: RFC 6455, 1.3.
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_FINAL, _MASKED = 0x80, 0x80
_LONGEST_CONTROL = 125
#: Seconds from the connection to the end of its request's head.
_HEAD_SECONDS = 10.0
_LONGEST_HEAD = 16 * 1024
#: Of one frame from outside. The other end sends 64 KiB; a relay may put several together.
_LONGEST_FRAME = 16 * 1024 * 1024
_PIECE = 64 * 1024
#: Connections that have not proved themselves yet; more of them are not accepted until one has gone.
_MOST_STRANGERS = 64


@dataclass(frozen=True, kw_only=True)
class Door:
    """What is served where."""

    port: int
    token: str = field(repr=False)
    #: The path of the agent's socket.
    agent: str


class _Refused(Exception):
    """The request is answered with this status and nothing else."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


class _Broken(Exception):
    """The other end does not keep to the protocol; the code of the close frame."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_beside(door: Door) -> None:
    """Serve in a child of this process until this process has ended. Call it before there are threads.

    Raises OSError where the port is somebody else's.
    """
    listener = listen(door.port)
    # Held open by the parent and by what it forks without another program: its end is theirs.
    lives, held = os.pipe()
    if os.fork() != 0:
        os.close(lives)
        listener.close()
        return
    status = 1
    try:
        os.close(held)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        asyncio.run(_until_end(door, listener, lives))
        status = 0
    finally:
        # Whatever happens, what the parent goes on to do is not done twice.
        os._exit(status)


def listen(port: int) -> socket.socket:
    """On all addresses of the sandbox, of both families where it has both: a relay may come from anywhere."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        except OSError as error:
            # A network without that family.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise
    return socket.create_server(("0.0.0.0", port), backlog=128)


async def _until_end(door: Door, listener: socket.socket, lives: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(lives, ended.set)
    async with await serve(door, listener):
        await ended.wait()


async def serve(door: Door, listener: socket.socket) -> asyncio.Server:
    """Accepting already. It owns the socket."""
    strangers = asyncio.Semaphore(_MOST_STRANGERS)

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            try:
                await _visit(door, reader, writer, strangers)
            finally:
                writer.close()

    return await asyncio.start_server(enter, sock=listener, limit=_LONGEST_HEAD)


async def _visit(
    door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, strangers: asyncio.Semaphore
) -> None:
    try:
        async with strangers:
            accept = await _admitted(door, reader)
        agent = await _connected(door)
    except _Refused as refused:
        writer.write(f"HTTP/1.1 {refused.status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return
    try:
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n" + frame(READY, opcode=_TEXT)
        )
        await writer.drain()
        await _carry((reader, writer), agent)
    finally:
        agent[1].close()


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected(door: Door) -> _Ends:
    try:
        return await asyncio.open_unix_connection(door.agent)
    except OSError:
        # It has not come up yet, or it has ended.
        raise _Refused("503 Service Unavailable") from None


async def _admitted(door: Door, reader: asyncio.StreamReader) -> bytes:
    """The answer to the caller's key. Raises _Refused for whoever has not the token or does not want a WebSocket."""
    try:
        async with asyncio.timeout(_HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused("431 Request Header Fields Too Large") from None
    line, _, rest = head.partition(b"\r\n")
    fields = _fields(rest)
    # Compared before anything else is, in a time that says nothing about it.
    if not hmac.compare_digest(fields.get(TOKEN_HEADER.encode(), b""), door.token.encode()):
        raise _Refused("401 Unauthorized")
    key = fields.get(b"sec-websocket-key", b"")
    if not line.startswith(b"GET ") or fields.get(b"upgrade", b"").lower() != b"websocket" or not _is_key(key):
        raise _Refused("400 Bad Request")
    if fields.get(b"sec-websocket-version") != b"13":
        raise _Refused("426 Upgrade Required")
    digest = hashlib.sha1(key + _GUID, usedforsecurity=False).digest()
    return base64.b64encode(digest)


def _fields(lines: bytes) -> Mapping[bytes, bytes]:
    pairs = (line.partition(b":") for line in lines.split(b"\r\n"))
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _is_key(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False


async def _carry(outside: _Ends, agent: _Ends) -> None:
    """Both ways until one side has gone, and with it the other: HTTP/2 has no half-closed connections."""
    tasks = {
        asyncio.ensure_future(_inwards(outside, agent[1])),
        asyncio.ensure_future(_outwards(agent[0], outside[1])),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    code = 1001
    for task in done:
        if isinstance(error := task.exception(), _Broken):
            code = error.code
    with contextlib.suppress(OSError):
        outside[1].write(frame(code.to_bytes(2, "big"), opcode=_CLOSE))


async def _inwards(outside: _Ends, agent: asyncio.StreamWriter) -> None:
    reader, writer = outside
    while True:
        opcode, payload = await _next_frame(reader)
        if opcode in {_BINARY, _CONTINUATION}:
            agent.write(payload)
            # Not before it is taken on: what flows is bounded by the slower side.
            await agent.drain()
        elif opcode == _PING:
            writer.write(frame(payload, opcode=_PONG))
            await writer.drain()
        elif opcode == _CLOSE:
            return
        elif opcode != _PONG:
            raise _Broken(1003)


async def _outwards(agent: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await agent.read(_PIECE):
        writer.write(frame(piece, opcode=_BINARY))
        await writer.drain()


def frame(payload: bytes, *, opcode: int) -> bytes:
    """One message in one frame, as a server sends it."""
    length = len(payload)
    if length <= _LONGEST_CONTROL:
        size = bytes((length,))
    elif length < 1 << 16:
        size = b"\x7e" + length.to_bytes(2, "big")
    else:
        size = b"\x7f" + length.to_bytes(8, "big")
    return bytes((_FINAL | opcode,)) + size + payload


async def _next_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Opcode and content of a client's frame. Raises _Broken."""
    first, second = await reader.readexactly(2)
    opcode, length = first & 0x0F, second & 0x7F
    # Reserved bits belong to extensions, and none was agreed on. Every frame of a client is masked.
    if first & 0x70 or not second & _MASKED:
        raise _Broken(1002)
    if opcode >= _CLOSE and (length > _LONGEST_CONTROL or not first & _FINAL):
        raise _Broken(1002)
    if length > _LONGEST_CONTROL:
        length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
    if length > _LONGEST_FRAME:
        raise _Broken(1009)
    mask = await reader.readexactly(4)
    return opcode, _unmasked(await reader.readexactly(length), mask)


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    """As one number: byte by byte would take a hundred times as long."""
    length = len(payload)
    key = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(length, "little")
