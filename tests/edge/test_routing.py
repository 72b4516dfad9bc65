"""Which sandbox a request is for (behaviour R1 to R4, H1, H2, H7, C4, C27)."""

from __future__ import annotations

import pytest

from sandgate_api.agent.v1 import agent_pb2

ID, PORT = "E2b-Sandbox-Id", "E2b-Sandbox-Port"


async def health(edge, host: str | None = None, **named: str):
    headers = {} if host is None else {"Host": host}
    headers |= {{"id": ID, "port": PORT}[name]: value for name, value in named.items()}
    return await edge.ask("/health", method="GET", sandbox=None, headers=headers)


async def test_health_without_a_sandbox_speaks_for_the_gateway(edge):
    reply = await health(edge)
    assert (reply.status, reply.json()) == (200, {"status": "ok"})
    assert edge.core.asked == []


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3", "sandbox.box.test", "LocalHost:1"]
)
async def test_headers_name_the_sandbox_on_these_hosts(edge, host):
    reply = await health(edge, host, id="iopen", port="49983")
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["cache-control"] == "no-store"
    assert [sandbox for sandbox, _ in edge.core.asked] == ["iopen"]


@pytest.mark.parametrize("host", ["api.box.test", "box.test", "evil.example", "sandbox.evil.example", ""])
async def test_headers_on_another_host_are_refused_and_never_ignored(edge, host):
    # Ignored, they would leave the gateway's own health, and the SDK would take a dead sandbox for a live one.
    reply = await health(edge, host, id="iopen", port="49983")
    assert (reply.status, reply.json()["code"]) == (400, 400)


@pytest.mark.parametrize(
    "host",
    ["49983-iopen.box.test", "49983-iopen-client1.box.test:443", "49983-IOPEN.Box.Test", "49983-iopen.box.test."],
)
async def test_host_names_the_sandbox_and_wins_over_headers(edge, host):
    assert (await health(edge, host)).status == 204
    assert (await health(edge, host, id="igone", port="49983")).status == 204
    assert {sandbox for sandbox, _ in edge.core.asked} == {"iopen"}


@pytest.mark.parametrize(
    "host",
    ["0-iopen.box.test", "65536-iopen.box.test", "999999-iopen.box.test", "49983-i_x.box.test", "49983-a-b-c.box.test"],
)
async def test_host_that_almost_names_a_sandbox_is_400(edge, host):
    assert (await health(edge, host)).status == 400


async def test_host_of_another_domain_names_no_sandbox(edge):
    assert (await health(edge, "49983-iopen.other.test")).status == 200


@pytest.mark.parametrize(
    "named",
    [
        {"id": "iopen"},
        {"port": "49983"},
        {"id": "iopen", "port": ""},
        {"id": "iopen", "port": "abc"},
        {"id": "iopen", "port": "70000"},
        {"id": "iopen", "port": "0"},
        {"id": "iopen", "port": "-1"},
        {"id": "iopen", "port": "４９９８３"},
        {"id": "", "port": "49983"},
        {"id": "IOPEN", "port": "49983"},
        {"id": "../x", "port": "49983"},
        {"id": "i" * 65, "port": "49983"},
    ],
)
async def test_fault_in_the_headers_is_400_in_json(edge, named):
    reply = await health(edge, **named)
    assert (reply.status, reply.json()["code"]) == (400, 400)
    assert edge.core.asked == []


async def test_client_id_after_the_sandbox_id_is_accepted(edge):
    assert (await health(edge, id="iopen-client1", port="49983")).status == 204


async def test_gone_sandbox_is_502_on_every_agent_path(edge):
    expected = {"sandboxId": "igone", "message": "The sandbox was not found", "code": 502}
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("GET", "/files?path=x")):
        reply = await edge.ask(path, method=method, sandbox="igone")
        assert (reply.status, reply.json()) == (502, expected)


@pytest.mark.parametrize(
    "path", ["/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "//init"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_internal_routes_of_the_agent_do_not_exist_outside(edge, path, method):
    reply = await edge.ask(path, method=method, headers={"X-Access-Token": "tok123"})
    assert (reply.status, reply.json()["code"]) == (404, 404)


async def test_host_of_a_sandbox_never_leads_to_the_control_plane(edge):
    for host in ("49983-iopen.box.test", "49983-igone.box.test:443"):
        headers = {"Host": host, "X-API-KEY": "e2b_00"}
        reply = await edge.ask("/sandboxes", method="GET", sandbox=None, headers=headers)
        assert (reply.status, reply.json()["code"]) == (404, 404)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8700", "sandbox.box.test", "api.box.test", "box.test"])
async def test_headers_of_a_sandbox_mean_nothing_to_the_control_plane(edge, host):
    """R2. The Python SDK from 2.7 to 2.26 sends them with `connect`, to whatever address the API has."""
    headers = {"Host": host, ID: "iopen", PORT: "49983"}
    reply = await edge.ask("/sandboxes/iopen/connect", method="POST", sandbox=None, headers=headers)
    # Who calls is asked, so the request has arrived.
    assert (reply.status, reply.json()["code"]) == (401, 401)


async def test_fault_in_the_headers_is_400_on_paths_of_the_control_plane_too(edge):
    """R3: it may be for a server in a sandbox."""
    reply = await edge.ask("/sandboxes", method="GET", sandbox=None, headers={ID: "iopen", PORT: "abc"})
    assert (reply.status, reply.json()["code"]) == (400, 400)


async def test_agent_route_without_a_sandbox_is_400(edge):
    reply = await edge.ask("/metrics", method="GET", sandbox=None)
    assert (reply.status, reply.json()["code"]) == (400, 400)


async def test_health_needs_no_token_and_metrics_does(edge):
    async def measure(_request, _context):
        return agent_pb2.MetricsResponse(cpu_count=2, cpu_used_pct=12.345, mem_total=3 << 20, mem_used=1 << 20)

    edge.agent.on["Metrics"] = measure
    assert (await edge.ask("/health", method="GET", sandbox="isecured")).status == 204
    assert (await edge.ask("/metrics", method="GET", sandbox="isecured")).status == 401
    reply = await edge.ask("/metrics", method="GET", sandbox="isecured", headers={"X-Access-Token": "tok123"})
    assert reply.status == 200
    assert reply.json() == {
        "ts": 0,
        "cpu_count": 2,
        "cpu_used_pct": 12.35,
        "mem_total": 3 << 20,
        "mem_used": 1 << 20,
        "mem_cache": 0,
        "mem_total_mib": 3,
        "mem_used_mib": 1,
        "disk_used": 0,
        "disk_total": 0,
    }


async def test_variables_of_the_sandbox_are_for_whoever_has_its_token(edge):
    """H4."""

    async def variables(_request, _context):
        return agent_pb2.GetEnvsResponse(envs={"TWO": "zwei\n", "ONE": "1", "EMPTY": ""})

    edge.agent.on["GetEnvs"] = variables
    assert (await edge.ask("/envs", method="GET", sandbox="isecured")).status == 401
    reply = await edge.ask("/envs", method="GET", sandbox="isecured", headers={"X-Access-Token": "tok123"})
    assert (reply.status, reply.json()) == (200, {"ONE": "1", "TWO": "zwei\n", "EMPTY": ""})
    assert reply.headers["cache-control"] == "no-store"
    assert (await edge.ask("/envs", method="POST", sandbox="iopen")).status == 405
    assert (await edge.ask("/envs", method="GET", sandbox="igone")).status == 502
    assert (await edge.ask("/envs", method="GET", sandbox=None)).status == 400


async def test_silent_agent_is_502_with_its_port_on_plain_routes(edge):
    edge.core.sandboxes["iopen"].agent.target += ".nobody"
    reply = await edge.ask("/metrics", method="GET")
    message = "The sandbox is running but port is not open"
    assert (reply.status, reply.json()) == (502, {"sandboxId": "iopen", "message": message, "port": 49983, "code": 502})
