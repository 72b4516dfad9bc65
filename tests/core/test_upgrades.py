"""Stores that earlier versions wrote are brought up to date with all that is in them, on both databases.

Each schema that there was has a stored copy for each kind of database (``tests/vectors/schemas``), made once by its own
migrations and filled with sandboxes in every state, their histories, samples and lines, keys, teams, audit and snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from sandgate_core import schema
from sandgate_core.audit import Audit, AuditQuery
from sandgate_core.command_log_table import CommandLogTable, Line, Position
from sandgate_core.keys import Keys
from sandgate_core.records import NetworkRules, PauseMode, Setup
from sandgate_core.samples import Series
from sandgate_core.snapshot_names import parse_name
from sandgate_core.snapshot_table import SnapshotState, SnapshotTable
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_core.teams import Limits, Teams
from sandgate_errors import RequestMismatch
from sandgate_testing.stored_schemas import KINDS, NODE, load, revisions, stored

THEN, FAR = 1_790_000_000_000_000, 4_900_000_000_000_000
SETUP = Setup(template="base", default_user="root", workdir="/srv", start_command="serve")
METADATA = {"a": "ä", "nul": "\0", "quote": 'it\'s "so"; -- \\'}
#: What a column that came later is in rows that were there before; NULL unless it stands here.
FILLED: dict[tuple[str, str], object] = {
    ("sandboxes", "agent_unresponsive"): False,
    ("sandboxes", "egress_pending"): False,
    ("sandboxes", "core"): "",
}
#: Tables that a migration fills from what there was.
DERIVED = {"teams"}
#: Written anew by whoever opens the store.
OPENED = {"alembic_version"}


def named(letter: str) -> str:
    return "i" + letter * 20


@dataclass(frozen=True)
class Copy:
    """A database in which an earlier version's rows stand, not opened yet."""

    revision: str
    deployment: Any

    def __ge__(self, revision: str) -> bool:
        return self.revision >= revision


@pytest.fixture(params=revisions())
async def copy(request, deployment):
    kind = "sqlite" if deployment.database is None else "postgresql"
    await load(stored(request.param, kind), url=deployment.database, state_dir=deployment.folder)
    # The machine is the one that wrote it: a core's sandboxes are found by their core's name.
    (deployment.folder / "node").write_text(f"{NODE}\n")
    return Copy(request.param, deployment)


@pytest.fixture
async def upgraded(copy):
    """The same, opened by this version."""
    store = await Store.open(url=copy.deployment.database, state_dir=copy.deployment.folder)
    yield store
    await store.close()


async def contents(deployment) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, as the database's driver reads it."""
    tables, columns = (
        (
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
            "SELECT name FROM pragma_table_info(:name)",
        )
        if deployment.database is None
        else (
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'",
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = :name",
        )
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for (table,) in await deployment.sql(tables):
        names = [row[0] for row in await deployment.sql(columns, name=table)]
        rows = await deployment.sql(f"SELECT {', '.join(names)} FROM {table}")
        found[table] = [dict(zip(names, row, strict=True)) for row in rows]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("revision", revisions())
def test_every_schema_has_a_stored_copy(revision, kind):
    """A new migration without one fails here: what it makes must be there for the migration after it."""
    assert stored(revision, kind).exists(), (
        f"python -m sandgate_testing.stored_schemas {revision} makes it, once its rows are in that module"
    )


def test_newest_schema_is_the_last_migration():
    assert revisions()[-1] == schema.HEAD


async def test_stored_copy_has_something_in_every_column(copy):
    """What no row had could be lost by an upgrade, and no test would see it."""
    held = await contents(copy.deployment)
    assert held["alembic_version"] == [{"version_num": copy.revision}]
    for table, rows in held.items():
        assert rows, f"{table} is empty"
        for column in rows[0]:
            assert any(row[column] is not None for row in rows), f"{table}.{column} is NULL everywhere"


async def test_upgrade_loses_and_changes_nothing(copy):
    deployment = copy.deployment
    before = await contents(deployment)
    await (await Store.open(url=deployment.database, state_dir=deployment.folder)).close()
    after = await contents(deployment)
    assert after["alembic_version"] == [{"version_num": schema.HEAD}]
    for table in before.keys() - OPENED:
        fresh = after[table][0].keys() - before[table][0].keys()
        filled = {column: FILLED.get((table, column)) for column in fresh}
        assert sorted_rows(after[table]) == sorted_rows({**row, **filled} for row in before[table])
    for table in after.keys() - before.keys() - DERIVED:
        assert after[table] == []


def sorted_rows(rows) -> list[list[tuple[str, str]]]:
    return sorted(
        sorted((column, repr(value if value is not False else 0)) for column, value in row.items()) for row in rows
    )


async def test_schema_is_the_newest(upgraded):
    def compare(connection):
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        return compare_metadata(MigrationContext.configure(connection), schema.metadata)

    async with upgraded.engine.connect() as connection:
        assert await connection.run_sync(compare) == []


async def test_sandboxes_are_what_they_were(copy, upgraded):
    live = {record.id: record for record in await upgraded.live()}
    first, second = live[named("a")], live[named("b")]
    assert (first.owner, first.state, first.metadata, first.envs) == ("default", State.RUNNING, METADATA, {"X": "1"})
    assert (first.secure, first.token_version, first.handle) == (True, 1, {"id": named("a")})
    assert first.setup == (SETUP if copy >= "0005" else Setup())
    assert (second.owner, second.network) == ("lab", NetworkRules(allow_out=("a",)))
    assert (second.auto_resume, second.pause_on_timeout, second.allow_internet_access) == (True, True, False)
    assert (second.end_at, second.timeout) == (FAR, 300_000_000)
    expected = {"a": State.RUNNING, "b": State.RUNNING, "d": State.CREATING, "e": State.KILLING}
    if copy >= "0002":
        expected |= {"g": State.PAUSED, "h": State.PAUSED, "j": State.PAUSING}
        full, files = live[named("g")], live[named("h")]
        assert (full.pause_mode, full.agent_unresponsive) == (PauseMode.FULL, False)
        assert (files.pause_mode, files.agent_unresponsive) == (PauseMode.FILESYSTEM, True)
    if copy >= "0005":
        expected |= {"k": State.SNAPSHOTTING, "l": State.RUNNING}
        assert live[named("l")].egress_pending
        assert not live[named("k")].egress_pending
    assert {name: record.state for name, record in live.items()} == {
        named(letter): state for letter, state in expected.items()
    }
    assert {record.core for record in live.values()} == {NODE if copy >= "0006" else ""}
    assert (await upgraded.find(named("c"))).state is State.KILLED
    assert (await upgraded.find(named("f"))).state is State.FAILED
    assert [(change.came_from, change.to, change.note) for change in await upgraded.history(first.id)] == [
        (None, "creating", "create"),
        ("creating", "running", "ready"),
    ]


async def test_keys_of_repeated_creates_are_still_known(copy, upgraded):
    made = await upgraded.find_by_key("default", "retry-1")
    assert (None if made is None else made.id) == (named("a") if copy >= "0002" else None)
    assert await upgraded.find_by_key("lab", "retry-1") is None


async def test_samples_are_still_there(copy, upgraded):
    series = Series()
    for piece in await upgraded.measurements_of(named("a")):
        series.load(piece)
    minutes = [0, 1, 2, 3] if copy >= "0002" else []
    assert [(sample.at, sample.cpu_used_pct) for sample in series.between(None, None)] == [
        (THEN + minute * 60_000_000, 12.5 * minute) for minute in minutes
    ]


async def test_teams_keep_their_limits_and_every_owner_is_one(copy, upgraded):
    teams = Teams(upgraded)
    await teams.load()
    limited = Limits(max_sandboxes=5, max_cpus=8, max_memory_mb=4096, max_life=3_600_000_000, creates_per_minute=30)
    assert {team.id: (team.name, team.limits) for team in teams.list()} == (
        {"default": ("Default", Limits()), "lab": ("The lab", limited), "gone": ("gone", Limits())}
        if copy >= "0003"
        else {owner: (owner, Limits()) for owner in ("default", "lab", "gone")}
    )


async def test_keys_hold_or_stay_revoked(copy, upgraded):
    keys = Keys(upgraded, Teams(upgraded))
    await keys.load()
    used = THEN + 5 if copy >= "0003" else None
    assert [(key.id, key.name, key.owner, key.last_used_at) for key in keys.list()] == [
        ("k1", "first", "default", used)
    ]
    assert len(await upgraded.keys()) == 2


async def test_audit_is_read_as_before_and_goes_on(copy, upgraded):
    audit = Audit(upgraded, days=1)
    entries = [(entry.team, entry.key_name, entry.action, entry.subject) for _, entry in await audit.read(AuditQuery())]
    assert entries == (
        [("lab", "ä", "sandbox.kill", named("b")), ("default", "first", "sandbox.create", named("a"))]
        if copy >= "0004"
        else []
    )
    row = {"at": FAR, "team": "", "key_id": "", "key_name": "", "action": "x.y", "subject": "", "outcome": "OK"}
    await upgraded.add_audit([{**row, "request_id": "r-3"}])
    assert (await audit.read(AuditQuery()))[0][1].request_id == "r-3"


async def test_snapshots_are_found_by_id_and_name_and_what_was_given_up_is_not(copy, upgraded):
    table = SnapshotTable(upgraded)
    kept = await table.page(owner=None, sandbox_id="", wanted="", name=None, after=None, limit=10)
    assert [record.id for record in kept] == (["s" + "b" * 20, "s" + "a" * 20] if copy >= "0005" else [])
    if copy >= "0005":
        (found,) = await table.page(
            owner="default", sandbox_id="", wanted="kept", name=parse_name("kept"), after=None, limit=10
        )
        assert (found.id, found.state, found.setup) == ("s" + "a" * 20, SnapshotState.READY, SETUP)
        await table.give_up_abandoned()
        assert {record.content for record in await table.for_deletion()} == {"s" + "c" * 20, "s" + "d" * 20}


async def test_lines_of_commands_are_still_there(copy, upgraded):
    table = CommandLogTable(upgraded)
    pieces = [piece async for piece in table.pieces(named("a"), since=None, until=None, backward=False)]
    if copy >= "0007":
        assert pieces == [
            [Line(THEN, 7, "web", "stdout", "it's up: ä"), Line(THEN + 1, 7, "web", "stderr", "but slow")]
        ]
        assert (await table.end_of(named("a")))[0] == Position(journal=9, number=2, at=FAR)
    else:
        assert pieces == []


async def test_core_goes_on_where_the_earlier_version_stopped(copy):
    """The whole of it: keys, tokens, sandboxes in every state, and the answer to a create that was made before."""
    deployment = copy.deployment
    there = "abe" + ("ghj" if copy >= "0002" else "") + ("kl" if copy >= "0005" else "")
    for letter in there:
        await deployment.world.make(named(letter))
    async with deployment.core() as core:
        owner = core.owner
        shown = set(await owner.ids(all=True))
        assert shown == {named(letter) for letter in there if letter not in "be"}
        assert (await owner.call("Get", id=named("a"))).sandbox.metadata == METADATA
        if copy >= "0002":
            asked = {"metadata": METADATA, "envs": {"X": "1"}, "secure": True, "idempotency_key": "retry-1"}
            assert (await owner.create(**asked)).id == named("a")
            with pytest.raises(RequestMismatch):
                await owner.create(**{**asked, "envs": {}})
        for letter in there:
            await core.internal.call("Kill", id=named(letter)) if letter != "e" else None
    assert deployment.world.boxes == {}
    rows = dict(await deployment.sql("SELECT id, state FROM sandboxes"))
    # What was cut off in its making came to nothing, what was being killed is dead.
    assert (rows[named("d")], rows[named("e")]) == ("failed", "killed")
