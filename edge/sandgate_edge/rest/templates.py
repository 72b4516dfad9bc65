"""Templates: which there are, whether one of a name exists, and giving up snapshots (``rest.md`` 6, ``behaviour.md`` C24, C53).

A name may hold a slash, which one SDK escapes and another does not (``rest.md`` 1.6). What this gateway does not offer is
refused by :mod:`sandgate_edge.rest.absent`, whose routes come first: some of them look like names.
"""

from __future__ import annotations

import uuid

from aiohttp import web

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.absent import OF_TEMPLATES, add_absent
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.views import JsonObject, timestamp_text
from sandgate_errors import NotFound

__all__ = ["routes"]

routes = web.RouteTableDef()

#: Makes the ids of builds, which clients read as UUIDs: there is one build of each template, what it is now.
_BUILDS = uuid.UUID("6f0e6d0c-6f3e-4c9b-9a0a-7d1f0c1b5e42")


@routes.get("/templates/aliases/{alias:.+}", allow_head=False)
@key_first
async def resolve_alias(request: web.Request) -> web.Response:
    template_id = await request.app[CORE].find_template(
        request.match_info["alias"], api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    # Every team may use every template of this gateway.
    return web.json_response({"templateID": template_id, "public": True})


add_absent(routes, OF_TEMPLATES)


@routes.get("/templates", allow_head=False)
@routes.get("/v2/templates", allow_head=False)
@key_first
async def list_templates(request: web.Request) -> web.Response:
    return web.json_response([_listed_view(template) for template in await _all(request)])


@routes.get("/templates/{template:.+}", allow_head=False)
@key_first
async def get_template(request: web.Request) -> web.Response:
    wanted = request.match_info["template"]
    known = await _all(request)
    for template in (
        *(item for item in known if item.id == wanted),
        *(item for item in known if wanted in item.aliases),
    ):
        return web.json_response(_detail_view(template))
    raise NotFound(f"template '{wanted}' not found")


@routes.delete("/templates/{template:.+}")
@key_first
async def delete_template(request: web.Request) -> web.Response:
    """A snapshot is given up; 403 for a template, which is part of the gateway's configuration."""
    await request.app[CORE].delete_snapshot(
        request.match_info["template"], api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    return web.Response(status=204)


async def _all(request: web.Request) -> list[sandboxes_pb2.Template]:
    core = request.app[CORE]
    return list(await core.list_templates(api_key=api_key_of(request), request_id=request[REQUEST_ID]))


def _listed_view(template: sandboxes_pb2.Template) -> JsonObject:
    return {
        **_common_view(template),
        **_build_view(template),
        "createdBy": None,
        "buildCount": 1,
        "buildStatus": "ready",
    }


def _detail_view(template: sandboxes_pb2.Template) -> JsonObject:
    found = timestamp_text(template.found_at)
    build = {**_build_view(template), "status": "ready", "createdAt": found, "updatedAt": found, "finishedAt": found}
    return {**_common_view(template), "builds": [build]}


def _common_view(template: sandboxes_pb2.Template) -> JsonObject:
    # When it was made is not known; what is: since when this gateway has it.
    found = timestamp_text(template.found_at)
    spawned = template.HasField("last_spawned_at")
    return {
        "templateID": template.id,
        "public": True,
        "aliases": list(template.aliases),
        "names": [template.id, *template.aliases],
        "createdAt": found,
        "updatedAt": found,
        "lastSpawnedAt": timestamp_text(template.last_spawned_at) if spawned else None,
        "spawnCount": template.spawn_count,
    }


def _build_view(template: sandboxes_pb2.Template) -> JsonObject:
    return {
        "buildID": str(uuid.uuid5(_BUILDS, f"{template.backend} {template.id}")),
        "cpuCount": template.resources.cpu_count,
        "memoryMB": template.resources.memory_mb,
        "diskSizeMB": template.resources.disk_size_mb,
        "envdVersion": template.envd_version,
    }
