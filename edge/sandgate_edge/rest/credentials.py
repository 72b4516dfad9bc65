"""A wrong key before anything else that is wrong with a control-plane request (``behaviour.md`` S12)."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from sandgate_edge.keys import POLICY
from sandgate_edge.rest.api_key import api_key_of, authenticate
from sandgate_edge.rest.bodies import read_body
from sandgate_errors import InvalidArgument, SandgateError, Unimplemented

__all__ = ["key_first", "shaped"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.Response]]


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
