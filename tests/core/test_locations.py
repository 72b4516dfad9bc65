"""``LocateStream``: the data plane's question as fast as memory is, and never an answer that ``Locate`` would not give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_core.server import run_core
from sandgate_plugin_api import Capability


class Stream:
    """One open stream to a core."""

    def __init__(self, channel: grpc.aio.Channel, *credentials: tuple[str, str]) -> None:
        stub: Any = sandboxes_pb2_grpc.SandboxServiceStub(channel)
        self.call = stub.LocateStream(metadata=credentials)

    @classmethod
    def of(cls, client: Any) -> Stream:
        return cls(client.channel, *client.credentials)

    async def ask(self, *ids: str) -> Sequence[sandboxes_pb2.LocateResponse]:
        await self.call.write(sandboxes_pb2.LocateStreamRequest(ids=ids))
        reply = await self.call.read()
        assert isinstance(reply, sandboxes_pb2.LocateStreamResponse)
        return reply.answers


async def test_answers_what_locate_answers_in_the_order_of_the_questions(core):
    made = [await core.owner.create(secure=secure) for secure in (True, False)]
    stream = Stream.of(core.internal)
    answers = await stream.ask(made[1].id, made[0].id, made[1].id)
    expected = [await core.internal.call("Locate", id=box.id) for box in made]
    assert list(answers) == [expected[1], expected[0], expected[1]]


@pytest.mark.parametrize("written", ["", "../x", "I", "i" * 65, "ä", "i0000000000000000000x"])
async def test_an_id_that_is_none_leaves_the_stream_to_the_others(core, written):
    # C16: the stream belongs to all requests of an edge.
    made = await core.owner.create()
    stream = Stream.of(core.internal)
    odd, good = await stream.ask(written, made.id)
    assert odd == sandboxes_pb2.LocateResponse()
    assert good.sandbox.id == made.id
    assert (await stream.ask(made.id))[0] == good


async def test_a_sandbox_is_gone_for_the_next_question_on_an_open_stream(core):
    # R14
    made = await core.owner.create()
    stream = Stream.of(core.internal)
    assert (await stream.ask(made.id))[0].HasField("agent")
    await core.owner.call("Kill", id=made.id)
    assert (await stream.ask(made.id))[0] == sandboxes_pb2.LocateResponse()


async def test_one_that_sleeps_is_left_to_the_call_that_wakes(core, world, backend):
    # R15
    backend.capabilities = frozenset({Capability.PAUSE})
    made = await core.owner.create(auto_resume=True, on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE)
    stream = Stream.of(core.internal)
    await core.owner.call("Pause", id=made.id)
    assert (await stream.ask(made.id))[0] == sandboxes_pb2.LocateResponse()
    await core.internal.call("Locate", id=made.id, wake=True)
    assert (await stream.ask(made.id))[0].agent.target == world.boxes[made.id].placement.agent.target


async def test_only_the_gateway_itself_may_ask(core):
    await core.owner.create()
    for client, code in (
        (core.owner, grpc.StatusCode.PERMISSION_DENIED),
        (core.client(("internal-token", "wrong")), grpc.StatusCode.UNAUTHENTICATED),
        (core.client(), grpc.StatusCode.UNAUTHENTICATED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stream.of(client).call.read()
        assert caught.value.code() is code


async def test_open_streams_do_not_hold_up_the_end_of_the_core(deployment):
    """They have no end of their own, so the drain of the core's stop must not wait for them."""
    serving = AsyncExitStack()
    core = await serving.enter_async_context(run_core(deployment.settings(), {"local": deployment.backend}))
    token = deployment.settings().internal_token.get_secret_value()
    async with grpc.aio.insecure_channel(core.targets[0]) as channel:
        stream = Stream(channel, ("internal-token", token))
        assert list(await stream.ask("i0")) == [sandboxes_pb2.LocateResponse()]
        reading = asyncio.ensure_future(stream.call.read())
        stopping = asyncio.create_task(serving.aclose())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        # Told by the core, and not by a connection that broke when its patience was over.
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the core is stopping")
        await stopping
