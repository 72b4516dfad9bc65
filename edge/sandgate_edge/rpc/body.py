"""Reading the body of an RPC: bounded while it is read, and broken framing told as the client's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from sandgate_edge.connect.compression import gunzip
from sandgate_edge.connect.envelope import EnvelopeReader
from sandgate_edge.keys import PLACE, SETTINGS
from sandgate_errors import InvalidArgument, ResourceExhausted, Unimplemented

__all__ = ["envelopes", "only_envelope", "whole_body"]

_ENCODINGS = frozenset({"", "identity", "gzip"})


async def whole_body(request: web.Request) -> bytes:
    """The body of a unary call, inflated. Raises ResourceExhausted as soon as it is known to be too large."""
    encoding = _encoding(request, "Content-Encoding")
    limit = request.app[SETTINGS].request_limit
    if request.content_length is not None and request.content_length > limit:
        raise ResourceExhausted(
            f"message of {request.content_length} bytes is larger than the limit of {limit}", should_retry=False
        )
    parts: list[bytes] = []
    size = 0
    async for chunk in _chunks(request):
        size += len(chunk)
        if size > limit:
            raise ResourceExhausted(f"message is larger than the limit of {limit} bytes", should_retry=False)
        request[PLACE].hold(size)
        parts.append(chunk)
    body = b"".join(parts)
    if encoding != "gzip":
        return body
    # In a thread: a small body can take long, and inflating lets the others run.
    body = await asyncio.to_thread(gunzip, body, max_bytes=limit)
    request[PLACE].hold(len(body))
    return body


async def envelopes(request: web.Request, *, keeps: bool = False) -> AsyncIterator[bytes]:
    """The messages of a stream call, each as soon as it is complete. ``keeps``: who takes them has all of them in the end."""
    place, kept = request[PLACE], 0
    gzip = _encoding(request, "Connect-Content-Encoding") == "gzip"
    reader = EnvelopeReader(max_bytes=request.app[SETTINGS].request_limit, gzip=gzip)
    async for chunk in _chunks(request):
        payloads = reader.feed(chunk)
        while (payload := await _next(payloads, gzip=gzip)) is not None:
            place.hold(kept + len(payload) + reader.pending)
            yield payload
            kept += len(payload) if keeps else 0
        place.hold(kept + reader.pending)
    reader.finish()


async def only_envelope(request: web.Request) -> bytes:
    """The one message of a server-stream call. It is read to the end first: nothing starts on half a request."""
    found: bytes | None = None
    async for payload in envelopes(request, keeps=True):
        if found is not None:
            raise InvalidArgument("more than one message in the request of a server stream")
        found = payload
    if found is None:
        raise InvalidArgument("no message in the request")
    return found


async def _next(payloads: Iterator[bytes], *, gzip: bool) -> bytes | None:
    # One at a time, so that no more than one is there unpacked.
    return await asyncio.to_thread(next, payloads, None) if gzip else next(payloads, None)


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    try:
        while chunk := await request.content.readany():
            yield chunk
    except web.RequestPayloadError as error:
        raise InvalidArgument("the request body is broken") from error


def _encoding(request: web.Request, header: str) -> str:
    encoding = request.headers.get(header, "").strip().lower()
    if encoding not in _ENCODINGS:
        raise Unimplemented(f"{header} must be gzip or identity")
    return encoding
