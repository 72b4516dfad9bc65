"""The API key of a control-plane request (``behaviour.md`` S12).

The core decides whether a key is good; here it is only taken from the header. Header text that cannot be a key is turned
away before it can upset the call's metadata.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from sandgate_edge.keys import CORE, POLICY, REQUEST_ID
from sandgate_edge.rest.bodies import read_body
from sandgate_errors import InvalidArgument, SandgateError, Unauthenticated, Unimplemented

__all__ = ["api_key_of", "authenticate", "key_first", "shaped"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.Response]]

_KEY = re.compile(r"[\x21-\x7e]{1,512}")


def api_key_of(request: web.Request) -> str:
    """The key in ``X-API-KEY``. Raises Unauthenticated when there is none that could be one."""
    key = request.headers.get("X-API-KEY")
    if not key:
        raise Unauthenticated("the header X-API-KEY with an API key is required")
    if not _KEY.fullmatch(key):
        raise Unauthenticated("the API key is not valid")
    return key


async def authenticate(request: web.Request) -> None:
    """Raise Unauthenticated unless the core knows the request's key; for answers that need nothing else of it."""
    await request.app[CORE].list_teams_of(api_key_of(request), request_id=request[REQUEST_ID])


async def shaped(request: web.Request) -> web.Request:
    """The request as plugins want it. Raises what they refuse it with, once the key has proved good."""
    policy = request.app[POLICY]
    if not policy.has("sandgate_rest_request"):
        return request
    body = await read_body(request) if request.body_exists else None
    try:
        return await policy.rest_request(request, body)
    except SandgateError:
        await authenticate(request)
        raise


def key_first(handler: _Handler) -> _Handler:
    """A wrong key is answered before a wrong request, without one more question to the core on the way of good ones."""

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.Response:
        api_key_of(request)
        try:
            return await handler(await shaped(request))
        except (InvalidArgument, Unimplemented, web.HTTPException):
            await authenticate(request)
            raise

    return handle
