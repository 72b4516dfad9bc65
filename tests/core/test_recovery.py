"""What a start of the core does with what it finds: adopt, destroy, finish, refuse."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from sandgate_errors import FailedPrecondition, Internal, SandboxNotFound, SandgateError, Unavailable


async def state_of(deployment, sandbox_id):
    ((state,),) = await deployment.sql("SELECT state FROM sandboxes WHERE id = :id", id=sandbox_id)
    return state


async def test_sandboxes_outlive_the_core(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create(metadata={"a": "b"}, envs={"X": "1"}, secure=True)
    assert made.id in world.boxes
    async with deployment.core() as core:
        assert (await core.owner.call("Get", id=made.id)).sandbox == made
        located = await core.internal.call("Locate", id=made.id)
        assert located.agent.token == world.boxes[made.id].agent.token
        await core.owner.call("Kill", id=made.id)
    assert not world.boxes


async def test_on_exit_kill_ends_every_sandbox(deployment, world):
    async with deployment.core(on_exit="kill") as core:
        for _ in range(3):
            await core.owner.create()
    assert not world.boxes
    async with deployment.core() as core:
        assert await core.owner.ids() == []


async def test_stop_calls_off_a_create_that_is_under_way(deployment, backend, world):
    reached = asyncio.Event()
    names = []

    async def hang(sandbox_id):
        names.append(sandbox_id)
        reached.set()
        await asyncio.Event().wait()

    backend.created = hang
    async with deployment.core() as core:
        call = asyncio.create_task(core.owner.create())
        await reached.wait()
        still_open = core.stack.pop_all()
    with pytest.raises(SandgateError):
        await call
    await still_open.aclose()
    assert not world.boxes
    assert await state_of(deployment, names[0]) == "failed"


async def test_survivor_that_nobody_knows_is_destroyed(deployment, world, until):
    await world.make("istranger")
    async with deployment.core():
        await until(lambda: not world.boxes)


async def test_ended_sandbox_that_still_exists_is_destroyed(deployment, world, until):
    async with deployment.core() as core:
        made = await core.owner.create()
        await core.owner.call("Kill", id=made.id)
    await world.make(made.id)
    async with deployment.core() as core:
        await until(lambda: not world.boxes)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("Get", id=made.id)


async def test_record_whose_sandbox_is_gone_ends(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create()
    await world.lose(made.id)
    async with deployment.core() as core:
        assert await core.owner.ids() == []
        assert await state_of(deployment, made.id) == "failed"


async def test_half_made_sandbox_is_freed(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create()
    await deployment.sql("UPDATE sandboxes SET state = 'creating' WHERE id = :id", id=made.id)
    async with deployment.core():
        assert not world.boxes
        assert await state_of(deployment, made.id) == "failed"


async def test_kill_that_was_under_way_is_finished(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create()
    await deployment.sql("UPDATE sandboxes SET state = 'killing' WHERE id = :id", id=made.id)
    async with deployment.core():
        assert not world.boxes
        assert await state_of(deployment, made.id) == "killed"


async def test_overdue_sandbox_ends_at_start(deployment, world, until):
    async with deployment.core() as core:
        made = await core.owner.create()
    await deployment.sql("UPDATE sandboxes SET end_at = 1 WHERE id = :id", id=made.id)
    async with deployment.core():
        await until(lambda: not world.boxes)


async def test_deadline_holds_over_a_restart(deployment, world, until):
    async with deployment.core() as core:
        made = await core.owner.create(timeout=5)
    async with deployment.core() as core:
        assert (await core.owner.call("Get", id=made.id)).sandbox.end_at == made.end_at
        await until(lambda: not world.boxes)


async def test_live_sandbox_of_a_backend_that_is_not_configured_stops_the_start(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create()
    await deployment.sql("UPDATE sandboxes SET backend = 'elsewhere' WHERE id = :id", id=made.id)
    with pytest.raises(FailedPrecondition, match="1 in backend 'elsewhere'"):
        async with deployment.core():
            pass
    assert made.id in world.boxes


async def test_order_to_stop_that_meets_the_start_of_the_server_is_obeyed(deployment, monkeypatch):
    kind = type(grpc.aio.server())
    start = kind.start

    async def interrupted(server):
        asyncio.get_running_loop().call_soon(serving.cancel)
        await start(server)

    async def serve():
        async with deployment.core():
            await asyncio.Event().wait()

    monkeypatch.setattr(kind, "start", interrupted)
    serving = asyncio.create_task(serve())
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_failed_start_ends_no_sandbox_even_with_on_exit_kill(deployment, world):
    async with deployment.core() as core:
        made = await core.owner.create()
    await deployment.sql("UPDATE sandboxes SET backend = 'elsewhere' WHERE id = :id", id=made.id)
    with pytest.raises(FailedPrecondition):
        async with deployment.core(on_exit="kill"):
            pass
    assert made.id in world.boxes


async def test_another_seed_is_refused_while_protected_sandboxes_live(deployment):
    async with deployment.core() as core:
        made = await core.owner.create(secure=True)
    with pytest.raises(FailedPrecondition, match="the seed is not the one that 1 protected sandboxes"):
        async with deployment.core(seed="ab" * 32):
            pass
    async with deployment.core() as core:
        assert (await core.owner.call("Get", id=made.id)).sandbox.access_token == made.access_token
        await core.owner.call("Kill", id=made.id)
    async with deployment.core(seed="ab" * 32) as core:
        await core.owner.create(secure=True)


async def test_another_seed_is_accepted_when_nothing_depends_on_it(deployment):
    async with deployment.core() as core:
        await core.owner.create(secure=False)
    async with deployment.core(seed="ab" * 32) as core:
        assert len(await core.owner.ids()) == 1


async def test_sandbox_that_cannot_be_judged_keeps_the_others_served(deployment, backend, world, monkeypatch):
    async with deployment.core() as core:
        odd, good = await core.owner.create(), await core.owner.create()
    locate = backend.locate

    async def fault(handle):
        if handle["id"] == odd.id:
            raise ValueError("a broken note")
        return await locate(handle)

    monkeypatch.setattr(backend, "locate", fault)
    async with deployment.core() as core:
        await core.internal.call("Locate", id=good.id)
        with pytest.raises(Internal, match="reference"):
            await core.internal.call("Locate", id=odd.id)
        monkeypatch.setattr(backend, "locate", locate)
        assert (await core.internal.call("Locate", id=odd.id)).sandbox.id == odd.id


async def test_failing_survey_stops_the_start_with_its_reason(deployment, backend, monkeypatch):
    async def survey():
        raise Unavailable("the daemon is down")

    monkeypatch.setattr(backend, "survey", survey)
    with pytest.raises(
        FailedPrecondition, match="backend 'local' cannot say which sandboxes exist: the daemon is down"
    ):
        async with deployment.core():
            pass
