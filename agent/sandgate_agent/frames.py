"""Messages on the sockets between the agent and its spawners: a length, a number of descriptors, then JSON.

Used by both ends, so it imports nothing of asyncio or grpc: a spawner is forked before those are loaded. JSON, because
the end that runs as the sandbox's user may have been taken over by its code: a decoder must not be able to do harm.

ASCII only, so that words which are not UTF-8 pass too, as the surrogates that they are in Python.

Descriptors ride on the first byte of their message. The kernel keeps their order but may deliver plain bytes of an
earlier message in the same read, hence a queue that messages take their share from.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["BadFrame", "Decoder", "Message", "encode", "read", "write"]

Message = dict[str, Any]

_HEADER = struct.Struct("!IB")
_READ_SIZE = 256 * 1024
#: More than one message ever carries (a program's three), so that a read is never truncated by us.
_MOST_FDS = 8
#: The kernel refuses to start programs with more than a few MiB of arguments; this only stops a broken peer.
_LARGEST = 256 * 1024 * 1024


class BadFrame(Exception):
    """The other end broke the format or a descriptor got lost: the connection is of no use any more."""


def encode(message: Message, fd_count: int = 0) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(body), fd_count) + body


class Decoder:
    """Bytes and descriptors in, messages out. ``most_fds`` of them may wait for their message."""

    def __init__(self, *, largest: int = _LARGEST, most_fds: int | None = None) -> None:
        self._largest = largest
        self._most_fds = most_fds
        self._buffer = bytearray()
        self._fds: deque[int | None] = deque()

    def feed(self, data: bytes, fds: Sequence[int | None]) -> None:
        self._buffer += data
        self._fds.extend(fds)
        if self._most_fds is not None and len(self._fds) > self._most_fds:
            raise BadFrame("more descriptors than messages need")

    def messages(self) -> Iterator[tuple[Message, list[int | None]]]:
        while (found := self._next()) is not None:
            yield found

    def close(self) -> None:
        """Close descriptors whose message never came."""
        while self._fds:
            if (fd := self._fds.popleft()) is not None:
                os.close(fd)

    def _next(self) -> tuple[Message, list[int | None]] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, fd_count = _HEADER.unpack_from(self._buffer)
        if length > self._largest:
            raise BadFrame(f"a message of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        if len(self._fds) < fd_count:
            raise BadFrame("a descriptor is missing")
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadFrame("not JSON") from error
        if not isinstance(message, dict):
            raise BadFrame("not an object")
        return message, [self._fds.popleft() for _ in range(fd_count)]


def read(sock: socket.socket, decoder: Decoder) -> bool:
    """Read once into ``decoder``; False at the end of the connection. Raises BlockingIOError like the socket does."""
    space = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = sock.recvmsg(_READ_SIZE, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # How the end looks when the other side left messages unread.
        return False
    fds: list[int | None] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.extend(numbers)
    if flags & socket.MSG_CTRUNC and not fds:
        # This process is at its limit of descriptors, and the kernel dropped the one that came with the message.
        fds.append(None)
    if not data:
        return False
    decoder.feed(data, fds)
    return True


def write(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a whole message on a blocking socket."""
    data = encode(message, len(fds))
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])
