"""What a client changes about a sandbox or makes of it, beyond its life: network rules and forks (``rest.md`` 4.5)."""

from __future__ import annotations

from aiohttp import web
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.bodies import read_object
from sandgate_edge.rest.create import NOT_OFFERED_RULES, TIMEOUT_V2
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.identifiers import sandbox_id_in_path
from sandgate_edge.rest.sandboxes import sandbox_reply

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.put("/sandboxes/{id}/network")
@key_first
async def update_network(request: web.Request) -> web.Response:
    """All rules about connections from inside are replaced; a member that is left out clears (``behaviour.md`` C55)."""
    body = await read_object(request, required=False)
    body.refuse(*NOT_OFFERED_RULES)
    body.refuse_others("allowOut", "denyOut", "allow_internet_access")
    message = sandboxes_pb2.UpdateNetworkRequest(
        id=sandbox_id_in_path(request),
        allow_out=body.texts("allowOut"),
        deny_out=body.texts("denyOut"),
        allow_internet_access=body.flag("allow_internet_access"),
    )
    await request.app[CORE].update_network(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/fork")
@key_first
async def fork(request: web.Request) -> web.Response:
    """One item for each copy (``behaviour.md`` C50)."""
    body = await read_object(request, required=False)
    count, timeout = body.integer("count"), body.integer("timeout")
    message = sandboxes_pb2.ForkRequest(
        id=sandbox_id_in_path(request),
        count=1 if count is None else count,
        timeout=Duration(seconds=TIMEOUT_V2 if timeout is None else timeout),
    )
    copies = await request.app[CORE].fork(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    return web.json_response([{"sandbox": await sandbox_reply(request, copy)} for copy in copies], status=201)
