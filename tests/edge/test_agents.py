"""Channels to agents: reused, bounded, never closed under a call; the right credentials for agent and relay."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_api.envd.v1 import process_pb2
from sandgate_edge.agents import Agents
from sandgate_edge.core_client import Located


def located(target: str, sandbox: str = "i1") -> Located:
    return Located(sandbox=sandboxes_pb2.Sandbox(id=sandbox), agent_target=target, agent_token="t")


async def test_channel_is_reused_for_the_next_call():
    agents = Agents(max_rpc_bytes=1024)
    try:
        assert agents.process(located("unix:/a")) is agents.process(located("unix:/a"))
        assert agents.process(located("unix:/a")) is not agents.process(located("unix:/b"))
    finally:
        await agents.close()


async def test_idle_channels_make_room_and_busy_ones_never(edge):
    async def wait(_request, _context):
        yield process_pb2.StartResponse()
        await asyncio.Event().wait()

    edge.agent.on["Start"] = wait
    agents = Agents(max_rpc_bytes=1024, max_channels=2)
    busy = located(edge.agent.target)
    try:
        stub = agents.process(busy)
        call = stub.Start(process_pb2.StartRequest(), metadata=agents.metadata(busy, request_id="r"))
        await call.read()
        idle = agents.process(located("unix:/idle"))
        for number in range(5):
            agents.process(located(f"unix:/{number}"))
        assert agents.process(busy) is stub
        assert agents.process(located("unix:/idle")) is not idle
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        for number in range(5):
            agents.process(located(f"unix:/{number}"))
        assert agents.process(busy) is not stub
    finally:
        await agents.close()


async def test_agent_and_relay_get_the_proof_that_each_wants():
    agents = Agents(max_rpc_bytes=1024)
    try:
        direct = dict(agents.metadata(located("unix:/a"), request_id="r"))
        assert direct == {"request-id": "r", "agent-token": "t"}
        there = replace(located("10.0.0.2:8701", "i7"), relayed=True)
        relayed = dict(agents.metadata(there, request_id="r"))
        assert relayed == {"request-id": "r", "sandbox-id": "i7", "relay-token": "t"}
    finally:
        await agents.close()


async def test_forgotten_channel_is_left_to_its_calls_and_closed_after_them(edge):
    async def wait(_request, _context):
        yield process_pb2.StartResponse()
        await asyncio.Event().wait()

    edge.agent.on["Start"] = wait
    agents = Agents(max_rpc_bytes=1024)
    at = located(edge.agent.target)
    stub = agents.process(at)
    call = stub.Start(process_pb2.StartRequest(), metadata=agents.metadata(at, request_id="r"))
    assert await call.read() is not grpc.aio.EOF
    agents.forget(at)
    assert agents.process(at) is not stub
    await edge.agent.stop()
    # Closing under the call would have raised CancelledError, which a handler must take for its own.
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await agents.close()
    with pytest.raises(grpc.aio.UsageError):
        stub.Start(process_pb2.StartRequest())
