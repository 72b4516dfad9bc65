"""Requests that two readers could understand differently, such as this gateway and a proxy in front of it.

First station of every request, before its plane is looked at: how long its body is and which host it is for must be said
once, in words that are understood (RFC 9112 sections 3.2.2 and 6.1). The parser refuses the rest: two lengths or hosts, a
length beside a transfer coding, a coding behind ``chunked``. A connection ends with such a request, since what follows on
it may be part of the body to the other reader.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import hdrs, web

from sandgate_errors import InvalidArgument, SandgateError, Unimplemented

__all__ = ["authority_and_rest", "fault_of", "tokens"]


def fault_of(request: web.BaseRequest) -> SandgateError | None:
    """What is wrong with the request; None for nearly all."""
    if hdrs.TRANSFER_ENCODING in request.headers:
        if request.version < (1, 1):
            return InvalidArgument("HTTP/1.0 has no transfer codings")
        if tokens(request.headers.getall(hdrs.TRANSFER_ENCODING)) != ["chunked"]:
            return Unimplemented("of the transfer codings only chunked is understood")
    authority, _ = authority_and_rest(request.raw_path)
    if authority is not None and authority.lower() != request.headers.get(hdrs.HOST, authority).lower():
        return InvalidArgument("the host of the request's target is not that of its Host header")
    return None


def tokens(values: Iterable[str]) -> list[str]:
    """The members of a header that is a list, in lower case."""
    return [token.strip().lower() for value in values for token in value.split(",") if token.strip()]


def authority_and_rest(target: str) -> tuple[str | None, str]:
    """A target that names its host in its two parts; of any other, None and all of it."""
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in {"http", "https"}:
        return None, target
    end = min((index for mark in "/?" if (index := rest.find(mark)) >= 0), default=len(rest))
    return rest[:end], rest[end:] if rest[end : end + 1] == "/" else "/" + rest[end:]
