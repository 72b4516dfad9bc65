"""Messages into and out of their encodings: small ones at once, large ones beside the event loop.

A client may send or ask for tens of megabytes in a million members, which take seconds to read or write. All requests of
this process share one event loop, and none of them is to wait for that.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from google.protobuf.message import Message

from sandgate_edge.connect.codec import Codec

__all__ = ["decoded", "encoded"]

AnyMessage = TypeVar("AnyMessage", bound=Message)

# Some milliseconds of JSON at worst; a thread costs a tenth of one.
_INLINE_BYTES = 64 * 1024


async def decoded(codec: Codec, kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """Raises what :meth:`Codec.decode` raises."""
    if len(data) <= _INLINE_BYTES:
        return codec.decode(kind, data)
    return await asyncio.to_thread(codec.decode, kind, data)


async def encoded(codec: Codec, message: Message) -> bytes:
    if message.ByteSize() <= _INLINE_BYTES:
        return codec.encode(message)
    return await asyncio.to_thread(codec.encode, message)
