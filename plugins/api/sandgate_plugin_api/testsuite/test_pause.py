"""Pause and resume, with memory and without: what is claimed works, what is not is refused."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import process_pb2
from sandgate_errors import CapabilityMissing, NotFound
from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.testsuite.box import Box, made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

# By a rename: a file that is just being written anew is empty, and a pause may come in that very moment.
_COUNTING = "i=0; while :; do i=$((i+1)); echo $i > next; mv next count; sleep 0.05; done"
_CANCELLED = 4


def _needs(backend: Backend, capability: Capability) -> None:
    if capability not in backend.capabilities:
        pytest.skip(f"backend '{backend.name}' does not claim {capability.value}")


def _either(backend: Backend) -> bool:
    """Whether memory is kept in what is tested of both kinds of pause. Skips where there is none."""
    if Capability.PAUSE in backend.capabilities:
        return True
    _needs(backend, Capability.PAUSE_FILESYSTEM)
    return False


@pytest.mark.parametrize(
    ("memory", "capability"), [(True, Capability.PAUSE), (False, Capability.PAUSE_FILESYSTEM)], ids=["memory", "files"]
)
async def test_pause_that_is_not_claimed_is_refused(box: Box, memory: bool, capability: Capability) -> None:
    if capability in box.backend.capabilities:
        pytest.skip(f"it claims {capability.value}")
    with pytest.raises(CapabilityMissing, match=box.backend.name):
        await box.backend.pause(box.handle, memory=memory)
    assert (await box.run("echo still here")).text() == "still here"


async def test_pause_with_memory_stops_every_instruction_and_resume_goes_on(box: Box) -> None:
    _needs(box.backend, Capability.PAUSE)
    async with box.agent() as agent:
        await agent.background(f"echo $$ > pid; {_COUNTING}")
        await _counts_on(box, above=0)
    handle = await box.backend.pause(box.handle, memory=True)
    assert json.loads(json.dumps(dict(handle))) == dict(handle)
    resumed = box.moved(await box.backend.resume(handle))
    first = int((await resumed.run("cat count")).text())
    await _counts_on(resumed, above=first)
    assert (await resumed.run('kill -0 "$(cat pid)" && echo same')).text() == "same"


async def _counts_on(box: Box, *, above: int) -> None:
    count = above
    for _ in range(100):
        count = int((await box.run("cat count 2>/dev/null || echo 0")).text() or 0)
        if count > above:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"a process that counted to {above} does not go on (it is at {count})")


async def test_time_does_not_pass_for_a_sandbox_paused_with_memory(box: Box) -> None:
    """A program that counted while the sandbox was paused would be many steps ahead."""
    _needs(box.backend, Capability.PAUSE)
    async with box.agent() as agent:
        await agent.background(_COUNTING)
        await _counts_on(box, above=0)
        before = int((await agent.run("cat count")).text())
    handle = await box.backend.pause(box.handle, memory=True)
    await asyncio.sleep(3)
    resumed = box.moved(await box.backend.resume(handle))
    after = int((await resumed.run("cat count")).text())
    # Three seconds are sixty steps; what ran around the two calls is less on any machine that can run this.
    assert after - before < 55, f"it counted {after - before} steps, most of them while it was paused"


async def test_pause_without_memory_ends_processes_and_keeps_files(box: Box) -> None:
    _needs(box.backend, Capability.PAUSE_FILESYSTEM)
    async with box.agent() as agent:
        await agent.background("echo $$ > pid; exec sleep 600")
        await agent.write("kept", b"of before")
    handle = await box.backend.pause(box.handle, memory=False)
    resumed = box.moved(await box.backend.resume(handle))
    async with resumed.agent() as agent:
        await agent.init(box.request.sandbox_id)
        assert await agent.read("kept") == b"of before"
        listed = await agent.process.List(process_pb2.ListRequest(), metadata=agent.metadata(), timeout=30)
        assert list(listed.processes) == []
        assert (await agent.run("echo works")).text() == "works"


async def test_pause_may_be_repeated_and_outlives_the_gateway(deployment: Deployment) -> None:
    async with deployment.backend() as before, made(deployment, before) as box:
        memory = _either(before)
        handle = await before.pause(box.handle, memory=memory)
        handle = await before.pause(handle, memory=memory)
        stored = json.loads(json.dumps(dict(handle)))
        async with deployment.backend() as after:
            assert [survivor.sandbox_id for survivor in await after.survey()] == [box.request.sandbox_id]
            handle = await after.pause(stored, memory=memory)
            resumed = box.moved(await after.resume(handle))
            assert (await resumed.run("echo works")).text() == "works"


async def test_resume_of_one_that_runs_is_success(box: Box) -> None:
    memory = _either(box.backend)
    handle = await box.backend.pause(box.handle, memory=memory)
    await box.backend.resume(handle)
    again = box.moved(await box.backend.resume(handle))
    assert (await again.run("echo works")).text() == "works"


async def test_memory_of_a_paused_sandbox_can_be_given_up(box: Box) -> None:
    _needs(box.backend, Capability.PAUSE)
    _needs(box.backend, Capability.PAUSE_FILESYSTEM)
    (await box.run("echo kept > kept")).text()
    handle = await box.backend.pause(box.handle, memory=True)
    handle = await box.backend.pause(handle, memory=False)
    resumed = box.moved(await box.backend.resume(handle))
    async with resumed.agent() as agent:
        await agent.init(box.request.sandbox_id)
        assert (await agent.run("cat kept")).text() == "kept"


async def test_paused_sandbox_can_be_destroyed(deployment: Deployment, backend: Backend) -> None:
    memory = _either(backend)
    async with made(deployment, backend) as box:
        await backend.destroy(await backend.pause(box.handle, memory=memory))
        assert list(await backend.survey()) == []


async def test_pause_and_resume_of_one_that_is_gone_are_not_found(deployment: Deployment, backend: Backend) -> None:
    memory = _either(backend)
    async with made(deployment, backend) as box:
        handle = box.handle
    with pytest.raises(NotFound):
        await backend.pause(handle, memory=memory)
    with pytest.raises(NotFound):
        await backend.resume(handle)


async def test_cancelled_pause_leaves_it_running_or_paused(box: Box) -> None:
    """Never in between: a resume makes it whole either way."""
    memory = _either(box.backend)
    handle = box.handle
    for number in range(_CANCELLED):
        pausing = asyncio.create_task(box.backend.pause(handle, memory=memory))
        await asyncio.sleep(0.02 * number)
        pausing.cancel()
        await asyncio.wait({pausing}, timeout=60)
        assert pausing.done(), "pause() does not end when it is cancelled"
        if not pausing.cancelled() and pausing.exception() is None:
            handle = pausing.result()
        box = box.moved(await box.backend.resume(handle))
        handle = box.handle
        assert (await box.run("echo works")).text() == "works"


async def test_cancelled_resume_leaves_it_running_or_paused(box: Box) -> None:
    memory = _either(box.backend)
    handle = box.handle
    for number in range(_CANCELLED):
        handle = await box.backend.pause(handle, memory=memory)
        resuming = asyncio.create_task(box.backend.resume(handle))
        await asyncio.sleep(0.02 * number)
        resuming.cancel()
        await asyncio.wait({resuming}, timeout=60)
        assert resuming.done(), "resume() does not end when it is cancelled"
        if not resuming.cancelled() and resuming.exception() is None:
            handle = resuming.result().handle
        # As the core does, which holds it for paused until it knows better.
        box = box.moved(await box.backend.resume(handle))
        handle = box.handle
        assert (await box.run("echo works")).text() == "works"


async def test_agent_of_a_sandbox_paused_with_memory_does_not_answer(box: Box) -> None:
    """It is stopped like all else: what it was asked meanwhile it may answer afterwards, and not before."""
    _needs(box.backend, Capability.PAUSE)
    handle = await box.backend.pause(box.handle, memory=True)
    async with box.agent() as agent:
        with pytest.raises(grpc.aio.AioRpcError) as unanswered:
            await agent.agent.Metrics(agent_pb2.MetricsRequest(), metadata=agent.metadata(), timeout=2)
    assert unanswered.value.code() in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    resumed = box.moved(await box.backend.resume(handle))
    assert (await resumed.run("echo works")).text() == "works"
