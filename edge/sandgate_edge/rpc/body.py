"""Reading the body of an RPC: bounded while it is read, and broken framing told as the client's mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from sandgate_edge.connect.envelope import EnvelopeReader
from sandgate_edge.keys import SETTINGS
from sandgate_errors import InvalidArgument, ResourceExhausted, Unimplemented

__all__ = ["envelopes", "only_envelope", "whole_body"]

# What the HTTP parser undoes by itself; only gzip is part of the contract.
_INFLATED = frozenset({"", "identity", "gzip"})


async def whole_body(request: web.Request) -> bytes:
    """The body of a unary call, inflated. Raises ResourceExhausted as soon as it is known to be too large."""
    _check_encoding("Content-Encoding", request.headers.get("Content-Encoding"))
    limit = request.app[SETTINGS].max_rpc_bytes
    if request.content_length is not None and request.content_length > limit:
        raise ResourceExhausted(f"message of {request.content_length} bytes is larger than the limit of {limit}")
    parts: list[bytes] = []
    size = 0
    async for chunk in _chunks(request):
        size += len(chunk)
        if size > limit:
            raise ResourceExhausted(f"message is larger than the limit of {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


async def envelopes(request: web.Request) -> AsyncIterator[bytes]:
    """The messages of a stream call, each as soon as it is complete."""
    encoding = request.headers.get("Connect-Content-Encoding")
    _check_encoding("Connect-Content-Encoding", encoding)
    reader = EnvelopeReader(max_bytes=request.app[SETTINGS].max_rpc_bytes, gzip=_normal(encoding) == "gzip")
    async for chunk in _chunks(request):
        for payload in reader.feed(chunk):
            yield payload
    reader.finish()


async def only_envelope(request: web.Request) -> bytes:
    """The one message of a server-stream call. It is read to the end first: nothing starts on half a request."""
    found: bytes | None = None
    async for payload in envelopes(request):
        if found is not None:
            raise InvalidArgument("more than one message in the request of a server stream")
        found = payload
    if found is None:
        raise InvalidArgument("no message in the request")
    return found


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    try:
        while chunk := await request.content.readany():
            yield chunk
    except web.RequestPayloadError as error:
        raise InvalidArgument("the request body is broken") from error


def _check_encoding(header: str, value: str | None) -> None:
    if _normal(value) not in _INFLATED:
        raise Unimplemented(f"{header} must be gzip or identity")


def _normal(value: str | None) -> str:
    return (value or "").strip().lower()
