"""Stores as released schemas wrote them, kept in ``tests/vectors/schemas``: each schema's own migrations, filled with rows.

A copy is made once, before the next migration is written, and never again: what it must show is how a store looks that an
earlier version left. ``python -m sandgate_testing.stored_schemas`` makes the copies that are missing of the newest schema,
one for each kind of database, by the databases' own means of dumping. It needs PostgreSQL's programs.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from sandgate_core import schema
from sandgate_core.samples import Sample
from sandgate_testing.postgres import PostgresServer, programs

__all__ = ["KINDS", "NODE", "load", "revisions", "stored"]

FOLDER = Path(__file__).resolve().parents[2] / "vectors" / "schemas"
KINDS = ("sqlite", "postgresql")
_MIGRATIONS = Path(schema.__file__).with_name("migrations")
#: The node id of the core that wrote them.
NODE = "n0123456789ab"
#: 2026, and a time that no store forgets in the life of this test.
_THEN, _FAR = 1_790_000_000_000_000, 4_900_000_000_000_000
_MINUTE = 60_000_000


def revisions() -> list[str]:
    """Every schema that there is, the first one first."""
    return sorted(path.name.partition("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*.py"))


def stored(revision: str, kind: str) -> Path:
    return FOLDER / f"{revision}.{kind}.sql"


async def load(path: Path, *, url: str | None, state_dir: Path) -> None:
    """Bring a copy into an empty database; ``url`` None: SQLite in the state directory."""
    text = path.read_text()
    if url is None:
        await asyncio.to_thread(_load_sqlite, text, state_dir / "sandgate.db")
    else:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(text)
        finally:
            await connection.close()


def _load_sqlite(text: str, path: Path) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.executescript(text)
    finally:
        connection.close()


# What stands in them


def _sandbox(letter: str, **changes: Any) -> dict[str, Any]:
    name = "i" + letter * 20
    return {
        "id": name, "owner": "default", "backend": "local", "template_id": "base", "alias": "", "state": "running",
        "revision": 1, "created_at": _THEN, "started_at": _THEN + 1_000_000, "end_at": _FAR, "ended_at": None,
        "timeout": 300_000_000, "pause_on_timeout": False, "pause_memory": True, "auto_resume": False, "metadata": {},
        "envs": {}, "resources": {"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}, "allow_internet_access": True,
        "network": None, "secure": False, "token_version": 1, "handle": {"id": name}, "pause_mode": None,
        "agent_unresponsive": False, "idempotency_key": None, "request_digest": None, "setup": None,
        "egress_pending": False, "core": NODE, **changes,
    }  # fmt: skip


#: The request of the create that made sandbox ``a``, as its core took its digest: template, life, metadata, variables, key.
_DIGEST = "cfcba7f18247ef1fbd9ea7f14ceb3d9cc70b4f530cdaa3c606eadc3f4d4bac97"
_RULES = {"allow_out": ["a"], "deny_out": [], "allow_public_traffic": None, "mask_request_host": ""}
_SETUP = {
    "template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": "",
}  # fmt: skip


def _sandboxes() -> Iterator[tuple[str, dict[str, Any]]]:
    """With the schema from which on there were such."""
    yield "0001", _sandbox(
        "a", metadata={"a": "ä", "nul": "\0", "quote": "it's \"so\"; -- \\"}, envs={"X": "1"}, secure=True,
        idempotency_key="retry-1", request_digest=_DIGEST, setup=_SETUP,
    )  # fmt: skip
    yield (
        "0001",
        _sandbox(
            "b", owner="lab", pause_on_timeout=True, auto_resume=True, allow_internet_access=False, network=_RULES
        ),
    )
    yield "0001", _sandbox("c", state="killed", revision=3, end_at=_THEN + 300_000_000, ended_at=_FAR)
    yield "0001", _sandbox("d", state="creating", revision=0, started_at=None, end_at=None, idempotency_key="retry-2")
    yield "0001", _sandbox("e", state="killing", revision=2)
    yield "0001", _sandbox("f", state="failed", revision=1, started_at=None, end_at=None, ended_at=_FAR)
    yield "0002", _sandbox("g", state="paused", revision=3, pause_mode="full", secure=True)
    yield "0002", _sandbox("h", state="paused", revision=3, pause_mode="filesystem", agent_unresponsive=True)
    yield "0002", _sandbox("j", state="pausing", revision=2, pause_mode="full")
    yield "0005", _sandbox("k", state="snapshotting", revision=2, setup=_SETUP)
    yield "0005", _sandbox("l", egress_pending=True, network=_RULES, setup=_SETUP)


def _history() -> Iterator[tuple[str, dict[str, Any]]]:
    for since, sandbox in _sandboxes():
        yield since, _change(sandbox["id"], 0, None, "creating", "create")
        if sandbox["revision"]:
            last = "running" if sandbox["state"] != "failed" else "failed"
            yield since, _change(sandbox["id"], 1, "creating", last, "ready" if last == "running" else "create failed")


def _change(sandbox_id: str, revision: int, came_from: str | None, to: str, note: str) -> dict[str, Any]:
    at = _THEN + revision * 1_000_000
    return {
        "sandbox_id": sandbox_id, "revision": revision, "at": at, "from_state": came_from, "to_state": to, "note": note,
    }  # fmt: skip


def _sample(minute: int) -> bytes:
    return Sample(
        at=_THEN + minute * _MINUTE, cpu_count=2, cpu_used_pct=12.5 * minute, mem_total=1 << 29, mem_used=1 << 28,
        mem_cache=1 << 20, disk_used=1 << 21, disk_total=1 << 30,
    ).pack()  # fmt: skip


def _snapshot(letter: str, **changes: Any) -> dict[str, Any]:
    name = "s" + letter * 20
    return {
        "content": name, "id": name, "owner": "default", "backend": "local", "name": "", "tag": "",
        "sandbox_id": "i" + "a" * 20, "state": "ready", "created_at": _THEN,
        "resources": {"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}, "envs": {"X": "1"}, "setup": _SETUP,
        "handle": {"snapshot_id": name}, "core": "", **changes,
    }  # fmt: skip


def _others() -> Iterator[tuple[str, str, dict[str, Any]]]:
    first, second = "i" + "a" * 20, "i" + "b" * 20
    yield "0001", "api_keys", {
        "id": "k1", "digest": "8b9a845c0344468dfb225b08f15c22dc85a7cc018c315035f7766528d8b7103a",
        "prefix": "e2b_012345", "name": "first", "owner": "default", "created_at": _THEN, "revoked_at": None,
        "last_used_at": _THEN + 5,
    }  # fmt: skip
    yield "0001", "api_keys", {
        "id": "k2", "digest": "2f82ce18f1ba6303fe1e0a7462a4c0ad4ad3a4c3d1d2dbf1f2a8d0f3f5a0a7b1",
        "prefix": "e2b_bbbbbb", "name": "old", "owner": "gone", "created_at": _THEN, "revoked_at": _THEN + 1,
        "last_used_at": None,
    }  # fmt: skip
    yield "0001", "meta", {"name": "seed-fingerprint", "value": "aa1a209f5db71f2bd276f29350335aa6"}
    for minute in (0, 1):
        yield "0002", "measurements", {
            "sandbox_id": first, "at": _THEN + 2 * minute * _MINUTE,
            "samples": _sample(2 * minute) + _sample(2 * minute + 1),
        }  # fmt: skip
    yield "0003", "teams", {"id": "default", "name": "Default", "created_at": _THEN}
    yield "0003", "teams", {
        "id": "lab", "name": "The lab", "created_at": _THEN, "max_sandboxes": 5, "max_cpus": 8, "max_memory_mb": 4096,
        "max_life": 3_600_000_000, "creates_per_minute": 30,
    }  # fmt: skip
    yield "0003", "teams", {"id": "gone", "name": "gone", "created_at": _THEN}
    yield "0004", "audit", {
        "id": 1, "at": _FAR, "team": "default", "key_id": "k1", "key_name": "first", "action": "sandbox.create",
        "subject": first, "outcome": "OK", "request_id": "r-1",
    }  # fmt: skip
    yield "0004", "audit", {
        "id": 2, "at": _FAR + 1, "team": "lab", "key_id": "k9", "key_name": "ä", "action": "sandbox.kill",
        "subject": second, "outcome": "NOT_FOUND", "request_id": "r-2",
    }  # fmt: skip
    yield "0005", "snapshots", _snapshot("a", name="kept", tag="default")
    yield "0005", "snapshots", _snapshot("b", owner="lab", created_at=_THEN + 1)
    yield "0005", "snapshots", _snapshot("c", name="kept", tag="default", state="deleting", id="s" + "a" * 20)
    yield "0005", "snapshots", _snapshot("d", state="making", handle=None)
    yield "0006", "cores", {"id": NODE, "address": "10.0.0.1:7070", "host": "one", "boot": "b1", "lease_end": _THEN}
    yield "0006", "create_rates", {"team": "lab", "tokens": 12.5, "at": _THEN}
    lines = [[_THEN, 7, "web", "stdout", "it's up: ä"], [_THEN + 1, 7, "web", "stderr", "but slow"]]
    yield "0007", "command_logs", {
        "sandbox_id": first, "number": 1, "first_at": _THEN, "last_at": _FAR, "journal": 9, "last_line": 2, "size": 40,
        "lines": zlib.compress(json.dumps(lines).encode(), 1),
    }  # fmt: skip


def rows_of(revision: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Table and row, in an order in which they can be written; with columns that came later than ``revision``."""
    for since, row in _sandboxes():
        if since <= revision:
            yield "sandboxes", row
    for since, row in _history():
        if since <= revision:
            yield "transitions", row
    for since, table, row in _others():
        if since <= revision:
            yield table, row


# How they are made


async def _made(revision: str, url: sa.URL) -> None:
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_migrate, revision)
            await connection.run_sync(_fill, revision)
    finally:
        await engine.dispose()


def _migrate(connection: sa.Connection, revision: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _fill(connection: sa.Connection, revision: str) -> None:
    found = sa.MetaData()
    found.reflect(connection)
    for table, row in rows_of(revision):
        known = found.tables[table].columns
        values = {name: sa.null() if value is None else value for name, value in row.items() if name in known}
        connection.execute(found.tables[table].insert().values(values))
    if connection.dialect.name == "postgresql" and "audit" in found.tables:
        connection.execute(sa.text("SELECT setval(pg_get_serial_sequence('audit', 'id'), max(id)) FROM audit"))


async def _sqlite(revision: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        await _made(revision, sa.URL.create("sqlite+aiosqlite", database=str(path)))
        connection = sqlite3.connect(path)
        try:
            # The migrations' own words have spaces at the ends of lines.
            return "\n".join(line.rstrip() for text in connection.iterdump() for line in text.splitlines()) + "\n"
        finally:
            connection.close()


async def _postgresql(revision: str, server: PostgresServer) -> str:
    found = programs()
    assert found is not None
    url = await server.new_database()
    await _made(revision, sa.make_url(url).set(drivername="postgresql+asyncpg"))
    command = [str(found / "pg_dump"), "--column-inserts", "--no-owner", "--no-privileges", url]
    return _without_settings(await asyncio.to_thread(_output_of, command))


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _without_settings(dump: str) -> str:
    """What makes tables and rows: settings and the dumping program's own commands differ from version to version."""
    kept = [line for line in dump.splitlines() if not re.match(r"--|SET |\\|SELECT pg_catalog\.set_config", line)]
    return re.sub(r"\n{2,}", "\n", "\n".join(kept)).lstrip("\n") + "\n"


async def _main(revision: str) -> int:
    with PostgresServer.running() as server:
        for kind in KINDS:
            path = stored(revision, kind)
            if path.exists():
                print(f"{path} is there, and stays as it is")
                continue
            path.write_text(await (_sqlite(revision) if kind == "sqlite" else _postgresql(revision, server)))
            print(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1] if sys.argv[1:] else schema.HEAD)))
