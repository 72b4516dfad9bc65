"""Stores that earlier versions wrote are brought up to date with all that is in them, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandgate_core import schema
from sandgate_core.keys import Keys
from sandgate_core.records import NetworkRules
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_core.teams import Limits, Teams

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
WRITTEN = sorted(VECTORS.glob("schema_*.sql"))


@pytest.fixture(params=WRITTEN, ids=lambda path: path.stem)
async def upgraded(request, deployment):
    """A store that was opened on what an earlier version wrote."""
    text = "\n".join(line for line in request.param.read_text().splitlines() if not line.startswith("--"))
    for statement in filter(str.strip, text.split(";\n")):
        # JSON has colons; only what looks like a parameter needs the mark.
        await deployment.sql(statement.strip().rstrip(";").replace(":", r"\:"))
    store = await Store.open(url=deployment.database, state_dir=deployment.folder)
    yield store
    await store.close()


async def test_schema_is_the_newest(upgraded, deployment):
    assert await deployment.sql("SELECT version_num FROM alembic_version") == [(schema.HEAD,)]

    def compare(connection):
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        return compare_metadata(MigrationContext.configure(connection), schema.metadata)

    async with upgraded._engine.connect() as connection:
        assert await connection.run_sync(compare) == []


async def test_sandboxes_are_what_they_were(upgraded):
    first, second = sorted(await upgraded.live(), key=lambda record: record.id)
    assert (first.owner, first.state, first.metadata, first.envs) == ("default", State.RUNNING, {"a": "ä"}, {"X": "1"})
    assert first.secure
    assert first.pause_mode is first.idempotency_key is None
    assert not first.agent_unresponsive
    assert second.network == NetworkRules(allow_out=("a",))
    assert second.auto_resume
    assert second.end_at == 4_900_000_000_000_000
    ended = await upgraded.find("i" + "c" * 20)
    assert ended.state is State.KILLED
    assert [change.note for change in await upgraded.history(first.id)] == ["create", "ready"]


async def test_every_owner_is_a_team_without_limits(upgraded):
    teams = Teams(upgraded)
    await teams.load()
    assert {team.id: team.limits for team in teams.list()} == dict.fromkeys(("default", "lab", "gone"), Limits())


async def test_keys_hold_or_stay_revoked(upgraded):
    keys = Keys(upgraded, Teams(upgraded))
    await keys.load()
    assert [(key.id, key.name, key.owner, key.last_used_at) for key in keys.list()] == [
        ("k1", "first", "default", None)
    ]
    assert len(await upgraded.keys()) == 2


async def test_what_was_remembered_is_still_known(upgraded):
    assert await upgraded.remembered("seed-fingerprint") == "x"


def test_every_kept_copy_is_of_a_schema_before_the_newest():
    assert WRITTEN
    assert all(path.stem.removeprefix("schema_") < schema.HEAD for path in WRITTEN)
