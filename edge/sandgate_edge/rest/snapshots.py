"""Snapshots: kept copies of a sandbox's files (``rest.md`` 4.5, ``behaviour.md`` C51 to C53).

They are deleted by the route of templates, since their ids are used like those of templates (:mod:`sandgate_edge.rest.templates`).
"""

from __future__ import annotations

from aiohttp import web

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.bodies import read_object
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.filters import MAX_PAGE, parse_limit
from sandgate_edge.rest.identifiers import parse_sandbox_id, sandbox_id_in_path
from sandgate_edge.rest.query import query_of
from sandgate_edge.rest.repeats import made_once
from sandgate_edge.rest.views import JsonObject

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/sandboxes/{id}/snapshots")
@key_first
async def create_snapshot(request: web.Request) -> web.Response:
    """409 while another one of this sandbox is being taken; the name of an earlier one is given to this."""
    body = await read_object(request, required=False)
    message = sandboxes_pb2.CreateSnapshotRequest(
        id=sandbox_id_in_path(request), name=body.text("name") or "", memory=body.flag("memory")
    )
    # One with a name takes the place of what an earlier attempt may have made.
    with made_once(repeatable=bool(message.name)):
        snapshot = await request.app[CORE].create_snapshot(
            message, api_key=api_key_of(request), request_id=request[REQUEST_ID]
        )
    return web.json_response(_view(snapshot), status=201)


@routes.get("/snapshots", allow_head=False)
@key_first
async def list_snapshots(request: web.Request) -> web.Response:
    query = query_of(request)
    sandbox_id = query.get("sandboxID", "")
    message = sandboxes_pb2.ListSnapshotsRequest(
        sandbox_id=parse_sandbox_id(sandbox_id) if sandbox_id else "",
        name=query.get("name", ""),
        page_size=parse_limit(query["limit"]) if "limit" in query else MAX_PAGE,
        page_token=query.get("nextToken", ""),
    )
    answer = await request.app[CORE].list_snapshots(
        message, api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    headers = {"X-Next-Token": answer.next_page_token} if answer.next_page_token else {}
    return web.json_response([_view(snapshot) for snapshot in answer.snapshots], headers=headers)


def _view(snapshot: sandboxes_pb2.Snapshot) -> JsonObject:
    return {"snapshotID": snapshot.id, "names": list(snapshot.names)}
