"""Kills that meet other operations: the sandbox ends once, nothing of it is left, and it never comes back (C34 to C38, C59)."""

from __future__ import annotations

import asyncio
import random

import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_errors import Conflict, FailedPrecondition, SandboxNotFound, SandgateError
from sandgate_plugin_api import Capability

pytestmark = pytest.mark.timeout(120)
#: What a caller may hear whose operation lost against a kill; everything else would be a fault.
LOST = (SandboxNotFound, Conflict, FailedPrecondition)


@pytest.fixture
def backend(deployment, make_backend):
    class CopyingBackend(make_backend):
        capabilities = make_backend.capabilities | {
            Capability.PAUSE,
            Capability.PAUSE_FILESYSTEM,
            Capability.SNAPSHOT,
        }

        def __init__(self, world):
            super().__init__(world)
            self.copying = nothing

        async def snapshot(self, handle, *, snapshot_id):
            self._box(handle)
            await self.copying(snapshot_id)
            return {"snapshot_id": snapshot_id}

        async def delete_snapshot(self, snapshot):
            pass

    deployment.backend = CopyingBackend(deployment.world)
    return deployment.backend


@pytest.fixture
async def core(deployment, backend):
    async with deployment.core() as running:
        yield running


async def nothing(_):
    return None


def gate():
    """Something that waits inside an operation: the wait, what tells that it is reached, what lets it go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_):
        reached.set()
        await go_on.wait()

    return wait, reached, go_on


async def outcome(call):
    try:
        return await call
    except SandgateError as error:
        return error


async def gone(core, deployment, world, sandbox_id):
    """No box, not to be found, and its history ends with the kill."""
    assert sandbox_id not in world.boxes
    assert sandbox_id not in await core.owner.ids(all=True)
    states = await deployment.sql(
        "SELECT to_state FROM transitions WHERE sandbox_id = :id ORDER BY revision", id=sandbox_id
    )
    assert states[-1] == ("killed",)
    assert [state for (state,) in states].count("killing") == 1


@pytest.mark.parametrize(
    ("operation", "paused", "inside"),
    [
        ("Pause", False, "pausing"),
        ("Connect", True, "resuming"),
        ("Resume", True, "resuming"),
        ("CreateSnapshot", False, "copying"),
    ],
)
async def test_kill_waits_for_what_is_under_way_and_ends_the_sandbox_then(
    core, deployment, backend, world, operation, paused, inside
):
    made = await core.owner.create()
    if paused:
        await core.owner.call("Pause", id=made.id)
    wait, reached, go_on = gate()
    setattr(backend, inside, wait)
    fields = {"timeout": Duration(seconds=60)} if operation in {"Connect", "Resume"} else {}
    under_way = asyncio.create_task(outcome(core.owner.call(operation, id=made.id, **fields)))
    await reached.wait()
    killing = [asyncio.create_task(outcome(core.owner.call("Kill", id=made.id))) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in killing)
    go_on.set()
    assert not isinstance(await under_way, SandgateError)
    answers = await asyncio.gather(*killing)
    assert sum(not isinstance(answer, SandgateError) for answer in answers) == 1
    assert all(isinstance(answer, SandboxNotFound) for answer in answers if isinstance(answer, SandgateError))
    await gone(core, deployment, world, made.id)


@pytest.mark.parametrize(("operation", "inside"), [("Pause", "pausing"), ("Connect", "resuming")])
async def test_kill_of_what_a_backend_then_fails_at_ends_the_sandbox_too(
    core, deployment, backend, world, operation, inside
):
    made = await core.owner.create()
    if operation == "Connect":
        await core.owner.call("Pause", id=made.id)
    wait, reached, go_on = gate()

    async def fail(name):
        await wait(name)
        raise RuntimeError("a bug")

    setattr(backend, inside, fail)
    fields = {"timeout": Duration(seconds=60)} if operation == "Connect" else {}
    under_way = asyncio.create_task(outcome(core.owner.call(operation, id=made.id, **fields)))
    await reached.wait()
    killing = asyncio.create_task(core.owner.call("Kill", id=made.id))
    await asyncio.sleep(0.05)
    go_on.set()
    assert isinstance(await under_way, SandgateError)
    await killing
    await gone(core, deployment, world, made.id)


async def test_traffic_that_wakes_a_sandbox_does_not_save_it(core, deployment, backend, world):
    made = await core.owner.create(auto_resume=True)
    await core.owner.call("Pause", id=made.id)
    backend.resuming, reached, go_on = gate()
    waking = asyncio.create_task(outcome(core.internal.call("Locate", id=made.id, wake=True)))
    await reached.wait()
    killing = asyncio.create_task(core.owner.call("Kill", id=made.id))
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(waking, killing)
    with pytest.raises(SandboxNotFound):
        await core.internal.call("Locate", id=made.id, wake=True)
    await gone(core, deployment, world, made.id)


async def test_end_of_life_that_meets_a_pause_or_a_kill_ends_it_once(core, deployment, backend, world, until):
    for operation in ("Pause", "Kill"):
        made = await core.owner.create(timeout=3)
        inside = "pausing" if operation == "Pause" else "destroying"
        wait, reached, go_on = gate()
        setattr(backend, inside, wait)
        under_way = asyncio.create_task(outcome(core.owner.call(operation, id=made.id)))
        await reached.wait()
        await asyncio.sleep(3.2)  # the deadline passes meanwhile
        go_on.set()
        answer = await under_way
        assert not isinstance(answer, SandgateError)
        if operation == "Pause":
            # What is paused has no deadline, wherever the old one fell.
            assert world.boxes[made.id].paused == "memory"
            await core.owner.call("Kill", id=made.id)
        await until(lambda: made.id not in world.boxes)  # noqa: B023 - called at once
        setattr(backend, inside, nothing)
        async with asyncio.timeout(20):
            while made.id in await core.owner.ids(all=True):  # noqa: ASYNC110 - the record follows the box
                await asyncio.sleep(0.01)


async def test_storm_that_ends_in_a_kill_leaves_nothing_and_no_answer_after_it_is_a_success(
    core, deployment, backend, world
):
    async def slowly(_):
        await asyncio.sleep(random.random() * 0.003)

    backend.pausing = backend.resuming = backend.copying = backend.destroying = slowly
    for attempt in range(8):
        made = await core.owner.create(auto_resume=True)
        killed = asyncio.Event()
        faults: list[object] = []

        async def client(number, made=made, killed=killed, faults=faults):
            shape = random.Random(number)
            for _ in range(40):
                method = shape.choice(["Pause", "Connect", "Resume", "SetTimeout", "CreateSnapshot"])
                fields = {} if method in {"Pause", "CreateSnapshot"} else {"timeout": Duration(seconds=300)}
                late = killed.is_set()
                answer = await outcome(core.owner.call(method, id=made.id, **fields))
                lost = isinstance(answer, LOST)
                if (late and not isinstance(answer, SandboxNotFound)) or (
                    isinstance(answer, SandgateError) and not lost
                ):
                    faults.append((method, late, answer))

        clients = [asyncio.create_task(client(100 * attempt + number)) for number in range(6)]
        await asyncio.sleep(random.random() * 0.1)
        await core.owner.call("Kill", id=made.id)
        killed.set()
        await asyncio.gather(*clients)
        assert not faults
        await gone(core, deployment, world, made.id)
    assert world.boxes == {}
