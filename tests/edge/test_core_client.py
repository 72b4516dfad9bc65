"""Asking the core: what is repeated, what is waited for, and what is told (docs/architecture.md, metadata)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_edge.core_client import CoreClient
from sandgate_errors import Conflict, Internal, ResourceExhausted, SandgateError, Unauthenticated, Unavailable
from sandgate_errors.grpc import status_of, trailers_of


class Core(sandboxes_pb2_grpc.SandboxServiceServicer):
    """Answers as told; ``failures`` come first, one for each call."""

    def __init__(self) -> None:
        self.failures: list[SandgateError | grpc.StatusCode] = []
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    async def _note(self, request, context):
        self.calls.append((request, dict(context.invocation_metadata())))
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, grpc.StatusCode):
                await context.abort(failure, "connect failed: unix:/secret/path")
            await context.abort(status_of(failure), failure.message, trailers_of(failure))

    async def Get(self, request, context):
        await self._note(request, context)
        return sandboxes_pb2.GetResponse(sandbox=sandboxes_pb2.Sandbox(id=request.id))

    async def Kill(self, request, context):
        await self._note(request, context)
        return sandboxes_pb2.KillResponse()

    async def SetTimeout(self, request, context):
        await self._note(request, context)
        return sandboxes_pb2.SetTimeoutResponse()

    async def Locate(self, request, context):
        await self._note(request, context)
        return sandboxes_pb2.LocateResponse(sandbox=sandboxes_pb2.Sandbox(id=request.id))


@pytest.fixture
def core() -> Core:
    return Core()


async def serve(core: Core, target: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    sandboxes_pb2_grpc.add_SandboxServiceServicer_to_server(core, server)
    server.add_insecure_port(target)
    await server.start()
    return server


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/core.sock"


@pytest.fixture
async def client(core: Core, target: str) -> AsyncIterator[CoreClient]:
    server = await serve(core, target)
    client = CoreClient(target, "internal")
    yield client
    await client.close()
    await server.stop(None)


async def test_calls_of_a_key_never_carry_the_internal_token(client, core):
    await client.get("i1", api_key="e2b_00", request_id="r")
    await client.set_timeout("i1", timeout=2.5, extend_only=True, api_key="e2b_00", request_id="r")
    for _, metadata in core.calls:
        assert metadata["api-key"] == "e2b_00"
        assert metadata["request-id"] == "r"
        assert "internal-token" not in metadata
    sent = core.calls[1][0]
    assert (sent.timeout.seconds, sent.timeout.nanos, sent.extend_only) == (2, 500_000_000, True)


@pytest.mark.parametrize(
    "key", ["schlüssel", "a\nb", "a\0b", "\udcff", "x" * 257], ids=["umlaut", "newline", "nul", "half", "long"]
)
async def test_key_that_cannot_be_one_is_refused_without_the_core(client, core, key):
    with pytest.raises(Unauthenticated):
        await client.get("i1", api_key=key, request_id="r")
    assert core.calls == []


async def test_error_of_the_core_is_the_same_error_here(client, core):
    core.failures = [Conflict("in transition", error_code="slug", retry_after=2, should_retry=False)]
    with pytest.raises(Conflict) as caught:
        await client.kill("i1", api_key="k", request_id="r")
    error = caught.value
    assert (error.message, error.error_code, error.retry_after, error.should_retry) == (
        "in transition",
        "slug",
        2,
        False,
    )


async def test_question_is_asked_again_when_the_connection_broke_and_an_order_is_not(client, core):
    core.failures = [grpc.StatusCode.UNAVAILABLE]
    assert (await client.get("i1", api_key="k", request_id="r")).id == "i1"
    assert len(core.calls) == 2
    core.failures = [grpc.StatusCode.UNAVAILABLE]
    with pytest.raises(Unavailable) as caught:
        await client.kill("i1", api_key="k", request_id="r")
    assert len(core.calls) == 3
    # What gRPC says names the machine's paths.
    assert "secret" not in caught.value.message


async def test_what_the_core_itself_calls_unavailable_is_its_answer(client, core):
    core.failures = [Unavailable("no capacity", retry_after=5)]
    with pytest.raises(Unavailable, match="no capacity"):
        await client.get("i1", api_key="k", request_id="r")
    assert len(core.calls) == 1


async def test_limit_of_the_core_is_told_from_one_of_the_transport(client, core):
    core.failures = [ResourceExhausted("the team may run 2 sandboxes", limit=2)]
    with pytest.raises(ResourceExhausted, match="may run 2") as caught:
        await client.kill("i1", api_key="k", request_id="r")
    assert caught.value.limit == 2
    for call in (client.get, client.kill):
        core.failures = [grpc.StatusCode.RESOURCE_EXHAUSTED]
        with pytest.raises(Internal, match="too large") as fault:
            await call("i1", api_key="k", request_id="r")
        assert "secret" not in fault.value.message
        assert fault.value.should_retry is False


async def test_message_that_is_larger_than_the_core_takes_is_a_fault_of_the_gateway(client):
    request = sandboxes_pb2.CreateRequest(metadata={"a": "x" * 5_000_000})
    with pytest.raises(Internal, match="too large"):
        await client.create(request, api_key="k", request_id="r")


async def test_sandbox_without_an_address_is_asleep(client):
    assert not (await client.locate("i1", request_id="r")).awake


async def test_request_waits_for_a_core_that_is_being_restarted(core, target):
    client = CoreClient(target, "internal")
    try:
        asking = asyncio.create_task(client.get("i1", api_key="k", request_id="r"))
        await asyncio.sleep(0.5)
        assert not asking.done()
        server = await serve(core, target)
        async with asyncio.timeout(20):
            assert (await asking).id == "i1"
            await server.stop(None)
            asking = asyncio.create_task(client.get("i2", api_key="k", request_id="r"))
            await asyncio.sleep(0.2)
            server = await serve(core, target)
            assert (await asking).id == "i2"
        await server.stop(None)
    finally:
        await client.close()
