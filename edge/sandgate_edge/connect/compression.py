"""Undoing gzip of one message: the only compression that is spoken here, and towards the server only (envd.md 2.1)."""

from __future__ import annotations

import zlib

from sandgate_errors import InvalidArgument, ResourceExhausted

__all__ = ["gunzip"]

_GZIP = 16 + zlib.MAX_WBITS


def gunzip(data: bytes, *, max_bytes: int) -> bytes:
    """The content of one whole gzip member. Stops at the limit: a small message can unpack to a thousand times its size."""
    inflate = zlib.decompressobj(wbits=_GZIP)
    try:
        content = inflate.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidArgument("the message is not valid gzip") from error
    if len(content) > max_bytes:
        raise ResourceExhausted(
            f"message is larger than the limit of {max_bytes} bytes after decompression", should_retry=False
        )
    if not inflate.eof or inflate.unused_data:
        raise InvalidArgument("the message is not valid gzip")
    return content
