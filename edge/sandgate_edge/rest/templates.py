"""What the control plane says of templates: whether one exists (``rest.md`` 6, ``behaviour.md`` C24).

A name may hold a slash, which one SDK escapes and another does not (``rest.md`` 1.6).
"""

from __future__ import annotations

from aiohttp import web

from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.credentials import api_key_of

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/templates/aliases/{alias:.+}", allow_head=False)
async def resolve_alias(request: web.Request) -> web.Response:
    template_id = await request.app[CORE].find_template(
        request.match_info["alias"], api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    # Every team may use every template of this gateway.
    return web.json_response({"templateID": template_id, "public": True})
