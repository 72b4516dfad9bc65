"""One log line for one request, and the id that ties together all lines about it.

Never in a line: a query string (it may hold a signature), a header, a path that is not one of ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import structlog
from aiohttp import hdrs, web

from sandgate_edge.keys import REQUEST_ID, SANDBOX_ID

__all__ = ["add_header", "observe"]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
_HEADER = "X-Request-Id"
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
# As other servers log it: the client closed the connection before the answer was complete.
_CLIENT_CLOSED = 499


@web.middleware
async def observe(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The outermost middleware. Everything below it answers with a response, so what escapes is a client that left."""
    given = request.headers.get(_HEADER, "")
    request[REQUEST_ID] = given if _SANE_ID.fullmatch(given) else uuid4().hex
    started = time.perf_counter()
    status = _CLIENT_CLOSED
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        _log.info(
            "request",
            method=request.method,
            route=_route(request),
            sandbox=_sandbox(request),
            status=status,
            duration_ms=round((time.perf_counter() - started) * 1000, 1),
            request_id=request[REQUEST_ID],
        )


async def add_header(request: web.Request, response: web.StreamResponse) -> None:
    """A signal of every response: the caller can quote the id, and no library version is told."""
    response.headers[hdrs.SERVER] = "sandgate"
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[_HEADER] = request_id


def _sandbox(request: web.Request) -> str | None:
    """Of the data plane as routed; of the control plane as it stands in the path, if that can be an id at all."""
    named: str = request.get(SANDBOX_ID) or request.match_info.get("id", "")
    return named if _SANE_ID.fullmatch(named) else None


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical
