"""WebSocket (RFC 6455), the server's side of it, without extensions."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import os
import struct
from collections.abc import AsyncGenerator

from sandgate_testing.execd_stand_in import HARSH
from sandgate_testing.execd_stand_in.http import Exchange, Failure

__all__ = ["BINARY", "TEXT", "WebSocket"]

TEXT, BINARY, _CLOSE, _PING, _PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_FINAL = _MASKED = 0x80
#: Said to both sides by RFC 6455, to show that a server knows what it agrees to.
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
#: Seconds. Whoever leaves two pings without an answer is gone.
_PING_INTERVAL = float(os.environ.get("EXECD_PING_SECONDS", "30"))
_READ_DEADLINE = 2 * _PING_INTERVAL
_WRITE_DEADLINE = _PING_INTERVAL / 3 if HARSH else None
#: Seconds for the other side to agree to the end.
_CLOSING_TIME = 5.0
#: Bytes, where the genuine program knows no limit.
_LARGEST_MESSAGE = 64 * 1024 * 1024


class _Broken(Exception):
    """The other side broke the rules; ``code`` says to it which."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class WebSocket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._closing = False
        #: Done once nothing more can be sent or is worth to be read.
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    def accept(cls, exchange: Exchange) -> WebSocket:
        """Agree to the handshake; raises Failure where it is none."""
        fields = exchange.request.fields
        key = fields.get("sec-websocket-key", "")
        if fields.get("upgrade", "").lower() != "websocket" or fields.get("sec-websocket-version") != "13":
            raise Failure(400, "INVALID_REQUEST", "this is for WebSocket, version 13")
        with contextlib.suppress(binascii.Error, ValueError):
            if len(base64.b64decode(key, validate=True)) == 16:
                token = base64.b64encode(hashlib.sha1((key + _MAGIC).encode()).digest()).decode()
                lines = ("Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {token}")
                exchange.writer.write("\r\n".join(("HTTP/1.1 101 Switching Protocols", *lines, "\r\n")).encode())
                return cls(exchange.reader, exchange.writer)
        raise Failure(400, "INVALID_REQUEST", "the WebSocket's key is none")

    def post(self, opcode: int, payload: bytes) -> None:
        """Put it behind what is already to be sent."""
        if not self._closing:
            self._writer.write(_frame(opcode, payload))

    async def send(self, opcode: int, payload: bytes) -> None:
        """Wait until the other side has taken enough of what was posted; raises OSError when it is gone."""
        self.post(opcode, payload)
        try:
            async with asyncio.timeout(_WRITE_DEADLINE):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            self._leave()
            raise

    async def ping(self) -> None:
        """Again and again, until cancelled or nobody is there."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_PING_INTERVAL)
                await self.send(_PING, b"")
        self._leave()

    async def messages(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """What is sent, with its opcode, until the other side closes, breaks off or is silent for too long."""
        kind, whole = 0, bytearray()
        try:
            while not self.gone.done():
                async with asyncio.timeout(_READ_DEADLINE):
                    final, opcode, payload = await self._read_frame(_LARGEST_MESSAGE - len(whole))
                if opcode == _CLOSE:
                    self.post(_CLOSE, payload[:2])
                    return
                elif opcode == _PING:
                    self.post(_PONG, payload)
                elif opcode in (0, TEXT, BINARY):
                    kind = opcode or kind
                    whole += payload
                    if final:
                        yield kind, bytes(whole)
                        whole.clear()
        except _Broken as broken:
            self.post(_CLOSE, struct.pack("!H", broken.code))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._leave()

    async def _read_frame(self, most: int) -> tuple[bool, int, bytes]:
        first, second = await self._reader.readexactly(2)
        length = second & ~_MASKED
        if length == 126:
            (length,) = struct.unpack("!H", await self._reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self._reader.readexactly(8))
        if not second & _MASKED or first & 0x70:
            raise _Broken(1002)
        if length > most:
            raise _Broken(1009)
        mask = await self._reader.readexactly(4)
        return bool(first & _FINAL), first & 0x0F, _unmasked(mask, await self._reader.readexactly(length))

    async def close(self, code: int, reason: str) -> None:
        """Say that this is the end, after all that was sent. Hanging up at once can lose it on its way."""
        await self.send(_CLOSE, struct.pack("!H", code) + reason.encode())
        self._closing = True
        if HARSH:
            self._writer.close()
        else:
            asyncio.get_running_loop().call_later(_CLOSING_TIME, self._writer.transport.abort)

    def evict(self, code: int, reason: str) -> None:
        """Make it go now. One that does not even take what it was sent is not told why."""
        if self._writer.transport.get_write_buffer_size() == 0:
            self.post(_CLOSE, struct.pack("!H", code) + reason.encode())
            self._closing = True
            self._writer.close()
        else:
            self._writer.transport.abort()
        self._leave()

    def _leave(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


def _frame(opcode: int, payload: bytes) -> bytes:
    length = len(payload)
    if length < 126:
        return struct.pack("!BB", _FINAL | opcode, length) + payload
    if length < 1 << 16:
        return struct.pack("!BBH", _FINAL | opcode, 126, length) + payload
    return struct.pack("!BBQ", _FINAL | opcode, 127, length) + payload


def _unmasked(mask: bytes, payload: bytes) -> bytes:
    """As one number, because byte by byte takes a hundred times as long."""
    length = len(payload)
    key = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")
