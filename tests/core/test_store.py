"""The store: compare-and-set, what it refuses to open, its schema and its limits."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace

import pytest
import sqlalchemy as sa

from sandgate_core import clock, locking, schema
from sandgate_core.chores import running
from sandgate_core.records import NetworkRules, SandboxRecord
from sandgate_core.states import TRANSITIONS, State
from sandgate_core.store import KEEP_ENDED, Store
from sandgate_errors import Conflict, FailedPrecondition
from sandgate_plugin_api import Resources


@pytest.fixture
async def store(folder, database):
    store = await Store.open(url=database, state_dir=folder)
    yield store
    await store.close()


def record(sandbox_id="i1", **changes) -> SandboxRecord:
    made = SandboxRecord(
        id=sandbox_id,
        owner="o",
        backend="b",
        template_id="t",
        alias="",
        state=State.CREATING,
        created_at=clock.now(),
        timeout=5,
        metadata={"ä": "😀\n"},
        envs={"X": ""},
        resources=Resources(cpu_count=1, memory_mb=2, disk_size_mb=3),
        handle={"deep": {"list": [1, None, "x"]}},
    )
    return replace(made, **changes)


@pytest.mark.parametrize("network", [None, NetworkRules(allow_out=("a",), deny_out=("b", "c"), mask_request_host="h")])
async def test_record_comes_back_as_it_was_written(store, network):
    written = record(network=network, started_at=7, secure=True)
    await store.add(written, note="create")
    assert await store.find("i1") == written
    assert await store.live() == [written]


async def test_only_one_of_many_who_race_for_a_change_wins(store):
    await store.add(record(), note="create")
    after = record(state=State.RUNNING, revision=1)
    outcomes = await asyncio.gather(
        *(store.move(after, came_from=State.CREATING, note="x") for _ in range(5)), return_exceptions=True
    )
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 4
    assert len(await store.history("i1")) == 2


async def test_amending_a_record_that_changed_state_is_a_conflict(store):
    await store.add(record(), note="create")
    await store.move(record(state=State.RUNNING, revision=1), came_from=State.CREATING, note="ready")
    with pytest.raises(Conflict):
        await store.amend(record(end_at=9))
    assert (await store.find("i1")).end_at is None


async def test_database_of_a_newer_version_is_refused_and_left_alone(deployment, folder):
    await (await Store.open(url=deployment.database, state_dir=folder)).close()
    await deployment.sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(FailedPrecondition, match=r"newer version of sandgate \(schema '9999'") as refusal:
        await Store.open(url=deployment.database, state_dir=folder)
    assert "\n" not in refusal.value.message
    assert await deployment.sql("SELECT version_num FROM alembic_version") == [("9999",)]


async def test_file_that_is_no_database_is_refused_in_one_line(folder):
    (folder / "sandgate.db").write_bytes(b"not a database" * 100)
    with pytest.raises(FailedPrecondition, match="file is not a database") as refusal:
        await Store.open(url=None, state_dir=folder)
    assert "\n" not in refusal.value.message


async def test_directory_in_its_place_is_refused_in_one_line(folder):
    (folder / "sandgate.db").mkdir()
    with pytest.raises(FailedPrecondition, match="cannot be used"):
        await Store.open(url=None, state_dir=folder)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("://secret@", "cannot be read"),
        ("mysql://u:secret@h/d", "'mysql' are not supported"),
        ("postgresql://u:secret@127.0.0.1:1/d", "postgresql"),
        ("sqlite:////nowhere/at/all.db", "cannot be used"),
    ],
)
async def test_unusable_url_is_one_line_without_the_password(folder, url, text):
    with pytest.raises(FailedPrecondition, match=text) as refusal:
        await Store.open(url=url, state_dir=folder)
    assert "secret" not in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_database_is_readable_by_its_owner_only(store, folder):
    await store.add(record(), note="create")
    for path in folder.glob("sandgate.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_migrations_make_the_schema_that_the_code_uses(store, folder):
    def compare(connection):
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        from sandgate_core import database as module

        assert ScriptDirectory(str(module._MIGRATIONS)).get_heads() == [schema.HEAD]
        return compare_metadata(MigrationContext.configure(connection), schema.metadata)

    async with store._engine.connect() as connection:
        assert await connection.run_sync(compare) == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_database_settings_are_in_force(store):
    async with store._engine.connect() as connection:
        for pragma, expected in {
            "journal_mode": "wal",
            "synchronous": 1,
            "foreign_keys": 1,
            "busy_timeout": 5000,
        }.items():
            assert (await connection.execute(sa.text(f"PRAGMA {pragma}"))).scalar() == expected


async def test_interrupted_migration_leaves_nothing_half_done(folder, database, monkeypatch):
    from alembic import op

    def fail(*_, **__):
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_index", fail)
        with pytest.raises(FailedPrecondition, match="power cut"):
            await Store.open(url=database, state_dir=folder)
    await (await Store.open(url=database, state_dir=folder)).close()


async def test_long_ended_records_are_forgotten_with_their_history(store, monkeypatch):
    """Also by a core that is not started again for a year, and however many there are."""
    monkeypatch.setattr("sandgate_core.database._FORGET_AT_ONCE", 2)
    monkeypatch.setattr("sandgate_core.store._FORGET", 0.05)
    now = clock.now()
    async with running(store.forgetting):
        for name, ended in (("young", now - KEEP_ENDED + 10**9), ("live", None)):
            await store.add(record(name, ended_at=ended), note="create")
        for number in range(5):
            await store.add(record(f"old-{number}", ended_at=now - KEEP_ENDED - 1), note="create")
        async with asyncio.timeout(20):
            while await store.find("old-4") is not None:  # noqa: ASYNC110 - another process would look the same way
                await asyncio.sleep(0.02)
    for number in range(5):
        assert await store.find(f"old-{number}") is None
        assert await store.history(f"old-{number}") == []
    assert await store.find("young") is not None
    assert await store.find("live") is not None


async def test_error_of_the_database_does_not_tell_what_was_written(store):
    written = record(envs={"PASSWORD": "hunter2"})
    await store.add(written, note="create")
    with pytest.raises(sa.exc.IntegrityError) as error:
        await store.add(written, note="create")
    assert "hunter2" not in str(error.value)


@pytest.fixture
async def shared(postgres):
    """A database that two cores may be pointed at."""
    url = await postgres.new_database()
    yield url
    await postgres.drop(url)


async def test_second_core_on_a_database_is_refused_until_the_first_is_gone(folder, shared, monkeypatch):
    monkeypatch.setattr(locking, "_PATIENCE", 0.2)
    first = await Store.open(url=shared, state_dir=folder)
    with pytest.raises(FailedPrecondition, match="another core uses this database") as refusal:
        await Store.open(url=shared, state_dir=folder)
    assert "\n" not in refusal.value.message
    await first.close()
    await (await Store.open(url=shared, state_dir=folder)).close()


async def test_core_keeps_its_database_when_the_server_cuts_its_connections(folder, shared, postgres, monkeypatch):
    monkeypatch.setattr(locking, "_LOOK", 0.05)
    monkeypatch.setattr(locking, "_PATIENCE", 0.2)
    store = await Store.open(url=shared, state_dir=folder)
    await store.add(record(), note="create")
    await postgres.cut_connections(shared)
    assert await store.find("i1") is not None
    async with asyncio.timeout(20):
        while not await refused(shared, folder):  # noqa: ASYNC110 - the session's return has no event
            await asyncio.sleep(0.05)
    assert not store.lost.is_set()
    await store.close()


async def refused(url, folder) -> bool:
    try:
        await (await Store.open(url=url, state_dir=folder)).close()
    except FailedPrecondition:
        return True
    return False


async def test_core_that_lost_its_database_to_another_says_so(folder, shared, postgres, monkeypatch):
    monkeypatch.setattr(locking, "_LOOK", 0.5)
    monkeypatch.setattr(locking, "_PATIENCE", 0.2)
    first = await Store.open(url=shared, state_dir=folder)
    await postgres.cut_connections(shared)
    second = await Store.open(url=shared, state_dir=folder)
    async with asyncio.timeout(20):
        await first.lost.wait()
    assert not second.lost.is_set()
    await first.close()
    await second.close()


def test_every_state_but_the_ended_ones_can_be_killed_and_ended_ones_never_come_back():
    # C38
    for state in State:
        assert state.ended == (state in {State.KILLED, State.FAILED})
        if not state.ended and state is not State.KILLING:
            assert State.KILLING in TRANSITIONS[state]
    assert set(TRANSITIONS) == set(State)
