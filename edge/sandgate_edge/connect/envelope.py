"""The frames of a Connect stream: one byte of flags, a length of four bytes, the payload (behaviour W2, envd.md 2.3).

Without I/O: bytes go in as they come off the network, messages come out. A frame's announced length is checked before
any of its payload is kept, and again while a compressed one is unpacked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from sandgate_edge.connect.compression import gunzip
from sandgate_errors import InvalidArgument, ResourceExhausted

__all__ = ["COMPRESSED", "END_STREAM", "EnvelopeReader", "pack"]

COMPRESSED = 0x01
END_STREAM = 0x02
_PREFIX = struct.Struct(">BI")


def pack(flags: int, payload: bytes) -> bytes:
    """One frame."""
    return _PREFIX.pack(flags, len(payload)) + payload


class EnvelopeReader:
    """Takes the bytes of a request body apart.

    Order of calls: :meth:`feed` any number of times, taking all messages out of its iterator each time, then
    :meth:`finish`. After a frame with the end flag nothing more may come. ``gzip``: the client announced it.
    """

    def __init__(self, *, max_bytes: int, gzip: bool) -> None:
        self._max_bytes = max_bytes
        self._gzip = gzip
        self._buffer = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are complete now. Raises InvalidArgument for a broken frame, ResourceExhausted for a large one."""
        self._buffer += data
        while self._buffer:
            if self._ended:
                raise InvalidArgument("the stream goes on after its end frame")
            payload = self._next()
            if payload is None:
                return
            if not self._ended:
                yield payload

    @property
    def pending(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def finish(self) -> None:
        """The body ended here. Raises InvalidArgument inside a frame."""
        if self._buffer:
            raise InvalidArgument("the body ends inside an envelope")

    def _next(self) -> bytes | None:
        if len(self._buffer) < _PREFIX.size:
            return None
        flags, length = _PREFIX.unpack_from(self._buffer)
        self._check(flags, length)
        end = _PREFIX.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_PREFIX.size : end])
        del self._buffer[:end]
        self._ended = bool(flags & END_STREAM)
        return gunzip(payload, max_bytes=self._max_bytes) if flags & COMPRESSED else payload

    def _check(self, flags: int, length: int) -> None:
        if flags & ~(COMPRESSED | END_STREAM):
            raise InvalidArgument(f"unknown envelope flags 0x{flags:02x}")
        if flags & COMPRESSED and not self._gzip:
            raise InvalidArgument("a compressed envelope, but no Connect-Content-Encoding was announced")
        if length > self._max_bytes:
            raise ResourceExhausted(
                f"message of {length} bytes is larger than the limit of {self._max_bytes}", should_retry=False
            )
