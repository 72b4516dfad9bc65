"""``/teams`` and ``/api-keys`` of the E2B API: which team a key is of, and keys managed from outside.

Nobody's SDK calls them; operators and consoles do. Keys are managed with the header ``X-Admin-Token``, whose value is the
gateway's internal token (``internal.token`` in the state directory) and which the core judges, and for the team that
``X-Team-ID`` names; without it for the team of keys that name none. An API key is never enough to make another.
"""

from __future__ import annotations

import re

from aiohttp import web

from sandgate_api.core.v1 import keys_pb2, teams_pb2
from sandgate_edge.core_client import Admin
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.bodies import read_object
from sandgate_edge.rest.views import JsonObject, timestamp_text
from sandgate_errors import InvalidArgument, Unauthenticated

__all__ = ["routes"]

routes = web.RouteTableDef()

_DEFAULT_TEAM = "default"
_TOKEN = re.compile(r"[\x21-\x7e]{1,256}")
_TEAM = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY_PREFIX = "e2b_"
_KEY_DIGITS = 40


@routes.get("/teams", allow_head=False)
async def list_teams(request: web.Request) -> web.Response:
    """With an API key its own team; with the admin token all of them, without keys, since no key can be read back."""
    core = request.app[CORE]
    if "X-Admin-Token" in request.headers:
        teams = await core.list_teams(_admin_of(request))
        return web.json_response([_team_view(team, key="") for team in teams])
    key = api_key_of(request)
    teams = await core.list_teams_of(key, request_id=request[REQUEST_ID])
    return web.json_response([_team_view(team, key=key) for team in teams])


@routes.get("/api-keys", allow_head=False)
async def list_keys(request: web.Request) -> web.Response:
    keys = await request.app[CORE].list_keys(_admin_of(request), team=_team_of(request))
    return web.json_response([_key_view(key) for key in keys])


@routes.post("/api-keys")
async def create_key(request: web.Request) -> web.Response:
    """The answer is the only one with the key itself."""
    admin, team = _admin_of(request), _team_of(request)
    await request.app[CORE].list_keys(admin, team=team)  # a wrong token is answered before a wrong body
    name = (await read_object(request, known=True)).required_text("name")
    made = await request.app[CORE].create_key(admin, team=team, name=name)
    return web.json_response({**_key_view(made.key), "key": made.secret}, status=201)


@routes.patch("/api-keys/{id:[a-z0-9]{1,64}}")
async def rename_key(request: web.Request) -> web.Response:
    admin, team = _admin_of(request), _team_of(request)
    await request.app[CORE].list_keys(admin, team=team)
    name = (await read_object(request, known=True)).required_text("name")
    await request.app[CORE].rename_key(admin, request.match_info["id"], team=team, name=name)
    return web.Response(status=200)


@routes.delete("/api-keys/{id:[a-z0-9]{1,64}}")
async def revoke_key(request: web.Request) -> web.Response:
    """Holds for the next request."""
    await request.app[CORE].revoke_key(_admin_of(request), request.match_info["id"], team=_team_of(request))
    return web.Response(status=204)


def _admin_of(request: web.Request) -> Admin:
    token = request.headers.get("X-Admin-Token", "")
    if not _TOKEN.fullmatch(token):
        raise Unauthenticated("the header X-Admin-Token with the gateway's internal token is required")
    return Admin(token=token, request_id=request[REQUEST_ID])


def _team_of(request: web.Request) -> str:
    team = request.headers.get("X-Team-ID", _DEFAULT_TEAM)
    if not _TEAM.fullmatch(team):
        raise InvalidArgument("X-Team-ID is not the id of a team")
    return team


def _team_view(team: teams_pb2.Team, *, key: str) -> JsonObject:
    return {"teamID": team.id, "name": team.name, "apiKey": key, "isDefault": team.id == _DEFAULT_TEAM}


def _key_view(key: keys_pb2.Key) -> JsonObject:
    """A key by its mask. Its end is not stored, so the mask has none."""
    return {
        "id": key.id,
        "name": key.name,
        "createdAt": timestamp_text(key.created_at),
        "lastUsed": timestamp_text(key.last_used_at) if key.HasField("last_used_at") else None,
        "mask": {
            "prefix": _KEY_PREFIX,
            "valueLength": _KEY_DIGITS,
            "maskedValuePrefix": key.prefix.removeprefix(_KEY_PREFIX),
            "maskedValueSuffix": "",
        },
    }
