"""One log line for one request, the same in numbers, and the id that ties together all lines about it.

Never in a line: a query string (it may hold a signature), a header, a path that is not one of ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import structlog
from aiohttp import hdrs, web

from sandgate_edge.keys import ANSWER_BEGAN, ERROR_CODE, PORT, REQUEST_ID, SANDBOX_ID, TELEMETRY, TRACE_ID

__all__ = ["SERVER_NAME", "add_header", "observe", "route_of"]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
#: In every answer, so that none tells which library in which version wrote it.
SERVER_NAME = "sandgate"
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
    telemetry = request.app[TELEMETRY]
    telemetry.in_flight += 1
    started = time.perf_counter()
    status = _CLIENT_CLOSED
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        ended = time.perf_counter()
        route = route_of(request)
        # Of a client that left before there was an answer, nobody knows how long it would have taken.
        began = request.get(ANSWER_BEGAN, None if status == _CLIENT_CLOSED else ended)
        telemetry.in_flight -= 1
        telemetry.answered(
            route,
            request.method,
            code=request.get(ERROR_CODE) or str(status),
            seconds=None if began is None else began - started,
        )
        _log.info(
            "request",
            method=request.method,
            route=route,
            sandbox=_sandbox(request),
            status=status,
            duration_ms=round((ended - started) * 1000, 1),
            request_id=request[REQUEST_ID],
            **({"trace_id": request[TRACE_ID]} if TRACE_ID in request else {}),
        )


async def add_header(request: web.Request, response: web.StreamResponse) -> None:
    """A signal of every response: the caller can quote the id, and no library version is told."""
    request[ANSWER_BEGAN] = time.perf_counter()
    response.headers[hdrs.SERVER] = SERVER_NAME
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[_HEADER] = request_id


def _sandbox(request: web.Request) -> str | None:
    """Of the data plane as routed; of the control plane as it stands in the path, if that can be an id at all."""
    named: str = request.get(SANDBOX_ID) or request.match_info.get("id", "")
    return named if _SANE_ID.fullmatch(named) else None


def route_of(request: web.Request) -> str:
    """The route as it stands in the table; never what a client made up."""
    if PORT in request:
        return "port"
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical
