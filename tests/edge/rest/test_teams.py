"""Teams and keys over HTTP, and what a team over its quota is told, against a real core (S12, C57; rest.md 2)."""

import contextlib

import grpc
import pytest

from sandgate_api.core.v1 import teams_pb2, teams_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def admin(edge, method, path, body=None, *, team=None):
    headers = {"X-Admin-Token": edge.admin_token, **({} if team is None else {"X-Team-ID": team})}
    return await edge.rest(method, path, body, key=None, headers=headers)


def core_of(edge):
    return grpc.aio.insecure_channel(f"unix:{edge.home({'sandboxID': ''}).parent / 'core.sock'}")


async def make_team(edge, team):
    """A key is for a team that there is; the module's tests share one core."""
    async with core_of(edge) as channel:
        create = teams_pb2_grpc.TeamServiceStub(channel).CreateTeam
        try:
            await create(teams_pb2.CreateTeamRequest(id=team), metadata=(("internal-token", edge.admin_token),))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise


@contextlib.asynccontextmanager
async def limits(edge, **values):
    """Limits of the default team, for a while."""
    async with core_of(edge) as channel:
        change = teams_pb2_grpc.TeamServiceStub(channel).UpdateTeam

        async def apply(message):
            request = teams_pb2.UpdateTeamRequest(id="default", limits=message)
            await change(request, metadata=(("internal-token", edge.admin_token),))

        await apply(teams_pb2.TeamLimits(**values))
        try:
            yield
        finally:
            await apply(teams_pb2.TeamLimits())


async def test_the_life_of_a_key(edge):
    await make_team(edge, "lab")
    status, made, _ = await admin(edge, "POST", "/api-keys", {"name": "ci"}, team="lab")
    assert status == 201
    assert made["mask"]["prefix"] + made["mask"]["maskedValuePrefix"] == made["key"][:10]
    assert made["lastUsed"] is None
    assert (await edge.rest("GET", "/v2/sandboxes", key=made["key"]))[0] == 200

    status, (listed,), _ = await admin(edge, "GET", "/api-keys", team="lab")
    assert status == 200
    assert "key" not in listed
    assert listed["lastUsed"] >= listed["createdAt"]
    assert (await admin(edge, "PATCH", f"/api-keys/{made['id']}", {"name": "build"}, team="lab"))[0] == 200
    assert [key["name"] for key in (await admin(edge, "GET", "/api-keys", team="lab"))[1]] == ["build"]

    assert (await admin(edge, "DELETE", f"/api-keys/{made['id']}", team="lab"))[0] == 204
    assert (await edge.rest("GET", "/v2/sandboxes", key=made["key"]))[0] == 401
    assert (await admin(edge, "DELETE", f"/api-keys/{made['id']}", team="lab"))[0] == 404


async def test_keys_of_another_team_are_out_of_reach(edge):
    await make_team(edge, "one")
    _, made, _ = await admin(edge, "POST", "/api-keys", {"name": "x"}, team="one")
    assert (await admin(edge, "DELETE", f"/api-keys/{made['id']}", team="two"))[0] == 404
    assert (await admin(edge, "PATCH", f"/api-keys/{made['id']}", {"name": "y"}, team="two"))[0] == 404
    assert [key["id"] for key in (await admin(edge, "GET", "/api-keys", team="two"))[1]] == []


async def test_key_for_a_team_that_there_is_not_is_refused_and_makes_none(edge):
    assert (await admin(edge, "POST", "/api-keys", {"name": "x"}, team="nowhere"))[0] == 404
    _, teams, _ = await admin(edge, "GET", "/teams")
    assert "nowhere" not in {team["teamID"] for team in teams}


@pytest.mark.parametrize("headers", [{}, {"X-Admin-Token": ""}, {"X-Admin-Token": "x" * 64}, {"X-Admin-Token": "é"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api-keys"), ("POST", "/api-keys"), ("PATCH", "/api-keys/a"), ("DELETE", "/api-keys/a")],
)
async def test_an_api_key_is_not_enough_to_manage_keys(edge, method, path, headers):
    raw = b"{" if method in {"POST", "PATCH"} else None
    status, error, _ = await edge.rest(method, path, headers=headers, raw=raw)
    assert (status, error["code"]) == (401, 401)


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": 1}, {"name": "a\nb"}, {"name": "x" * 101}])
async def test_bad_name_is_refused(edge, body):
    assert (await admin(edge, "POST", "/api-keys", body))[0] == 400


@pytest.mark.parametrize("team", ["", "a b", "x" * 65, "../x"])
async def test_bad_team_is_refused(edge, team):
    assert (await admin(edge, "GET", "/api-keys", team=team))[0] == 400


async def test_key_learns_its_own_team_and_the_admin_all(edge):
    await make_team(edge, "lab")
    status, own, _ = await edge.rest("GET", "/teams")
    key = own[0].pop("apiKey")
    assert (status, own) == (200, [{"teamID": "default", "name": "default", "isDefault": True}])
    assert (await edge.rest("GET", "/teams", key=key))[0] == 200
    _, teams, _ = await admin(edge, "GET", "/teams")
    assert {"default", "lab"} <= {team["teamID"] for team in teams}
    assert {team["apiKey"] for team in teams} == {""}
    assert (await edge.rest("GET", "/teams", key=None))[0] == 401


async def test_team_over_its_quota_is_told_when_to_come_back(edge):
    """C57; errors.md 2.1: an SDK must not repeat by itself what waits for another sandbox's end."""
    async with limits(edge, max_sandboxes=0):
        status, error, headers = await edge.rest("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, error["code"]) == (429, 429)
    assert headers["RateLimit-Limit"] == "0"
    assert headers["RateLimit-Remaining"] == "0"
    assert int(headers["Retry-After"]) > 0
    assert headers["RateLimit-Reset"] == headers["Retry-After"]
    assert headers["Should-Retry"] == "false"


async def test_team_over_its_rate_may_come_back(edge):
    async with limits(edge, creates_per_minute=1):
        box = await edge.create()
        status, _, headers = await edge.rest("POST", "/v2/sandboxes", {"templateID": "base"})
    assert status == 429
    assert 0 < int(headers["Retry-After"]) <= 60
    assert headers["RateLimit-Limit"] == "1"
    assert "Should-Retry" not in headers
    await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}")


async def test_edge_in_front_of_a_core_that_serves_is_ready(edge):
    status, body, headers = await edge.rest("GET", "/ready", key=None)
    assert (status, body, headers["Cache-Control"]) == (200, {"status": "ready"}, "no-store")
