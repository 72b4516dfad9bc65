"""gzip piece by piece, both ways (RFC 1952): for ``/files``, whose clients allow it on nearly every download.

Writing, each piece becomes deflate blocks of its own that refer to nothing before them. So a piece that does not get
smaller (an archive, an image, random bytes) can go as stored blocks, which cost a checksum and no more, and the level can
change from piece to piece. Reading gives pieces of bounded size, whatever the ratio.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from sandgate_errors import InvalidArgument

__all__ = ["PIECE", "Gunzip", "Gzip"]

#: The largest piece that :class:`Gunzip` gives out.
PIECE = 256 * 1024

_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
# The last block: fixed codes, nothing in it.
_LAST_BLOCK = b"\x03\x00"
_MAX_STORED = 0xFFFF
_RAW_DEFLATE = -zlib.MAX_WBITS
_GZIP = 16 + zlib.MAX_WBITS
# A piece must shrink below this part of itself to be worth the time of both sides.
_WORTH = 0.9
# How many pieces are stored after one that did not shrink, before trying again.
_PIECES_STORED = 15


class Gzip:
    """One gzip member, written in pieces."""

    def __init__(self) -> None:
        self._checksum = 0
        self._size = 0
        self._stored_ahead = 0

    @property
    def storing(self) -> bool:
        """Whether the next piece will not be compressed, and so costs next to no time."""
        return self._stored_ahead > 0

    def header(self) -> bytes:
        return _HEADER

    def piece(self, data: bytes | memoryview) -> bytes:
        """The blocks of one piece, complete up to its last byte."""
        if not data:
            return b""
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += len(data)
        if self._stored_ahead:
            self._stored_ahead -= 1
            return _stored(data)
        compressor = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE)
        small = compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)
        if len(small) < len(data) * _WORTH:
            return small
        self._stored_ahead = _PIECES_STORED
        return _stored(data)

    def end(self) -> bytes:
        return _LAST_BLOCK + struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF)


def _stored(data: bytes | memoryview) -> bytes:
    view = memoryview(data)
    parts: list[bytes | memoryview] = []
    for start in range(0, len(data), _MAX_STORED):
        block = view[start : start + _MAX_STORED]
        parts.append(struct.pack("<BHH", 0, len(block), len(block) ^ 0xFFFF))
        parts.append(block)
    return b"".join(parts)


class Gunzip:
    """Undoes gzip of any number of members. Raises InvalidArgument for anything that is not that."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)
        self._started = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The content as far as ``data`` tells it; ask for a piece only when there is room for it."""
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
            self._started = True
            try:
                piece = self._member.decompress(data, PIECE)
            except zlib.error:
                raise InvalidArgument("the gzip body is broken") from None
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                yield piece
            # A full piece may leave output inside the decompressor although all input is consumed.
            while not self._member.eof and not data and len(piece) == PIECE:
                piece = self._inside()
                if piece:
                    yield piece
                if self._member.eof:
                    data = self._member.unused_data

    def _inside(self) -> bytes:
        try:
            return self._member.decompress(b"", PIECE)
        except zlib.error:
            raise InvalidArgument("the gzip body is broken") from None

    def end(self) -> None:
        """To be called at the end of the body: what was cut off is not passed as whole."""
        if not self._started or not self._member.eof:
            raise InvalidArgument("the gzip body ends too early")
