"""An agent that ends a call while the edge writes to it is always heard (behaviour D29)."""

import asyncio

import grpc
import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_edge.rest.call_status import CallStatus


class FullDisk(agent_pb2_grpc.AgentServicer):
    """Takes as many messages as the test says, then has no room."""

    room = 0

    async def WriteFile(self, requests, context):
        taken = 0
        async for _ in requests:
            taken += 1
            if taken > self.room:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("error-reason", "no_space"),))


@pytest.mark.parametrize("room", [0, 1, 4])
async def test_the_agents_own_status_survives_the_race_with_our_writes(room):
    agent = FullDisk()
    agent.room = room
    server = grpc.aio.server()
    agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = agent_pb2_grpc.AgentStub(channel)
            # Enough calls to meet both orders of the race.
            for _ in range(60):
                error = await _refusal(stub.WriteFile())
                assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                assert dict(error.trailing_metadata())["error-reason"] == "no_space"
    finally:
        await server.stop(0)


async def _refusal(call):
    status = CallStatus(call)
    try:
        while True:
            try:
                await call.write(agent_pb2.WriteFileRequest(data=bytes(100_000)))
            except asyncio.InvalidStateError:
                await call
    except grpc.aio.AioRpcError as raised:
        return await status.behind(raised)
