"""Create, destroy, and what a create leaves that is cancelled, repeated or broken off."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_errors import SandgateError
from sandgate_plugin_api.backend import Backend
from sandgate_plugin_api.records import AgentAddress, Placement, Resources, Template
from sandgate_plugin_api.testsuite.box import CALL_SECONDS, Box, made, request_for, rest_of
from sandgate_plugin_api.testsuite.deployment import Deployment, eventually

pytestmark = pytest.mark.asyncio

_AT_ONCE = 4
_CANCELLED = 6


async def _ids(backend: Backend) -> list[str]:
    return [survivor.sandbox_id for survivor in await backend.survey()]


async def test_handle_is_reserved_without_making_anything(deployment: Deployment, backend: Backend) -> None:
    request = await request_for(deployment, backend)
    handle = backend.reserve(request)
    assert json.loads(json.dumps(handle)) == handle, "a handle is stored as JSON and must come back the same"
    assert backend.reserve(request) == handle, "reserve() is pure"
    assert await _ids(backend) == []


async def test_created_sandbox_is_whole(box: Box) -> None:
    assert isinstance(box.placement, Placement)
    assert json.loads(json.dumps(dict(box.handle))) == dict(box.handle)
    assert isinstance(box.placement.agent, AgentAddress)
    assert box.placement.agent.token not in repr(box.placement), "the token shows in the placement's repr"
    assert await _ids(box.backend) == [box.request.sandbox_id]


async def test_token_stands_in_no_command_line(box: Box) -> None:
    """Whoever may list processes, inside or on this machine, must not come to hold the agent."""
    inside = (await box.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'; :")).stdout
    assert inside, "no process can be seen in the sandbox"
    assert box.placement.agent.token not in inside
    outside = await asyncio.to_thread(lambda: b"".join(map(_words, Path("/proc").glob("[0-9]*/cmdline"))))
    assert box.placement.agent.token.encode() not in outside


def _words(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # It has ended.


@pytest.mark.parametrize("metadata", [(), (("agent-token", "wrong"),)], ids=["no token", "a wrong token"])
async def test_agent_answers_nobody_without_its_token(box: Box, metadata: tuple[tuple[str, str], ...]) -> None:
    async with grpc.aio.insecure_channel(box.placement.agent.target) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Metrics(agent_pb2.MetricsRequest(), metadata=metadata, timeout=CALL_SECONDS)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_sandboxes_made_at_once_are_strangers_to_each_other(deployment: Deployment, backend: Backend) -> None:
    async with AsyncExitStack() as stack:
        boxes = await asyncio.gather(*(stack.enter_async_context(made(deployment, backend)) for _ in range(_AT_ONCE)))
        assert len({box.placement.agent.target for box in boxes}) == _AT_ONCE
        assert len({box.placement.agent.token for box in boxes}) == _AT_ONCE
        assert sorted(await _ids(backend)) == sorted(box.request.sandbox_id for box in boxes)
        for number, box in enumerate(boxes):
            (await box.run(f"echo {number} > mine")).text()
        assert [(await box.run("cat mine")).text() for box in boxes] == [str(n) for n in range(_AT_ONCE)]


async def test_template_of_another_backend_is_refused_and_nothing_made(
    deployment: Deployment, backend: Backend
) -> None:
    resources = Resources(cpu_count=1, memory_mb=64, disk_size_mb=64)
    request = await request_for(
        deployment, backend, template=Template(id="no-such-template-9f2c71", resources=resources)
    )
    handle = backend.reserve(request)
    with pytest.raises(SandgateError):
        await backend.create(request, handle)
    assert await _ids(backend) == []


async def test_destroyed_sandbox_is_gone_at_once(deployment: Deployment, backend: Backend) -> None:
    async with made(deployment, backend) as box:
        async with box.agent() as agent:
            await agent.background("sleep 600")
        await backend.destroy(box.handle)
        assert await backend.locate(box.handle) is None
        assert await _ids(backend) == []
        async with grpc.aio.insecure_channel(box.placement.agent.target) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)
            metadata = (("agent-token", box.placement.agent.token),)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Metrics(agent_pb2.MetricsRequest(), metadata=metadata, timeout=5)


async def test_destroy_may_be_repeated(deployment: Deployment, backend: Backend) -> None:
    async with made(deployment, backend) as box:
        await backend.destroy(box.handle)
        await backend.destroy(box.handle)


async def test_destroy_of_what_was_never_made_is_success(deployment: Deployment, backend: Backend) -> None:
    await backend.destroy(backend.reserve(await request_for(deployment, backend)))


async def test_two_destroys_at_once_end_it_once(deployment: Deployment, backend: Backend) -> None:
    async with made(deployment, backend) as box:
        await asyncio.gather(backend.destroy(box.handle), backend.destroy(box.handle))
        assert await backend.locate(box.handle) is None


async def test_reserved_handle_destroys_what_was_made_under_it(deployment: Deployment, backend: Backend) -> None:
    """A crash right after create: the store still has the handle that was reserved."""
    request = await request_for(deployment, backend)
    reserved = backend.reserve(request)
    await backend.create(request, reserved)
    await backend.destroy(reserved)
    assert await _ids(backend) == []


async def test_destroy_runs_to_its_end_when_its_caller_goes_away(deployment: Deployment, backend: Backend) -> None:
    async with made(deployment, backend) as box:
        destroying = asyncio.create_task(backend.destroy(box.handle))
        await asyncio.sleep(0)
        destroying.cancel()
        await asyncio.wait({destroying})
        for _ in range(200):
            if await _ids(backend) == []:
                break
            await asyncio.sleep(0.1)
        assert await _ids(backend) == []


async def test_create_that_is_cancelled_leaves_nothing(deployment: Deployment, backend: Backend) -> None:
    """At moments spread over the time that a create takes here, and a little beyond it."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with made(deployment, backend, init=False):
        usual = loop.time() - started
    moments = random.Random(backend.name)  # noqa: S311 - the same moments in each run
    for _ in range(_CANCELLED):
        request = await request_for(deployment, backend)
        reserved = backend.reserve(request)
        creating = asyncio.create_task(backend.create(request, reserved))
        await asyncio.sleep(moments.uniform(0, 1.1 * usual))
        if not creating.cancel():
            await backend.destroy(creating.result().handle)  # It was faster.
            continue
        await asyncio.wait({creating}, timeout=deployment.options.create_seconds)
        assert creating.done(), "create() does not end when it is cancelled"
        if not creating.cancelled() and creating.exception() is None:
            # It had finished when it was cancelled: the core destroys what it got.
            await backend.destroy(creating.result().handle)
        assert await _ids(backend) == [], "a cancelled create() frees what it had started before it ends"


async def test_connections_are_refused_once_the_sandbox_is_gone(deployment: Deployment, backend: Backend) -> None:
    """Streams of a sandbox that ends do not hang: their callers learn it."""
    async with made(deployment, backend) as box, box.agent() as agent:
        call = agent.start("sleep 600")
        assert (await call.read()).event.HasField("start")
        await backend.destroy(box.handle)
        reading = asyncio.create_task(rest_of(call))
        await eventually(reading.done, within=30)
        assert reading.done(), "the stream of a destroyed sandbox goes on"
        # With its end event or broken off: either tells the caller.
        reading.exception()
