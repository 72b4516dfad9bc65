"""Ids of sandboxes as requests of the control plane write them (``behaviour.md`` C4, C16)."""

from __future__ import annotations

import re

from aiohttp import web

from sandgate_errors import InvalidArgument

__all__ = ["parse_sandbox_id", "sandbox_id_in_path"]

_ID = re.compile(r"[a-z0-9]{1,64}", re.ASCII)


def sandbox_id_in_path(request: web.Request) -> str:
    return parse_sandbox_id(request.match_info["id"])


def parse_sandbox_id(text: str) -> str:
    """The id without what older clients put behind a ``-``. Raises InvalidArgument."""
    sandbox_id = text.partition("-")[0]
    if not _ID.fullmatch(sandbox_id):
        raise InvalidArgument("Invalid sandbox ID")
    return sandbox_id
