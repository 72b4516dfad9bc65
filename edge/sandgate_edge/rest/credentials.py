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

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_errors import InvalidArgument, Unauthenticated, Unimplemented

__all__ = ["api_key_of", "authenticate", "key_first"]

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
    probe = sandboxes_pb2.ListRequest(page_size=1)
    await request.app[CORE].list(probe, api_key=api_key_of(request), request_id=request[REQUEST_ID])


def key_first(handler: _Handler) -> _Handler:
    """A wrong key is answered before a wrong request, without one more question to the core on the way of good ones."""

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.Response:
        api_key_of(request)
        try:
            return await handler(request)
        except (InvalidArgument, Unimplemented, web.HTTPException):
            await authenticate(request)
            raise

    return handle
