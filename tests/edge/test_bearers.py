"""Requests that name no sandbox and bring the token of one (S1, S8): handles from `connect` of the Python SDK from 2.7 to 2.25.

They are only so where the SDK was given one address for all sandboxes.
"""

from __future__ import annotations

import pytest

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.bearers import Bearers

STAT = "/filesystem.Filesystem/Stat"
TOKEN = {"X-Access-Token": "tok123"}


async def stat(request, _context):
    return filesystem_pb2.StatResponse(entry=filesystem_pb2.EntryInfo(name="x", path=request.path))


async def ask(edge, headers: dict[str, str], path: str = STAT, method: str = "POST"):
    return await edge.ask(
        path, method=method, sandbox=None, headers={"Content-Type": "application/json", **headers}, body=b"{}"
    )


async def test_token_leads_to_its_sandbox_where_nothing_names_one(edge):
    edge.agent.on["Stat"] = stat
    for _ in range(3):
        assert (await ask(edge, TOKEN)).status == 200
    assert [sandbox for sandbox, _ in edge.core.asked] == ["isecured"] * 3
    assert edge.core.searches == 1


async def test_token_that_is_nobodys_opens_nothing(edge):
    for token in ("tok124", "", "tok123 x", "é"):
        reply = await ask(edge, {"X-Access-Token": token})
        assert (reply.status, edge.agent.requests, edge.core.asked) == (401, [], [])


async def test_name_wins_over_the_token(edge):
    reply = await edge.unary(STAT, b"{}", sandbox="igone", x_access_token="tok123")
    assert (reply.status, reply.json()["sandboxId"], edge.core.searches) == (502, "igone", 0)


async def test_sandbox_that_ended_is_told_as_gone_to_whoever_used_it(edge):
    """R4, R14: as the SDK has it from a handle that names its sandbox."""
    edge.agent.on["Stat"] = stat
    assert (await ask(edge, TOKEN, "/health", "GET")).status == 204
    del edge.core.sandboxes["isecured"]
    for method, path in (("GET", "/health"), ("POST", STAT)):
        reply = await ask(edge, TOKEN, path, method)
        assert (reply.status, reply.json()["sandboxId"]) == (502, "isecured")


async def test_token_that_was_changed_meanwhile_is_not_valid_any_more(edge):
    edge.agent.on["Stat"] = stat
    assert (await ask(edge, TOKEN)).status == 200
    edge.core.sandboxes["isecured"].sandbox.access_token = "tok200"
    assert (await ask(edge, TOKEN)).status == 401
    assert (await ask(edge, {"X-Access-Token": "tok200"})).status == 200


async def test_what_is_remembered_has_a_bound(monkeypatch):
    class Core:
        asked = 0

        async def find_by_token_hash(self, **_fields):
            self.asked += 1
            return "ibox"

    monkeypatch.setattr("sandgate_edge.bearers._REMEMBERED", 3)
    bearers, core = Bearers(), Core()
    for token in ("a", "b", "c", "a", "d", "a", "b"):
        await bearers.sandbox_of(token, core, request_id="r")
    # Of the first three, `b` was the one that was used the longest ago.
    assert core.asked == 5


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_without_name_and_token_it_is_as_it_was(edge, path):
    reply = await ask(edge, {}, path, "GET")
    assert reply.status == (200 if path == "/health" else 400)
    assert edge.core.searches == 0
