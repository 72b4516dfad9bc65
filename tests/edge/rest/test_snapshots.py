"""Snapshots, templates, forks and network rules as REST clients meet them (rest.md 3.5, 4.5, 6; behaviour.md C50 to C55)."""

import asyncio
import uuid

import pytest

from sandgate_edge.rest import changes, sandboxes, snapshots, templates
from sandgate_edge.rest.absent import ABSENT, OF_TEMPLATES
from sandgate_errors import Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")
UNKNOWN = "i" + "0" * 20


class Gate:
    """Where a copy waits."""

    def __init__(self):
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def wait(self):
        self.reached.set()
        await self.open.wait()


async def take(edge, box, **body):
    status, made, _ = await edge.rest("POST", f"/sandboxes/{box['sandboxID']}/snapshots", body or None)
    assert status == 201, made
    return made


async def test_snapshot_is_taken_listed_used_and_deleted(edge):
    box = await edge.create()
    (edge.home(box) / "mark").write_text("before")
    made = await take(edge, box)
    assert made == {"snapshotID": made["snapshotID"], "names": []}
    named = await take(edge, box, name="mine:v1", memory=False)
    assert named["names"] == ["default/mine:v1"]

    async def listed(query=""):
        status, items, headers = await edge.rest("GET", f"/snapshots{query}")
        assert status == 200
        return [item["snapshotID"] for item in items], headers

    assert {made["snapshotID"], named["snapshotID"]} <= set((await listed())[0])
    for query in ("?name=mine", "?name=mine%3Av1", "?name=default%2Fmine:v1", f"?name={named['snapshotID']}"):
        assert (await listed(query))[0] == [named["snapshotID"]]
    assert (await listed(f"?sandboxID={box['sandboxID']}"))[0] == [named["snapshotID"], made["snapshotID"]]
    assert (await listed("?name=nobody"))[0] == (await listed(f"?sandboxID={UNKNOWN}"))[0] == []
    # A page, and the next one.
    first, headers = await listed(f"?sandboxID={box['sandboxID']}&limit=1")
    second, last = await listed(f"?sandboxID={box['sandboxID']}&limit=1&nextToken={headers['X-Next-Token']}")
    assert (first, second) == ([named["snapshotID"]], [made["snapshotID"]])
    assert "X-Next-Token" not in last

    copy = await edge.create(templateID=named["snapshotID"])
    assert copy["templateID"] == named["snapshotID"]
    assert (edge.home(copy) / "mark").read_text() == "before"
    for path in ("default/mine:v1", made["snapshotID"]):
        assert (await edge.rest("DELETE", f"/templates/{path}"))[0] == 204
        status, error, _ = await edge.rest("DELETE", f"/templates/{path}")
        assert (status, error["code"]) == (404, 404)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "nextToken=x", "sandboxID=A!", "name=%FF", "nextToken=MS4x"], ids=str
)
async def test_bad_filters_are_400(edge, query):
    status, error, _ = await edge.rest("GET", f"/snapshots?{query}")
    assert (status, error["code"]) == (400, 400)


async def test_snapshot_of_what_is_not_there_or_not_running(edge):
    status, error, _ = await edge.rest("POST", f"/sandboxes/{UNKNOWN}/snapshots", {})
    assert (status, error["code"]) == (404, 404)
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}"
    for body in ({"name": 1}, {"name": "a b"}, {"memory": "no"}, {"memory": True}):
        status, error, _ = await edge.rest("POST", f"{path}/snapshots", body)
        assert (status, error["code"]) == (400, 400), body
    assert (await edge.rest("POST", f"{path}/pause"))[0] == 204
    status, error, _ = await edge.rest("POST", f"{path}/snapshots", {})
    assert (status, error["code"]) == (409, 409)


async def test_snapshot_that_may_have_been_taken_is_not_taken_again_by_an_sdk(edge):
    """rest.md 1.4. With a name a repeat takes the place of the first, so the client's own rules hold."""

    class Lost:
        async def wait(self):
            raise Unavailable("the answer was lost")

    box = await edge.create()
    edge.backend.copying = Lost()
    for body, told in (({}, "false"), ({"name": "again"}, None)):
        status, error, headers = await edge.rest("POST", f"/sandboxes/{box['sandboxID']}/snapshots", body)
        assert (status, error["code"]) == (503, 503)
        assert headers.get("Should-Retry") == told


async def test_second_snapshot_at_the_same_time_is_409(edge):
    """C51; and what it was taken of is shown as running meanwhile (C14)."""
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}"
    gate = edge.backend.copying = Gate()
    taking = asyncio.create_task(take(edge, box))
    try:
        async with asyncio.timeout(20):
            await gate.reached.wait()
            status, error, _ = await edge.rest("POST", f"{path}/snapshots", {"name": "second"})
        assert (status, error["code"]) == (409, 409)
        assert (await edge.rest("GET", path))[1]["state"] == "running"
    finally:
        gate.open.set()
        edge.backend.copying = None
    await taking


async def test_templates_are_told_as_the_command_line_client_reads_them(edge):
    await edge.create()
    for path in ("/templates?teamID=default", "/v2/templates"):
        status, items, _ = await edge.rest("GET", path)
        assert status == 200
        base = next(item for item in items if item["templateID"] == "base")
        assert set(base) >= {
            *("templateID", "buildID", "cpuCount", "memoryMB", "diskSizeMB", "public", "aliases", "names", "createdAt"),
            *("updatedAt", "createdBy", "lastSpawnedAt", "spawnCount", "buildCount", "envdVersion", "buildStatus"),
        }
        assert uuid.UUID(base["buildID"])
        assert (base["memoryMB"], base["public"], base["buildStatus"]) == (512, True, "ready")
        assert base["spawnCount"] >= 1
        assert base["lastSpawnedAt"].endswith("Z")
    status, one, _ = await edge.rest("GET", "/templates/base")
    assert (status, one["templateID"], one["builds"][0]["buildID"]) == (200, "base", base["buildID"])
    for path in ("/templates/nobody", "/templates/team%2Fname%3Atag", "/templates/team/name:tag"):
        status, error, _ = await edge.rest("GET", path)
        assert (status, error["code"]) == (404, 404)
    status, error, _ = await edge.rest("DELETE", "/templates/base")
    assert (status, error["code"]) == (403, 403)


async def test_network_rules_are_checked_and_what_a_backend_cannot_keep_is_refused_by_name(edge):
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}/network"
    for body, named in (
        ({"denyOut": ["example.org"]}, "denyOut"),
        ({"allowOut": ["example.org"]}, "0.0.0.0/0"),
        ({"allowOut": "1.1.1.1"}, "allowOut"),
        ({"allow_internet_access": 1}, "allow_internet_access"),
        ({"rules": {"h": [{"transform": {"headers": {"a": "b"}}}]}}, "rules"),
        ({"dnsServers": ["1.1.1.1"]}, "dnsServers"),
        ({"egressProxy": {"address": "a:1"}}, "egressProxy"),
        ({"denyIn": ["10.0.0.0/8"]}, "denyIn"),
        ({"denyOut": ["10.0.0.0/8"]}, "'local' does not offer network rules"),
        ({"allow_internet_access": False}, "'local' does not offer network rules"),
    ):
        status, error, _ = await edge.rest("PUT", path, body)
        assert (status, error["code"]) == (400, 400), body
        assert named in error["message"]
    # What changes nothing is no rule; members that ask for nothing are none.
    for body in ({}, None, {"allowOut": ["1.1.1.1"], "rules": {}, "egressProxy": None, "dnsServers": []}):
        assert (await edge.rest("PUT", path, body))[0] == 204
    status, error, _ = await edge.rest("PUT", f"/sandboxes/{UNKNOWN}/network", {})
    assert (status, error["code"]) == (404, 404)


async def test_fork_is_refused_in_the_order_of_the_contract(edge):
    """C50: the request, the sandbox, its state, and then what its backend offers."""
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}"

    async def fork(sandbox, body):
        status, error, _ = await edge.rest("POST", f"{sandbox}/fork", body)
        assert error["code"] == status
        return status, error["message"]

    for body in ({"count": 0}, {"count": 101}, {"count": "1"}, {"count": 1, "timeout": 0}, {"timeout": -1}):
        assert (await fork(f"/sandboxes/{UNKNOWN}", body))[0] == 400
    assert (await fork(f"/sandboxes/{UNKNOWN}", {}))[0] == 404
    status, text = await fork(path, {"count": 100})
    assert status == 400
    assert "'local' does not offer fork" in text
    assert (await edge.rest("POST", f"{path}/pause"))[0] == 204
    assert (await fork(path, None))[0] == 409


async def test_no_route_is_both_offered_and_refused():
    refused = {place for places in (*ABSENT.values(), *OF_TEMPLATES.values()) for place in places}
    offered = [
        (route.method, route.path)
        for table in (changes.routes, sandboxes.routes, snapshots.routes, templates.routes)
        for route in table
        if route.handler.__name__ != "refuse"
    ]
    assert not refused & set(offered)
