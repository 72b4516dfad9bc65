"""Cross-origin requests: any page may call, with any header; credentials are explicit headers, never cookies (W13)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

__all__ = ["add_headers", "preflight"]

_PREFLIGHT_SECONDS = 7200
_METHODS = "HEAD, GET, POST, PUT, PATCH, DELETE"
_EXPOSED = ", ".join(
    (
        "Location",
        "Cache-Control",
        "X-Content-Type-Options",
        "Grpc-Status",
        "Grpc-Message",
        "Grpc-Status-Details-Bin",
        "Content-Disposition",
        "X-Next-Token",
        "X-Total-Running",
        "X-Request-Id",
        "Retry-After",
        "Should-Retry",
        "RateLimit-Limit",
        "RateLimit-Remaining",
        "RateLimit-Reset",
    )
)


@web.middleware
async def preflight(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers a browser's question before any route or credential is looked at: it carries none."""
    if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
        # The star does not cover Authorization, so what was asked for is named.
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
        hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_SECONDS),
        hdrs.VARY: f"{hdrs.ACCESS_CONTROL_REQUEST_METHOD}, {hdrs.ACCESS_CONTROL_REQUEST_HEADERS}",
    }
    return web.Response(status=204, headers=headers)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """A signal of every response, streams and errors included."""
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
    response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
