"""A sandbox from its create to its end, on a real server: what it is, who may do something to it, what it leaves."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from datetime import datetime

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_errors import CapabilityMissing, InvalidArgument, NotFound
from sandgate_plugin_api import Capability, Egress
from sandgate_testing.engine import docker

_EXECD_PORT = 44772


def _inspect(placement) -> dict:
    return json.loads(docker("inspect", f"sandbox-{placement.handle['id']}").stdout)[0]


def _endpoint(server, placement, port: int) -> str:
    found = server.call("GET", f"/v1/sandboxes/{placement.handle['id']}/endpoints/{port}")
    return f"http://{found['endpoint']}"


def _status(url: str, *, headers: dict[str, str] | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


async def test_sandbox_runs_commands_of_both_accounts(gateway, backend, run):
    placement = await gateway.create(backend)
    assert await run(placement, "id -un; pwd; echo problem >&2; exit 3") == (3, "user\n/home/user\nproblem\n")
    assert await run(placement, "id -un; touch /etc/mine", user="root") == (0, "root\n")
    assert await run(placement, "sudo -n id -un") == (0, "root\n")
    await backend.destroy(placement.handle)
    assert await backend.locate(placement.handle) is None


async def test_server_is_told_whose_a_sandbox_is_and_nothing_else(gateway, backend, server):
    """Labels take little, and everybody on the server reads them: a client's metadata never goes there."""
    request = await gateway.request(backend, metadata={"email": "someone@example.org", "x" * 200: "ü"})
    placement = await backend.create(request, backend.reserve(request))
    (found,) = server.sandboxes()
    assert found["metadata"] == {
        "sandgate-gateway": placement.handle["gateway"],
        "sandgate-sandbox": request.sandbox_id,
    }
    host = _inspect(placement)["HostConfig"]
    assert (host["Memory"], host["NanoCpus"]) == (512 * 2**20, 10**9)


async def test_nobody_gets_in_without_the_tokens(gateway, backend, server, run):
    """The server's relay and the ports that it opens ask for no key; execd and the door do."""
    placement = await gateway.create(backend)
    execd, door = (_endpoint(server, placement, port) for port in (_EXECD_PORT, 49983))
    assert _status(f"{execd}/command/status/x") == 401
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    for token in ({}, {"X-Sandgate-Tunnel": ""}, {"X-Sandgate-Tunnel": placement.agent.token}):
        assert _status(door, headers={**upgrade, **token}) == 401
    # What is known in the sandbox does not help either.
    assert await run(placement, "env | grep -ci token; ls -A /run/sandgate/start", user="root") == (0, "0\n")
    code, _ = await run(placement, "ls /run/sandgate/agent")
    assert code != 0


async def test_tokens_stand_in_no_command_line_and_in_no_log(gateway, backend, run):
    placement = await gateway.create(backend)
    every = "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; cat /proc/self/environ"
    _, output = await run(placement, every, user="root")
    assert "/run/sandgate/bundle/agent" in output
    assert placement.agent.token not in output
    log = docker("logs", f"sandbox-{placement.handle['id']}")
    assert placement.agent.token not in log.stdout + log.stderr


async def test_ports_of_a_sandbox_lead_to_its_own_programs_only(gateway, backend, run):
    """Anybody may open a port's address: execd behind one would be root for everybody."""
    placement = await gateway.create(backend)
    await run(placement, "python3 -m http.server 3000 >/dev/null 2>&1 & sleep 3")
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)

        async def dial(port: int) -> grpc.StatusCode | None:
            call = stub.Dial(metadata=(("agent-token", placement.agent.token),), timeout=20)
            try:
                await call.write(agent_pb2.DialRequest(open=agent_pb2.DialRequest.Open(port=port)))
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            finally:
                call.cancel()
            return None

        assert await dial(3000) is None
        assert await dial(_EXECD_PORT) is not None
        assert await dial(49983) is not None


async def test_renewals_keep_what_runs_and_what_is_paused(gateway, backend, server):
    running, paused = [await gateway.create(backend) for _ in range(2)]
    await backend.pause(paused.handle, memory=True)

    def ends() -> dict[str, datetime]:
        return {each["id"]: datetime.fromisoformat(each["expiresAt"]) for each in server.sandboxes()}

    before = ends()
    await asyncio.sleep(1.5)
    # As after a restart, when nobody has asked for the paused one.
    async with gateway.backend() as after:
        assert await after.locate(running.handle) is not None
        await after._keeper.renew_all()
    assert {name for name, end in ends().items() if end > before[name]} == {
        running.handle["id"],
        paused.handle["id"],
    }


async def test_two_gateways_take_over_from_one_another(make_gateway, run):
    """What runs and what is paused, with nothing in common but the settings."""
    one, other = (make_gateway(gateway="shared-by-two") for _ in range(2))
    async with one.backend() as first:
        assert first.host_bound is False
        running, paused = [await one.create(first) for _ in range(2)]
        await run(running, "echo kept > kept")
        stored = json.loads(json.dumps([dict(running.handle), dict(await first.pause(paused.handle, memory=True))]))
    async with other.backend() as second:
        assert len(await second.survey()) == 2
        located = await second.locate(stored[0])
        assert located.agent.token == running.agent.token
        assert await run(located, "cat kept") == (0, "kept\n")
        resumed = await second.resume(stored[1])
        assert await run(resumed, "echo works") == (0, "works\n")
        for handle in stored:
            await second.destroy(handle)
        assert not await second.survey()


async def test_gateway_of_another_name_sees_none_of_it(gateway, backend, make_gateway):
    await gateway.create(backend)
    other = make_gateway(gateway="somebody-else")
    async with other.backend() as stranger:
        assert list(await stranger.survey()) == []


async def test_image_that_cannot_be_had_is_the_clients_fault_where_the_client_named_it(make_gateway):
    gateway = make_gateway(allow_images=["localhost:1/**"])
    async with gateway.backend() as backend:
        assert await backend.find_template("localhost:2/no/such:tag") is None
        request = await gateway.request(backend, "localhost:1/no/such:tag")
        with pytest.raises(NotFound, match="localhost:1/no/such:tag"):
            await backend.create(request, backend.reserve(request))
        assert not await backend.survey()


async def test_what_the_server_cannot_do_is_refused_by_name(gateway, backend):
    """Without an egress image there are no rules, found out at the start and not by the first client."""
    assert Capability.NO_INTERNET not in backend.capabilities
    assert Capability.NETWORK_RULES not in backend.capabilities
    for egress in (Egress(internet=False), Egress(deny=("1.1.1.1",))):
        request = await gateway.request(backend, egress=egress, allow_internet_access=egress.internet)
        with pytest.raises(CapabilityMissing, match="opensandbox"):
            await backend.create(request, backend.reserve(request))
    assert not await backend.survey()


async def test_handle_that_was_tampered_with_reaches_nothing(backend, gateway):
    placement = await gateway.create(backend)
    for change in ({"sandbox": "../x"}, {"gateway": "a b"}, {"sandbox": None}):
        with pytest.raises(Exception, match="damaged"):
            await backend.destroy({**placement.handle, **change})
    with pytest.raises(Exception, match="damaged"):
        await backend.locate({**placement.handle, "id": ".."})
    assert await backend.locate({**placement.handle, "id": "x/../../y?z=1"}) is None
    assert await backend.locate(placement.handle) is not None


async def test_template_that_nobody_configured_is_refused(backend, gateway):
    assert await backend.find_template("unknown") is None
    request = await gateway.request(backend)
    wrong = type(request)(
        sandbox_id=request.sandbox_id,
        template=type(request.template)(id="unknown", resources=request.template.resources),
    )
    with pytest.raises(InvalidArgument, match="unknown"):
        await backend.create(wrong, backend.reserve(wrong))
