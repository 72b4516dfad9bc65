"""A trace of each request, where traces are on (``sandgate_tracing``); without them this middleware is not there.

The span is below the client's, if it sent a ``traceparent``, and carries what the log line does: no query, no header, no
path that is not one of ours.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sandgate_edge.keys import PORT, REQUEST_ID, SANDBOX_ID, TRACE_ID
from sandgate_edge.request_log import route_of
from sandgate_tracing import Tracing

__all__ = ["following"]

_SERVER_FAULT = 500


def following(tracing: Tracing) -> Middleware:
    """The middleware around all others."""

    @web.middleware
    async def follow(request: web.Request, handler: Handler) -> web.StreamResponse:
        with tracing.incoming(request.method, request.headers, http_request_method=request.method) as span:
            request[TRACE_ID] = f"{span.get_span_context().trace_id:032x}"
            try:
                response = await handler(request)
                span.set_attribute("http.response.status_code", response.status)
                # What a server in a sandbox answers is no fault of ours.
                if response.status >= _SERVER_FAULT and PORT not in request:
                    tracing.mark_failed(span)
                return response
            finally:
                # Only now is it known whether the request was for the gateway or for a port of a sandbox.
                span.update_name(f"{request.method} {route_of(request)}")
                span.set_attribute("http.route", route_of(request))
                span.set_attribute("sandgate.request_id", request.get(REQUEST_ID, ""))
                if (sandbox := request.get(SANDBOX_ID) or request.match_info.get("id")) is not None:
                    span.set_attribute("sandgate.sandbox_id", sandbox[:64])

    return follow
