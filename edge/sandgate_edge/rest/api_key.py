"""The API key of a control-plane request, as it stands in its header (``behaviour.md`` S12).

The core decides whether a key is good. Header text that cannot be a key is turned away before it can upset the call's
metadata.
"""

from __future__ import annotations

import re

from aiohttp import web

from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_errors import Unauthenticated

__all__ = ["api_key_of", "authenticate"]

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
