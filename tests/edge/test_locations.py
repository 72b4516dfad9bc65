"""Asking the core where sandboxes are, on one stream: each request anew, and no request harmed by another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_edge import locations
from sandgate_edge.core_client import CoreClient
from sandgate_errors import SandboxNotFound
from sandgate_errors.grpc import status_of, trailers_of


def answer(sandbox_id: str) -> sandboxes_pb2.LocateResponse:
    return sandboxes_pb2.LocateResponse(
        sandbox=sandboxes_pb2.Sandbox(id=sandbox_id), agent=sandboxes_pb2.AgentAddress(target=f"unix:/{sandbox_id}")
    )


class Core(sandboxes_pb2_grpc.SandboxServiceServicer):
    """Knows every sandbox but those whose id begins with "no"."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.streams = 0
        self.messages: list[list[str]] = []
        self.calls: list[str] = []
        self.tokens: list[str] = []
        self.miscounts = False

    async def LocateStream(self, requests, context):
        self.streams += 1
        self.tokens.append(dict(context.invocation_metadata())["internal-token"])
        async for request in requests:
            self.messages.append(list(request.ids))
            self.asked.set()
            await self.open.wait()
            answers = [sandboxes_pb2.LocateResponse() if i.startswith("no") else answer(i) for i in request.ids]
            await context.write(sandboxes_pb2.LocateStreamResponse(answers=answers[1:] if self.miscounts else answers))

    async def Locate(self, request, context):
        self.calls.append(request.id)
        if request.id.startswith("no"):
            error = SandboxNotFound.of(request.id)
            await context.abort(status_of(error), error.message, trailers_of(error))
        return answer(request.id)


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
def core() -> Core:
    return Core()


@pytest.fixture
async def client(core: Core, target: str) -> AsyncIterator[CoreClient]:
    server = await serve(core, target)
    client = CoreClient(target, "internal")
    yield client
    await client.close()
    await server.stop(None)


async def target_of(client: CoreClient, sandbox_id: str) -> str:
    return (await client.locate(sandbox_id, request_id="r")).agent_target


async def test_every_request_asks_anew_on_one_stream(client, core):
    for _ in range(3):
        assert await target_of(client, "i1") == "unix:/i1"
    assert core.messages == [["i1"]] * 3
    assert (core.streams, core.tokens, core.calls) == (1, ["internal"], [])


async def test_questions_at_the_same_time_get_each_their_own_answer(client, core):
    core.open.clear()
    names = [f"i{number}" for number in range(2 * locations._MOST_QUESTIONS)]
    asking = [asyncio.create_task(target_of(client, name)) for name in names]
    await core.asked.wait()
    core.open.set()
    assert await asyncio.gather(*asking) == [f"unix:/{name}" for name in names]
    assert [name for message in core.messages for name in message] == names
    assert max(map(len, core.messages)) == locations._MOST_QUESTIONS
    assert core.calls == []


async def test_what_is_not_simply_there_is_told_by_the_call(client, core):
    found, missing = await asyncio.gather(target_of(client, "i1"), target_of(client, "none"), return_exceptions=True)
    assert found == "unix:/i1"
    assert isinstance(missing, SandboxNotFound)
    assert core.calls == ["none"]


@pytest.mark.parametrize("flag", ["wake", "agent_lost"])
async def test_a_question_that_does_something_is_a_call(client, core, flag):
    await client.locate("i1", request_id="r", **{flag: True})
    assert (core.messages, core.calls) == ([], ["i1"])


async def test_a_request_that_is_given_up_leaves_the_others_theirs(client, core):
    core.open.clear()
    leaving, staying = (asyncio.create_task(target_of(client, name)) for name in ("i1", "i2"))
    await core.asked.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    core.open.set()
    assert await staying == "unix:/i2"
    assert core.streams == 1


async def test_a_restart_of_the_core_is_not_noticed(core, target):
    """The question under way goes to the call, which waits for the new core; the next opens a new stream."""
    server = await serve(core, target)
    client = CoreClient(target, "internal")
    try:
        await target_of(client, "i1")
        core.open.clear()
        core.asked.clear()
        asking = asyncio.create_task(target_of(client, "i2"))
        await core.asked.wait()
        await server.stop(None)
        core.open.set()
        server = await serve(core, target)
        assert await asking == "unix:/i2"
        assert await target_of(client, "i3") == "unix:/i3"
        assert core.calls == ["i2"]
        assert core.streams == 2
    finally:
        await client.close()
        await server.stop(None)


async def test_a_core_that_does_not_answer_the_stream_is_asked_by_the_call(client, core, monkeypatch):
    monkeypatch.setattr(locations, "_ANSWER_SECONDS", 0.05)
    core.open.clear()
    assert await target_of(client, "i1") == "unix:/i1"
    assert core.calls == ["i1"]


async def test_an_answer_to_another_question_is_none(client, core):
    core.miscounts = True
    assert await target_of(client, "i1") == "unix:/i1"
    assert core.calls == ["i1"]


async def test_the_end_of_the_edge_leaves_no_question_open(core, target):
    server = await serve(core, target)
    client = CoreClient(target, "internal")
    core.open.clear()
    asking = asyncio.create_task(client._locations.find("i1"))
    await core.asked.wait()
    await client.close()
    assert await asking is None
    core.open.set()
    await server.stop(None)
