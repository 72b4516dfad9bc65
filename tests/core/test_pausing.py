"""Pause, resume, waking, and what comes of failures and races between them (behaviour.md C31, C33 to C36, C39 to C49, C59)."""

from __future__ import annotations

import asyncio
import random

import pytest

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core import pausing
from sandgate_core.callers import Caller
from sandgate_errors import (
    CapabilityMissing,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SandboxNotFound,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_api import Capability

RUNNING, PAUSED = sandboxes_pb2.SANDBOX_STATE_RUNNING, sandboxes_pb2.SANDBOX_STATE_PAUSED
UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"


@pytest.fixture(autouse=True)
def offered(backend):
    backend.capabilities = frozenset({Capability.PAUSE, Capability.PAUSE_FILESYSTEM})


@pytest.fixture
def seconds(until):
    from google.protobuf.duration_pb2 import Duration

    return lambda number: Duration(nanos=int(number * 1e9) % 10**9, seconds=int(number))


async def state_of(client, sandbox):
    return (await client.call("Get", id=sandbox.id)).sandbox


def gate():
    """A hook that waits, and two events: it is entered, it may go on."""
    entered, on = asyncio.Event(), asyncio.Event()

    async def wait(_):
        entered.set()
        await on.wait()

    return wait, entered, on


async def test_pause_keeps_everything_and_connect_brings_it_back(core, world, seconds):
    # C40, C42, C49
    owner = core.owner
    sandbox = await owner.create(metadata={"a": "b"}, secure=True, timeout=100)
    paused = (await owner.call("Pause", id=sandbox.id)).sandbox
    assert (paused.state, paused.pause_mode) == (PAUSED, sandboxes_pb2.PAUSE_MODE_FULL)
    assert world.boxes[sandbox.id].paused == "memory"
    answer = await owner.call("Connect", id=sandbox.id, timeout=seconds(500))
    assert answer.resumed
    again = answer.sandbox
    assert (again.state, again.pause_mode) == (RUNNING, sandboxes_pb2.PAUSE_MODE_UNSPECIFIED)
    assert (again.id, again.metadata, again.access_token) == (sandbox.id, sandbox.metadata, sandbox.access_token)
    assert again.template_id == sandbox.template_id
    assert again.started_at.ToNanoseconds() > sandbox.started_at.ToNanoseconds()
    assert again.end_at.ToNanoseconds() - again.started_at.ToNanoseconds() == 500 * 10**9
    assert len(world.boxes[sandbox.id].agent.inits) == 1, "its agent knows already who it is"
    assert not (await owner.call("Connect", id=sandbox.id, timeout=seconds(1))).resumed


async def test_pause_of_the_files_tells_the_new_agent_who_it_is(core, world, seconds):
    # C40
    owner = core.owner
    sandbox = await owner.create(envs={"A": "b"})
    await owner.call("Pause", id=sandbox.id, memory=False)
    assert (await state_of(owner, sandbox)).pause_mode == sandboxes_pb2.PAUSE_MODE_FILESYSTEM
    await owner.call("Connect", id=sandbox.id, timeout=seconds(60))
    (init,) = world.boxes[sandbox.id].agent.inits
    assert (init.sandbox_id, init.envs) == (sandbox.id, {"A": "b"})
    located = await core.internal.call("Locate", id=sandbox.id)
    assert located.agent.token == world.boxes[sandbox.id].agent.token


async def test_connect_may_give_the_memory_up(core, backend, world, seconds):
    # rest.md 4.3, `memory` false
    owner = core.owner
    sandbox = await owner.create()
    await owner.call("Pause", id=sandbox.id)
    assert (await owner.call("Connect", id=sandbox.id, timeout=seconds(60), memory=False)).resumed
    assert backend.asked == ["pause memory", "pause files", "resume"]
    assert (await state_of(owner, sandbox)).state == RUNNING


async def test_paused_twice_is_refused_and_pauses_at_once_join(core, backend, until):
    # C39
    owner = core.owner
    sandbox = await owner.create()
    backend.pausing, entered, on = gate()
    first = [asyncio.create_task(owner.call("Pause", id=sandbox.id)) for _ in range(3)]
    await entered.wait()
    late = asyncio.create_task(owner.call("Pause", id=sandbox.id))
    with pytest.raises(Conflict):
        await owner.call("Pause", id=sandbox.id, memory=False)
    with pytest.raises(Conflict):
        await owner.call("Pause", id=sandbox.id, require_healthy_agent=True)
    await asyncio.sleep(0.05)
    assert (await state_of(owner, sandbox)).state == PAUSED, "C14"
    on.set()
    await asyncio.gather(*first, late)
    assert backend.asked == ["pause memory"]
    with pytest.raises(FailedPrecondition, match="paused already"):
        await owner.call("Pause", id=sandbox.id)


async def test_connect_and_kill_wait_for_a_pause(core, backend, world, seconds):
    # C36, C43
    owner = core.owner
    for operation in ("Connect", "Kill"):
        sandbox = await owner.create()
        backend.pausing, entered, on = gate()
        pausing_ = asyncio.create_task(owner.call("Pause", id=sandbox.id))
        await entered.wait()
        fields = {"timeout": seconds(60)} if operation == "Connect" else {}
        waiting = asyncio.create_task(owner.call(operation, id=sandbox.id, **fields))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        on.set()
        await pausing_
        answer = await waiting
        assert operation == "Kill" or answer.resumed
        assert (sandbox.id in world.boxes) == (operation == "Connect")


async def test_pause_waits_for_a_resume_and_holds_then(core, backend, seconds):
    # B42: an acknowledged pause is not undone by a resume that was under way
    owner = core.owner
    sandbox = await owner.create()
    await owner.call("Pause", id=sandbox.id)
    backend.resuming, entered, on = gate()
    connecting = asyncio.create_task(owner.call("Connect", id=sandbox.id, timeout=seconds(60)))
    await entered.wait()
    pausing_ = asyncio.create_task(owner.call("Pause", id=sandbox.id))
    await asyncio.sleep(0.05)
    on.set()
    assert (await connecting).resumed
    await pausing_
    assert (await state_of(owner, sandbox)).state == PAUSED


async def test_connects_and_resumes_at_once_start_it_once(core, backend, seconds):
    # C46
    owner = core.owner
    sandbox = await owner.create()
    await owner.call("Pause", id=sandbox.id)
    answers = await asyncio.gather(
        *(owner.call("Connect", id=sandbox.id, timeout=seconds(60)) for _ in range(5)),
        *(owner.call("Resume", id=sandbox.id, timeout=seconds(60)) for _ in range(5)),
        return_exceptions=True,
    )
    assert backend.asked.count("resume") == 1
    assert {type(answer) for answer in answers if isinstance(answer, Exception)} <= {FailedPrecondition}


async def test_resume_of_a_running_one_is_refused_and_may_change_the_end(core, seconds):
    # C45
    owner = core.owner
    sandbox = await owner.create()
    with pytest.raises(FailedPrecondition, match="running already"):
        await owner.call("Resume", id=sandbox.id, timeout=seconds(60))
    await owner.call("Pause", id=sandbox.id)
    on_timeout = sandboxes_pb2.ON_TIMEOUT_PAUSE
    resumed = (await owner.call("Resume", id=sandbox.id, timeout=seconds(60), on_timeout=on_timeout)).sandbox
    assert (resumed.state, resumed.on_timeout) == (RUNNING, on_timeout)


async def test_paused_sandbox_has_no_deadline(core, seconds):
    # C31
    owner = core.owner
    sandbox = await owner.create(timeout=3)
    await owner.call("Pause", id=sandbox.id)
    await asyncio.sleep(3.2)
    assert (await state_of(owner, sandbox)).state == PAUSED
    with pytest.raises(SandboxNotFound):
        await owner.call("SetTimeout", id=sandbox.id, timeout=seconds(60))
    for timeout in (0, -1):
        with pytest.raises(InvalidArgument):
            await owner.call("Connect", id=sandbox.id, timeout=seconds(timeout))


@pytest.mark.parametrize(("memory", "kept"), [(None, "memory"), (False, "files")])
async def test_sandbox_pauses_at_its_end_again_and_again(core, world, seconds, until, memory, kept):
    # C33, B44: the choice outlives a resume
    owner = core.owner
    sandbox = await owner.create(timeout=1, on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE, pause_memory=memory)
    await until(lambda: world.boxes[sandbox.id].paused == kept)
    await owner.call("Connect", id=sandbox.id, timeout=seconds(1))
    await until(lambda: world.boxes[sandbox.id].paused == kept)


async def test_pause_at_the_end_that_fails_is_tried_again(core, backend, world, until):
    failures = iter([Unavailable("not now"), RuntimeError("a bug")])

    async def fail(_):
        for failure in failures:
            raise failure

    backend.pausing = fail
    sandbox = await core.owner.create(timeout=1, on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE)
    await until(lambda: world.boxes[sandbox.id].paused == "memory")
    assert backend.asked == ["pause memory"] * 3


async def test_traffic_wakes_only_when_asked_to_and_only_with_the_flag(core, world):
    # R15, C48
    owner, internal = core.owner, core.internal
    sleeper = await owner.create(timeout=5, auto_resume=True)
    other = await owner.create()
    for sandbox in (sleeper, other):
        await owner.call("Pause", id=sandbox.id)
    with pytest.raises(SandboxNotFound):
        await internal.call("Locate", id=other.id, wake=True)
    answer = await internal.call("Locate", id=sleeper.id)
    assert answer.sandbox.state == PAUSED
    assert not answer.HasField("agent")
    assert world.boxes[sleeper.id].paused == "memory"
    answer = await internal.call("Locate", id=sleeper.id, wake=True)
    assert answer.HasField("agent")
    woken = await state_of(owner, sleeper)
    assert woken.end_at.ToNanoseconds() - woken.started_at.ToNanoseconds() == 300 * 10**9
    await owner.call("Pause", id=sleeper.id, memory=False)
    with pytest.raises(SandboxNotFound):
        await internal.call("Locate", id=sleeper.id, wake=True)


async def test_what_the_backend_lacks_is_named_and_nothing_happens(core, backend, seconds):
    owner = core.owner
    sandbox = await owner.create()
    backend.capabilities = frozenset({Capability.PAUSE})
    with pytest.raises(CapabilityMissing, match="'local' does not offer filesystem-only pause"):
        await owner.call("Pause", id=sandbox.id, memory=False)
    await owner.call("Pause", id=sandbox.id)
    with pytest.raises(CapabilityMissing):
        await owner.call("Connect", id=sandbox.id, timeout=seconds(60), memory=False)
    assert (await state_of(owner, sandbox)).state == PAUSED
    backend.capabilities = frozenset()
    assert backend.asked == ["pause memory"]


async def test_agent_that_hangs_is_remembered_or_keeps_a_strict_pause_from_happening(core, world, monkeypatch, seconds):
    monkeypatch.setattr(pausing, "_HEALTH_PATIENCE", 0.1)
    monkeypatch.setattr(pausing, "_AWAKE_PATIENCE", 0.1)
    owner = core.owner
    sandbox = await owner.create()
    world.boxes[sandbox.id].agent.hangs = True
    with pytest.raises(Unavailable, match="does not answer"):
        await owner.call("Pause", id=sandbox.id, require_healthy_agent=True)
    assert (await state_of(owner, sandbox)).state == RUNNING
    assert (await owner.call("Pause", id=sandbox.id)).sandbox.agent_unresponsive_at_pause
    with pytest.raises(FailedPrecondition) as refusal:
        await owner.call("Connect", id=sandbox.id, timeout=seconds(60))
    assert refusal.value.error_code == UNRESPONSIVE
    assert (await state_of(owner, sandbox)).state == PAUSED
    assert world.boxes[sandbox.id].paused == "memory"
    assert (await owner.call("Connect", id=sandbox.id, timeout=seconds(60), memory=False)).resumed
    assert not (await state_of(owner, sandbox)).agent_unresponsive_at_pause


@pytest.mark.parametrize(
    ("failure", "told"),
    [(Unavailable("not now", retry_after=7), Unavailable), (Internal("no"), Internal), (RuntimeError("x"), Internal)],
)
async def test_failed_pause_leaves_it_running_to_its_deadline(core, backend, until, world, failure, told):
    async def fail(_):
        raise failure

    owner = core.owner
    sandbox = await owner.create(timeout=2)
    backend.pausing = fail
    with pytest.raises(told) as caught:
        await owner.call("Pause", id=sandbox.id)
    if told is Unavailable:
        assert caught.value.retry_after == 7
    assert (await state_of(owner, sandbox)).state == RUNNING
    assert (await state_of(owner, sandbox)).pause_mode == sandboxes_pb2.PAUSE_MODE_UNSPECIFIED
    await until(lambda: sandbox.id not in world.boxes)


@pytest.mark.parametrize("failure", [Unavailable("not now"), DataLoss("the memory is gone"), RuntimeError("x")])
async def test_failed_resume_leaves_it_paused_and_whole(core, backend, world, seconds, failure):
    owner = core.owner
    sandbox = await owner.create()
    await owner.call("Pause", id=sandbox.id)
    failures = iter([failure])

    async def fail(_):
        for one in failures:
            raise one

    backend.resuming = fail
    with pytest.raises(SandgateError) as caught:
        await owner.call("Connect", id=sandbox.id, timeout=seconds(60))
    assert (caught.value.error_code == UNRESPONSIVE) == isinstance(failure, DataLoss)
    assert (await state_of(owner, sandbox)).state == PAUSED
    assert world.boxes[sandbox.id].paused == "memory"
    assert (await owner.call("Connect", id=sandbox.id, timeout=seconds(60))).resumed


@pytest.mark.parametrize("operation", ["Pause", "Connect"])
async def test_sandbox_that_died_by_itself_is_found_gone(core, world, seconds, operation):
    owner = core.owner
    sandbox = await owner.create()
    if operation == "Connect":
        await owner.call("Pause", id=sandbox.id)
    await world.lose(sandbox.id)
    with pytest.raises(NotFound):
        await owner.call(operation, id=sandbox.id, **({"timeout": seconds(60)} if operation == "Connect" else {}))
    assert await owner.ids(all=True) == []


async def test_backend_that_hangs_is_given_up_and_the_pause_finished_later(core, backend, world, monkeypatch, until):
    monkeypatch.setattr(pausing, "_PATIENCE", 0.1)
    monkeypatch.setattr(pausing, "_RETRY", 100_000)
    owner = core.owner
    sandbox = await owner.create()
    backend.pausing, _, on = gate()
    with pytest.raises(DeadlineExceeded):
        await owner.call("Pause", id=sandbox.id)
    assert (await state_of(owner, sandbox)).state == PAUSED
    on.set()
    await until(lambda: world.boxes[sandbox.id].paused == "memory")
    with pytest.raises(FailedPrecondition):
        await owner.call("Pause", id=sandbox.id)


async def test_caller_that_leaves_does_not_stop_a_pause(core, backend, world, until):
    owner = core.owner
    sandbox = await owner.create()
    backend.pausing, entered, on = gate()
    leaving = asyncio.create_task(owner.call("Pause", id=sandbox.id))
    await entered.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    on.set()
    await until(lambda: world.boxes[sandbox.id].paused == "memory")


async def test_other_owners_sandbox_is_not_there(sandboxes, backend):
    # S12
    from sandgate_core.admission import CreateSpec

    record = await sandboxes.create(CreateSpec(template="base", timeout=60_000_000), Caller(owner="one"))
    stranger = Caller(owner="two")
    for call in (
        lambda: sandboxes.pause(record.id, stranger),
        lambda: sandboxes.resume(record.id, stranger, timeout=60_000_000),
        lambda: sandboxes.connect(record.id, stranger, timeout=60_000_000),
        lambda: sandboxes.questions.events(record.id, stranger),
    ):
        with pytest.raises(SandboxNotFound):
            await call()
    with pytest.raises(SandboxNotFound):
        sandboxes.questions.metrics(record.id, stranger)
    assert backend.asked == []


async def test_killed_while_paused_leaves_nothing(core, world, seconds):
    # C34, C38
    owner = core.owner
    sandbox = await owner.create()
    await owner.call("Pause", id=sandbox.id)
    await owner.call("Kill", id=sandbox.id)
    assert not world.boxes
    for method, fields in (("Pause", {}), ("Connect", {"timeout": seconds(9)}), ("Resume", {"timeout": seconds(9)})):
        with pytest.raises(SandboxNotFound):
            await owner.call(method, id=sandbox.id, **fields)


async def test_storm_ends_in_one_defined_state(core, backend, world, seconds):
    # C59, B42: no answer but success, "already" and, once killed, "gone"
    async def slowly(_):
        await asyncio.sleep(random.random() * 0.004)

    backend.pausing = backend.resuming = slowly
    owner = core.owner
    sandbox = await owner.create()
    stop = asyncio.Event()
    refused: list[Exception] = []

    async def client(number):
        shape = random.Random(number)
        while not stop.is_set():
            method = shape.choice(["Pause", "Connect", "Connect", "Resume", "SetTimeout"])
            fields = {} if method == "Pause" else {"timeout": seconds(300)}
            try:
                await owner.call(method, id=sandbox.id, **fields)
            except (FailedPrecondition, Conflict):
                pass
            except SandboxNotFound as error:
                if method != "SetTimeout" and not stop.is_set():
                    refused.append(error)
            except SandgateError as error:
                refused.append(error)

    clients = [asyncio.create_task(client(number)) for number in range(20)]
    await asyncio.sleep(3)
    assert not refused
    stop.set()
    await asyncio.gather(*clients)
    await owner.call("Connect", id=sandbox.id, timeout=seconds(60))
    assert (await state_of(owner, sandbox)).state == RUNNING
    assert world.boxes[sandbox.id].paused == ""
    for _ in range(50):
        await owner.call("Pause", id=sandbox.id)
        assert (await owner.call("Connect", id=sandbox.id, timeout=seconds(60))).resumed
    kills = await asyncio.gather(
        owner.call("Kill", id=sandbox.id),
        owner.call("Pause", id=sandbox.id),
        owner.call("Kill", id=sandbox.id),
        owner.call("Connect", id=sandbox.id, timeout=seconds(60)),
        return_exceptions=True,
    )
    assert {type(answer) for answer in kills if isinstance(answer, Exception)} <= {
        SandboxNotFound,
        Conflict,
        FailedPrecondition,
    }
    assert not world.boxes
    assert await owner.ids(all=True) == []


async def test_paused_sandboxes_outlive_the_core_and_lost_ones_do_not(deployment, backend, seconds):
    async with deployment.core() as core:
        kept, lost, files = [await core.owner.create() for _ in range(3)]
        for sandbox in (kept, lost):
            await core.owner.call("Pause", id=sandbox.id)
        await core.owner.call("Pause", id=files.id, memory=False)
    await deployment.world.lose(lost.id)
    async with deployment.core() as core:
        assert set(await core.owner.ids(all=True)) == {kept.id, files.id}
        for sandbox in (kept, files):
            assert (await core.owner.call("Connect", id=sandbox.id, timeout=seconds(60))).resumed
            assert (await core.internal.call("Locate", id=sandbox.id)).HasField("agent")


async def test_call_through_the_relay_wakes(core, world):
    # R15: whoever may call the agent has proved a key
    owner = core.owner
    sandbox = await owner.create(auto_resume=True)
    await owner.call("Pause", id=sandbox.id)
    echo = owner.channel.stream_stream("/sandgate_api.envd.v1.Test/Echo")
    answers = echo(iter([b"hello"]), metadata=(*owner.credentials, ("sandbox-id", sandbox.id)))
    assert [answer async for answer in answers] == [b"hello"]
    assert world.boxes[sandbox.id].paused == ""
