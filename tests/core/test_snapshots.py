"""Snapshots through the core, on both databases (behaviour.md C14, C36, C43, C45, C51 to C53)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.clock import now
from sandgate_core.records import Setup
from sandgate_core.snapshot_table import SnapshotRecord, SnapshotState, SnapshotTable
from sandgate_core.snapshots import Snapshots
from sandgate_core.store import Store
from sandgate_errors import (
    AlreadyExists,
    CapabilityMissing,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    NoSpace,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SandboxNotFound,
    Unavailable,
)
from sandgate_plugin_api import Capability, Resources


@pytest.fixture
def backend(deployment, make_backend):
    """Keeps copies beside the world's boxes; ``copying`` and ``removing`` run inside and may wait or raise."""

    class CopyingBackend(make_backend):
        capabilities = make_backend.capabilities | {Capability.SNAPSHOT, Capability.PAUSE}

        def __init__(self, world):
            super().__init__(world)
            self.copies = {}
            self.copying = self.removing = _nothing

        async def snapshot(self, handle, *, snapshot_id):
            self._box(handle)
            await self.copying(snapshot_id)
            self.copies[snapshot_id] = handle["id"]
            return {"snapshot_id": snapshot_id, "of": handle["id"]}

        async def delete_snapshot(self, snapshot):
            await self.removing(snapshot["snapshot_id"])
            self.copies.pop(snapshot["snapshot_id"], None)

    deployment.backend = CopyingBackend(deployment.world)
    return deployment.backend


@pytest.fixture
async def core(deployment, backend):
    async with deployment.core() as running:
        yield running


async def _nothing(_):
    pass


async def take(client, sandbox, **fields):
    return (await client.call("CreateSnapshot", id=sandbox.id, **fields)).snapshot


async def ids(client, **fields):
    return [snapshot.id for snapshot in (await client.call("ListSnapshots", **fields)).snapshots]


async def lab(core):
    """A client of another team."""
    await core.internal.call("CreateTeam", id="lab")
    made = await core.internal.call("CreateKey", name="lab", owner="lab", create_team=True)
    return core.client(("api-key", made.secret))


async def test_sandbox_goes_on_and_another_starts_from_the_copy(core, backend, world):
    box = await core.owner.create(envs={"A": "1", "B": "1"})
    snapshot = await take(core.owner, box)
    assert (await core.owner.call("Get", id=box.id)).sandbox.state == sandboxes_pb2.SANDBOX_STATE_RUNNING
    assert list(snapshot.names) == []
    assert (snapshot.sandbox_id, snapshot.backend) == (box.id, "local")
    copy = await core.owner.create(template_id=snapshot.id, envs={"B": "2"})
    assert backend.requests[-1].snapshot == {"snapshot_id": snapshot.id, "of": box.id}
    # As the backend knows it: what the copy was made of. As clients do: the copy (C15).
    assert backend.requests[-1].template.id == "base"
    assert copy.template_id == snapshot.id
    assert copy.resources == box.resources
    # Variables go with it, and those of the create win.
    assert dict(world.boxes[copy.id].agent.inits[0].envs) == {"A": "1", "B": "2"}
    # A copy of the copy is still of that template.
    again = await core.owner.create(template_id=(await take(core.owner, copy)).id)
    assert backend.requests[-1].template.id == "base"
    assert set(await core.owner.ids(template=snapshot.id)) == {copy.id}
    assert set(await core.owner.ids(template="base")) == {box.id}
    assert again.id != copy.id
    found = await core.owner.call("FindTemplate", name=snapshot.id)
    assert found.template_id == snapshot.id


async def test_snapshot_outlives_its_sandbox_and_the_core(deployment, backend):
    async with deployment.core() as core:
        box = await core.owner.create()
        snapshot = await take(core.owner, box, name="kept:v1")
        await core.owner.call("Kill", id=box.id)
    async with deployment.core() as core:
        assert await ids(core.owner) == [snapshot.id]
        copy = await core.owner.create(template_id="kept:v1")
        assert (copy.template_id, copy.alias) == (snapshot.id, "kept")
        assert backend.copies == {snapshot.id: box.id}


async def test_name_is_found_in_all_its_forms_and_a_new_copy_takes_its_place(core, backend, until):
    box = await core.owner.create()
    first = await take(core.owner, box, name="mine")
    assert list(first.names) == ["default/mine:default"]
    other = await take(core.owner, box, name="default/mine:v2")
    assert other.id != first.id
    contents = set(backend.copies)
    second = await take(core.owner, box, name="mine:default")
    assert second.id == first.id
    # The old content goes, the other tag stays.
    await until(lambda: len(backend.copies) == 2)
    assert len(contents & set(backend.copies)) == 1
    assert await ids(core.owner) == [second.id, other.id]
    for name in ("mine", "mine:default", "default/mine", "default/mine:default", first.id):
        assert (await core.owner.create(template_id=name)).template_id == first.id
    assert set(await ids(core.owner, name="mine")) == {first.id, other.id}
    assert await ids(core.owner, name="mine:v2") == [other.id]
    assert await ids(core.owner, name=first.id) == [first.id]
    assert await ids(core.owner, name="nobody's") == await ids(core.owner, name="mine:v3") == []
    assert await ids(core.owner, sandbox_id=box.id, name="mine:v2") == [other.id]
    assert await ids(core.owner, sandbox_id="i" + "0" * 20) == []


async def test_another_team_sees_nothing_of_it(core, backend):
    box = await core.owner.create()
    snapshot = await take(core.owner, box, name="mine")
    stranger = await lab(core)
    assert await ids(stranger) == await ids(stranger, name="mine") == await ids(stranger, name="default/mine") == []
    for name in (snapshot.id, "mine", "default/mine"):
        for method in ("FindTemplate", "DeleteSnapshot"):
            with pytest.raises(NotFound):
                await stranger.call(method, **{"name" if method == "FindTemplate" else "id": name})
        with pytest.raises(NotFound):
            await stranger.create(template_id=name)
    with pytest.raises(SandboxNotFound):
        await take(stranger, box)
    with pytest.raises(InvalidArgument, match="not yours"):
        await take(stranger, await stranger.create(), name="default/mine")
    # The same name is another team's own. The internal caller sees both, and must say which one is meant.
    theirs = await take(stranger, await stranger.create(), name="mine")
    assert theirs.id != snapshot.id
    assert set(await ids(core.internal, name="mine")) == {theirs.id, snapshot.id}
    assert await ids(core.internal, name="lab/mine") == [theirs.id]
    with pytest.raises(NotFound):
        await core.internal.call("DeleteSnapshot", id="mine")
    await core.internal.call("DeleteSnapshot", id="lab/mine")
    assert await ids(core.internal) == [snapshot.id]


async def test_pages_hold_each_snapshot_once(core, backend):
    box = await core.owner.create()
    made = [(await take(core.owner, box)).id for _ in range(7)]
    found, token = [], ""
    while True:
        answer = await core.owner.call("ListSnapshots", page_size=3, page_token=token)
        found += [snapshot.id for snapshot in answer.snapshots]
        token = answer.next_page_token
        if not token:
            break
    assert found == made[::-1]
    for bad in ("x", "MS4x", "!" * 5, "MS45OTk5OTk5OTk5OTk5OTk5OTk5LmE"):
        with pytest.raises(InvalidArgument):
            await core.owner.call("ListSnapshots", page_token=bad)


async def test_second_at_the_same_time_is_refused_and_others_wait(core, backend, until):
    """C51; C14: shown as running; C36 and C43: what else is asked of the sandbox waits; C45: 409."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_):
        reached.set()
        await go_on.wait()

    backend.copying = hold
    box = await core.owner.create()
    taking = asyncio.create_task(take(core.owner, box))
    await reached.wait()
    assert (await core.owner.call("Get", id=box.id)).sandbox.state == sandboxes_pb2.SANDBOX_STATE_RUNNING
    assert (await core.internal.call("Locate", id=box.id)).HasField("agent")
    with pytest.raises(Conflict):
        await take(core.owner, box)
    connecting = asyncio.create_task(core.owner.call("Connect", id=box.id, timeout=_seconds(60)))
    resuming = asyncio.create_task(core.owner.call("Resume", id=box.id, timeout=_seconds(60)))
    await asyncio.sleep(0.1)
    killing = asyncio.create_task(core.owner.call("Kill", id=box.id))
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in (connecting, killing, taking))
    go_on.set()
    snapshot = await taking
    await connecting
    with pytest.raises(FailedPrecondition):
        await resuming
    await killing
    assert await ids(core.owner) == [snapshot.id]


def _seconds(number):
    return Duration(seconds=number)


@pytest.mark.parametrize("failure", [NoSpace("no space is left"), RuntimeError("a bug"), Unavailable("not now")])
async def test_failed_snapshot_leaves_a_running_sandbox_and_nothing_else(deployment, backend, until, failure):
    async def fail(_):
        raise failure

    async with deployment.core() as core:
        box = await core.owner.create()
        backend.copying = fail
        with pytest.raises(Exception, match=str(failure) if not isinstance(failure, RuntimeError) else "internal"):
            await take(core.owner, box, name="never")
        backend.copying = _nothing
        assert await ids(core.owner) == []
        assert await take(core.owner, box, name="never")
    assert await deployment.sql("SELECT state FROM sandboxes") == [("running",)]
    assert await deployment.sql("SELECT state FROM snapshots") == [("ready",)]


async def test_failed_copy_keeps_what_had_the_name(core, backend):
    box = await core.owner.create()
    first = await take(core.owner, box, name="mine")

    async def fail(_):
        raise NoSpace("no space is left")

    backend.copying = fail
    with pytest.raises(NoSpace):
        await take(core.owner, box, name="mine")
    assert (await core.owner.create(template_id="mine")).template_id == first.id


async def test_sandbox_that_died_by_itself_is_told(core, backend, world):
    box = await core.owner.create()
    await world.lose(box.id)
    with pytest.raises(SandboxNotFound):
        await take(core.owner, box)
    assert await core.owner.ids() == []


async def test_paused_sandbox_must_be_resumed_first(core, backend):
    box = await core.owner.create()
    await core.owner.call("Pause", id=box.id)
    with pytest.raises(FailedPrecondition, match="paused"):
        await take(core.owner, box)


async def test_backend_that_keeps_none_is_named(deployment, make_backend):
    deployment.backend = make_backend(deployment.world)
    async with deployment.core() as core:
        box = await core.owner.create()
        with pytest.raises(CapabilityMissing, match="'local' does not offer snapshots"):
            await take(core.owner, box)


async def test_memory_is_not_promised_where_it_is_not_kept(core, backend):
    box = await core.owner.create()
    with pytest.raises(CapabilityMissing, match="memory"):
        await take(core.owner, box, memory=True)
    assert await take(core.owner, box, memory=False)


@pytest.mark.parametrize("name", ["a b", "/x", "x/", "a:b:c", ":x", "-x", "x" * 129, "ä", "a\nb", "x:" + "t" * 129])
async def test_name_that_could_not_be_written_in_a_path_is_refused(core, backend, name):
    box = await core.owner.create()
    with pytest.raises(InvalidArgument, match="name"):
        await take(core.owner, box, name=name)
    assert backend.copies == {}


@pytest.mark.parametrize("name", ["base", "default-image", "base:v1", "default/base"])
async def test_name_of_a_template_stays_the_template_s(core, backend, name):
    box = await core.owner.create()
    with pytest.raises(AlreadyExists, match="template"):
        await take(core.owner, box, name=name)


async def test_deleted_snapshot_is_gone_at_once_and_its_copy_soon(core, backend, until):
    box = await core.owner.create()
    snapshot = await take(core.owner, box, name="mine")
    copy = await core.owner.create(template_id="mine")

    async def refuse(_):
        raise Unavailable("not now")

    backend.removing = refuse
    await core.owner.call("DeleteSnapshot", id="default/mine")
    assert await ids(core.owner) == []
    for method, field in (("DeleteSnapshot", "id"), ("FindTemplate", "name")):
        with pytest.raises(NotFound):
            await core.owner.call(method, **{field: snapshot.id})
    with pytest.raises(NotFound):
        await core.owner.create(template_id="mine")
    # What was made of it lives, and the name is free.
    assert (await core.owner.call("Get", id=copy.id)).sandbox.template_id == snapshot.id
    backend.removing = _nothing
    second = await take(core.owner, box, name="mine")
    assert second.id != snapshot.id
    # The next deletion does not forget the one that could not be done.
    await until(lambda: set(backend.copies) == {second.id})


async def test_templates_cannot_be_deleted(core, backend):
    for name in ("base", "default-image"):
        with pytest.raises(PermissionDenied, match="configuration"):
            await core.owner.call("DeleteSnapshot", id=name)
    with pytest.raises(NotFound):
        await core.owner.call("DeleteSnapshot", id="nobody's")


async def test_team_may_have_so_many(core, backend, monkeypatch):
    monkeypatch.setattr("sandgate_core.snapshots._MOST_PER_TEAM", 2)
    box = await core.owner.create()
    for _ in range(2):
        await take(core.owner, box)
    with pytest.raises(ResourceExhausted, match="2 snapshots"):
        await take(core.owner, box)
    stranger = await lab(core)
    assert await take(stranger, await stranger.create())


async def test_snapshots_are_in_the_audit(core, backend):
    box = await core.owner.create()
    snapshot = await take(core.owner, box)
    await core.owner.call("DeleteSnapshot", id=snapshot.id)
    entries = (await core.internal.call("ListAudit", action="snapshot")).entries
    assert {(entry.action, entry.subject, entry.outcome) for entry in entries} == {
        ("snapshot.create", box.id, "OK"),
        ("snapshot.delete", snapshot.id, "OK"),
    }


class TestWhatACrashLeaves:
    """Rows as they stand at each step, found by the next start."""

    @pytest.fixture
    async def store(self, deployment):
        store = await Store.open(url=deployment.database, state_dir=deployment.folder)
        yield store
        await store.close()

    async def put(self, store, *, state, handle=None, sandbox_id="i" + "0" * 20, content="s" + "1" * 20):
        record = SnapshotRecord(
            content=content,
            id=content,
            owner="default",
            backend="local",
            name="",
            tag="",
            sandbox_id=sandbox_id,
            state=SnapshotState.MAKING,
            created_at=now(),
            resources=Resources(cpu_count=1, memory_mb=1, disk_size_mb=1),
            setup=Setup(template="base"),
        )
        rows = SnapshotTable(store)
        await rows.add(replace(record, state=state, handle=handle))
        return rows

    async def tidy(self, rows, backend):
        await Snapshots(table=None, rows=rows, templates=None, backends={"local": backend}, ending=None).tidy()

    async def test_what_was_being_made_is_given_up_by_its_id(self, deployment, backend, store):
        removed = []
        backend.removing = lambda snapshot_id: _noted(removed, snapshot_id)
        rows = await self.put(store, state=SnapshotState.MAKING)
        await self.tidy(rows, backend)
        assert removed == ["s" + "1" * 20]
        assert await deployment.sql("SELECT COUNT(*) FROM snapshots") == [(0,)]

    async def test_what_was_to_be_deleted_is(self, deployment, backend, store):
        backend.copies["s" + "1" * 20] = "x"
        rows = await self.put(store, state=SnapshotState.DELETING, handle={"snapshot_id": "s" + "1" * 20})
        await self.tidy(rows, backend)
        assert backend.copies == {}
        assert await deployment.sql("SELECT COUNT(*) FROM snapshots") == [(0,)]

    async def test_what_is_under_way_or_ready_is_left_alone(self, deployment, backend, world):
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold(_):
            reached.set()
            await go_on.wait()

        async with deployment.core() as core:
            box = await core.owner.create()
            ready = await take(core.owner, box)
            backend.copying = hold
            taking = asyncio.create_task(take(core.owner, box))
            await reached.wait()
            # A deletion meanwhile looks through all rows.
            await core.owner.call("DeleteSnapshot", id=ready.id)
            go_on.set()
            taken = await taking
            assert await ids(core.owner) == [taken.id]


async def _noted(noted, value):
    noted.append(value)
