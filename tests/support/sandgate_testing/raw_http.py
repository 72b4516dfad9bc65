"""HTTP by hand: bytes over a socket, and what came back.

For what no client library would send, and for clients whose own cost must not show in a measurement.
Connect envelopes as in docs/architecture.md: one flag byte, four bytes of length, the payload.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RawReply", "drain", "envelope", "envelopes", "exchange", "request"]

_END = 0x02


@dataclass(frozen=True, kw_only=True)
class RawReply:
    """One answer, its body undone from chunks. ``status`` 0: the server closed without a word."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def end_error(self) -> dict[str, Any] | None:
        """The error in the end frame of a Connect stream; None where it ended well."""
        end = [payload for flags, payload in envelopes(self.body) if flags & _END]
        if len(end) != 1:
            raise ValueError(f"{len(end)} end frames in {self.body!r}")
        error: dict[str, Any] | None = json.loads(end[0]).get("error")
        return error


def request(method: str, target: str, headers: Mapping[str, str] | None = None, *, body: bytes = b"") -> bytes:
    """One request as bytes, closing the connection after it. ``target`` goes out as it is."""
    fields = {"Host": "127.0.0.1", "Connection": "close", **(headers or {})}
    if "transfer-encoding" not in {name.lower() for name in fields}:
        fields.setdefault("Content-Length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def exchange(address: tuple[str, int], data: bytes, *, half_close: bool = False, timeout: float = 20) -> RawReply:
    """Sends ``data`` on a connection of its own and reads the answer to its end, or until the server closes."""
    with socket.create_connection(address, timeout=timeout) as connection:
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            # Refused before all was sent; the answer is there nevertheless.
            pass
        return _parse(_read_all(connection))


def drain(address: tuple[str, int], data: bytes, *, timeout: float = 600) -> int:
    """Sends ``data`` and reads to the end, keeping nothing; how many bytes came, headers and framing included."""
    buffer = bytearray(1 << 20)
    received = 0
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.sendall(data)
        while count := connection.recv_into(buffer):
            received += count
    return received


def envelope(payload: bytes | dict[str, Any], *, flags: int = 0, announced: int | None = None) -> bytes:
    """One Connect envelope; ``announced`` tells another length than the payload has."""
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return struct.pack(">BI", flags, len(content) if announced is None else announced) + content


def envelopes(body: bytes) -> list[tuple[int, bytes]]:
    """Flags and payload of each envelope; a last one that is cut short is an error."""
    found: list[tuple[int, bytes]] = []
    while body:
        flags, length = struct.unpack_from(">BI", body)
        if len(body) < 5 + length:
            raise ValueError(f"an envelope announces {length} bytes and has {len(body) - 5}")
        found.append((flags, body[5 : 5 + length]))
        body = body[5 + length :]
    return found


def _read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        # A server that refuses a body goes on reading it for a while, so the end of the answer is not the end of the
        # connection.
        while not _is_complete(received) and (piece := connection.recv(1 << 16)):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def _is_complete(received: bytearray) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    announced = re.search(rb"^content-length: *(\d+) *\r?$", head, re.IGNORECASE | re.MULTILINE)
    return bool(found) and announced is not None and len(body) >= int(announced[1])


def _parse(data: bytes) -> RawReply:
    if not data:
        return RawReply(status=0, headers={}, body=b"")
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunk(body)
    return RawReply(status=int(first.split()[1]), headers=headers, body=body)


def _unchunk(data: bytes) -> bytes:
    pieces: list[bytes] = []
    while data:
        line, _, rest = data.partition(b"\r\n")
        size = int(line, 16)
        pieces.append(rest[:size])
        data = rest[size + 2 :] if size else b""
    return b"".join(pieces)
