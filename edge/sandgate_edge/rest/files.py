"""``/files``: file content in and out of a sandbox (``behaviour.md`` 9, ``envd.md`` 6).

The checks come in the order of D2: which sandbox, who may, which user, which path, then the file. User and path are the
agent's to judge.
"""

from __future__ import annotations

import functools

from aiohttp import web

from sandgate_edge.core_client import Located
from sandgate_edge.keys import POLICY
from sandgate_edge.rest.access import Operation, check_file_access, sandbox_of_signature
from sandgate_edge.rest.agent_files import AgentFiles
from sandgate_edge.rest.downloads import send_file
from sandgate_edge.rest.query import query_of
from sandgate_edge.rest.uploads import receive_files
from sandgate_edge.routing import locate, locate_by_id, sandbox_id_of
from sandgate_errors import Unauthenticated

__all__ = ["routes"]

routes = web.RouteTableDef()

# No system has longer account names; call metadata could not carry much more.
_MAX_USER = 256


@routes.get("/files", allow_head=False)
async def download(request: web.Request) -> web.StreamResponse:
    query = query_of(request)
    files = await _files_of(request, query, operation="read")
    return await send_file(files, query.get("path", ""))


@routes.post("/files")
async def upload(request: web.Request) -> web.Response:
    query = query_of(request)
    files = await _files_of(request, query, operation="write")
    written = await receive_files(files, query.get("path"))
    return web.json_response(await request.app[POLICY].answer(request, written))


async def _files_of(request: web.Request, query: dict[str, str], *, operation: Operation) -> AgentFiles:
    located = await _located(request, query, operation=operation)
    user = query.get("username") or None
    if user is not None and len(user) > _MAX_USER:
        raise Unauthenticated("there is no user with such a long name")
    return AgentFiles(request=request, located=located, user=user)


async def _located(request: web.Request, query: dict[str, str], *, operation: Operation) -> Located:
    access = functools.partial(check_file_access, request, query=query, operation=operation)
    if sandbox_id_of(request) is None:
        signed = await sandbox_of_signature(request, query=query, operation=operation)
        if signed is not None:
            return await locate_by_id(request, signed, access=access)
    return await locate(request, access=access)
