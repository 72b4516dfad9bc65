"""The store: what the core must not forget, in SQL.

SQLite (write-ahead log) in the state directory by default, PostgreSQL by one URL. The schema is brought up to date when
the store is opened (``migrations/``); a database of a newer version is refused. Every change of a sandbox's state is one
compare-and-set row update in one transaction with its entry in the history, so two who race cannot both win.

The store knows rows and nothing of lifecycles; :mod:`sandgate_core.live` holds what it says in memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from sandgate_core import clock, schema
from sandgate_core.locking import DatabaseLock
from sandgate_core.records import NetworkRules, PauseMode, SandboxRecord, Setup
from sandgate_core.states import State
from sandgate_errors import AlreadyExists, Conflict, FailedPrecondition
from sandgate_plugin_api import Resources

__all__ = ["HISTORY_LENGTH", "KEEP_ENDED", "Change", "Piece", "Store"]

#: Entries of history kept with a record.
HISTORY_LENGTH = 100
#: How long the record of an ended sandbox is kept, in microseconds: a week to ask what became of it.
KEEP_ENDED = 7 * 24 * 3600 * clock.MICROSECONDS
#: How long a writer waits for another process that has the database locked, such as a backup.
_BUSY_TIMEOUT_MS = 5_000
_MIGRATIONS = Path(__file__).with_name("migrations")
_ENDED = [state.value for state in State if state.ended]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a sandbox's state; ``at`` in microseconds since 1970."""

    at: int
    came_from: str | None
    to: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Samples of one sandbox, as :mod:`sandgate_core.metrics` packs them; ``at`` is the time of the first."""

    sandbox_id: str
    at: int
    samples: bytes


class Store:
    """An open database. Made by :meth:`open`, ended by :meth:`close`."""

    def __init__(self, engine: AsyncEngine, lock: DatabaseLock | None) -> None:
        self._engine = engine
        self._lock = lock

    @classmethod
    async def open(cls, *, url: str | None, state_dir: Path) -> Self:
        """Connects, brings the schema up to date and forgets what ended long ago.

        Raises FailedPrecondition with one line for the operator, without the password of a URL.
        """
        target = _default_url(state_dir / "sandgate.db") if url is None else _parsed(url)
        async with AsyncExitStack() as undo:
            engine = _engine(target)
            undo.push_async_callback(engine.dispose)
            try:
                lock = await _locked(engine, undo)
                async with engine.begin() as connection:
                    await _bring_up_to_date(connection)
                    await _prune(connection)
            except (SQLAlchemyError, OSError) as error:
                raise FailedPrecondition(
                    f"the database {target.render_as_string()} cannot be used: {_cause(error)}"
                ) from error
            undo.pop_all()
        return cls(engine, lock)

    async def close(self) -> None:
        if self._lock is not None:
            await self._lock.release()
        await self._engine.dispose()

    @property
    def lost(self) -> asyncio.Event | None:
        """Set when another core has this database now; None where that cannot be."""
        return None if self._lock is None else self._lock.lost

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For the tables that have a module of their own (:mod:`sandgate_core.snapshot_table`)."""
        return self._engine.begin()

    # Sandboxes

    async def live(self) -> list[SandboxRecord]:
        """Every record that has not ended."""
        query = sa.select(schema.sandboxes).where(schema.sandboxes.c.state.not_in(_ENDED))
        async with self._engine.connect() as connection:
            return [_record_of(row) for row in (await connection.execute(query)).mappings()]

    async def find(self, sandbox_id: str) -> SandboxRecord | None:
        """The record of any sandbox, ended ones included."""
        query = sa.select(schema.sandboxes).where(schema.sandboxes.c.id == sandbox_id)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else _record_of(row)

    async def spawns(self, owner: str | None) -> dict[tuple[str, str], tuple[int, int]]:
        """By backend and template: how many sandboxes of an owner (None: of all) are on record, and when the last was made."""
        table = schema.sandboxes
        query = sa.select(table.c.backend, table.c.template_id, sa.func.count(), sa.func.max(table.c.created_at))
        query = query.group_by(table.c.backend, table.c.template_id)
        async with self._engine.connect() as connection:
            rows = await connection.execute(query if owner is None else query.where(table.c.owner == owner))
            return {(row[0], row[1]): (row[2], row[3]) for row in rows}

    async def find_by_key(self, owner: str, idempotency_key: str) -> SandboxRecord | None:
        """The record that an owner's create with this key made."""
        table = schema.sandboxes
        query = sa.select(table).where(table.c.owner == owner, table.c.idempotency_key == idempotency_key)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else _record_of(row)

    async def add(self, record: SandboxRecord, *, note: str) -> None:
        """Writes a new record and the beginning of its history.

        Raises AlreadyExists when another record has its idempotency key.
        """
        try:
            async with self._engine.begin() as connection:
                await connection.execute(schema.sandboxes.insert(), _row_of(record))
                await connection.execute(schema.transitions.insert(), _entry(record, came_from=None, note=note))
        except IntegrityError as error:
            if record.idempotency_key is None or await self.find_by_key(record.owner, record.idempotency_key) is None:
                raise
            raise AlreadyExists("a create with this idempotency key exists") from error

    async def move(self, record: SandboxRecord, *, came_from: State, note: str) -> None:
        """Writes ``record`` over its row if the row is still in state ``came_from``. Raises Conflict if not."""
        async with self._engine.begin() as connection:
            await _compare_and_set(connection, record, expected=came_from)
            await connection.execute(schema.transitions.insert(), _entry(record, came_from=came_from, note=note))
            await connection.execute(
                schema.transitions.delete().where(
                    schema.transitions.c.sandbox_id == record.id,
                    schema.transitions.c.revision <= record.revision - HISTORY_LENGTH,
                )
            )

    async def amend(self, record: SandboxRecord) -> None:
        """Writes ``record`` over its row if the row is still in the same state. Raises Conflict if not."""
        async with self._engine.begin() as connection:
            await _compare_and_set(connection, record, expected=record.state)

    async def history(self, sandbox_id: str) -> list[Change]:
        """The kept changes of a sandbox, oldest first."""
        table = schema.transitions
        query = (
            sa.select(table.c.at, table.c.from_state, table.c.to_state, table.c.note)
            .where(table.c.sandbox_id == sandbox_id)
            .order_by(table.c.revision)
        )
        async with self._engine.connect() as connection:
            return [
                Change(at=row[0], came_from=row[1], to=row[2], note=row[3]) for row in await connection.execute(query)
            ]

    # What sandboxes used

    async def measurements(self) -> list[tuple[str, bytes]]:
        """What was kept of each sandbox, in pieces, oldest first."""
        table = schema.measurements
        query = sa.select(table.c.sandbox_id, table.c.samples).order_by(table.c.at)
        async with self._engine.connect() as connection:
            return [(row[0], row[1]) for row in await connection.execute(query)]

    async def keep_measurements(self, pieces: Iterable[Piece], *, instead: Collection[str]) -> None:
        """Adds pieces, in place of all earlier ones for the sandboxes ``instead``; pieces of unknown ones are dropped."""
        table = schema.measurements
        async with self._engine.begin() as connection:
            for sandbox_id in instead:
                await connection.execute(table.delete().where(table.c.sandbox_id == sandbox_id))
            for piece in pieces:
                known = sa.exists().where(schema.sandboxes.c.id == piece.sandbox_id)
                row = sa.select(
                    sa.literal(piece.sandbox_id), sa.literal(piece.at, sa.BigInteger), sa.literal(piece.samples)
                )
                await connection.execute(table.insert().from_select(["sandbox_id", "at", "samples"], row.where(known)))

    # Keys

    async def keys(self) -> list[dict[str, Any]]:
        """Every key that was ever made, revoked ones included."""
        async with self._engine.connect() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(schema.api_keys))).mappings()]

    async def add_key(self, row: Mapping[str, object]) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.api_keys.insert(), dict(row))

    async def revoke_key(self, key_id: str, *, at: int) -> None:
        table = schema.api_keys
        async with self._engine.begin() as connection:
            await connection.execute(
                table.update().where(table.c.id == key_id, table.c.revoked_at.is_(None)).values(revoked_at=at)
            )

    async def rename_key(self, key_id: str, name: str) -> None:
        table = schema.api_keys
        async with self._engine.begin() as connection:
            await connection.execute(table.update().where(table.c.id == key_id).values(name=name))

    async def note_use(self, used: Mapping[str, int]) -> None:
        """When keys were used last, by id."""
        table = schema.api_keys
        async with self._engine.begin() as connection:
            for key_id, at in used.items():
                await connection.execute(table.update().where(table.c.id == key_id).values(last_used_at=at))

    # Teams

    async def teams(self) -> list[dict[str, Any]]:
        async with self._engine.connect() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(schema.teams))).mappings()]

    async def add_team(self, row: Mapping[str, object]) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.teams.insert(), dict(row))

    async def change_team(self, row: Mapping[str, object]) -> None:
        table = schema.teams
        async with self._engine.begin() as connection:
            await connection.execute(table.update().where(table.c.id == row["id"]).values(dict(row)))

    # The audit

    async def add_audit(self, rows: Sequence[Mapping[str, object]]) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.audit.insert(), [dict(row) for row in rows])

    async def audit(
        self, *, key: str, action: str, since: int | None, until: int | None, before: int, limit: int, **equal: str
    ) -> list[dict[str, Any]]:
        """Entries, newest first. ``equal``: columns that must have these values; empty ones do not filter."""
        table = schema.audit
        query = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        query = query.where(*(table.c[name] == value for name, value in equal.items() if value))
        if key:
            query = query.where(sa.or_(table.c.key_id == key, table.c.key_name == key))
        if action:
            query = query.where(
                sa.or_(table.c.action == action, table.c.action.startswith(f"{action}.", autoescape=True))
            )
        if since is not None:
            query = query.where(table.c.at >= since)
        if until is not None:
            query = query.where(table.c.at < until)
        if before:
            query = query.where(table.c.id < before)
        async with self._engine.connect() as connection:
            return [dict(row) for row in (await connection.execute(query)).mappings()]

    async def forget_audit(self, *, before: int) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.audit.delete().where(schema.audit.c.at < before))

    # What a deployment remembers of itself

    async def remembered(self, name: str) -> str | None:
        query = sa.select(schema.meta.c.value).where(schema.meta.c.name == name)
        async with self._engine.connect() as connection:
            value: str | None = (await connection.execute(query)).scalar_one_or_none()
            return value

    async def remember(self, name: str, value: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.meta.delete().where(schema.meta.c.name == name))
            await connection.execute(schema.meta.insert(), {"name": name, "value": value})


async def _compare_and_set(connection: AsyncConnection, record: SandboxRecord, *, expected: State) -> None:
    table = schema.sandboxes
    change = table.update().where(table.c.id == record.id, table.c.state == expected.value).values(_row_of(record))
    if (await connection.execute(change)).rowcount != 1:
        raise Conflict(f"sandbox {record.id} is no longer {expected.value}")


def _entry(record: SandboxRecord, *, came_from: State | None, note: str) -> dict[str, object]:
    return {
        "sandbox_id": record.id,
        "revision": record.revision,
        "at": clock.now(),
        "from_state": None if came_from is None else came_from.value,
        "to_state": record.state.value,
        "note": note,
    }


_SCALARS = [
    field.name
    for field in fields(SandboxRecord)
    if field.name not in {"state", "resources", "network", "pause_mode", "setup"}
]


def _row_of(record: SandboxRecord) -> dict[str, object]:
    return {
        **{name: getattr(record, name) for name in _SCALARS},
        "state": record.state.value,
        "resources": asdict(record.resources),
        "network": None if record.network is None else asdict(record.network),
        "pause_mode": None if record.pause_mode is None else record.pause_mode.value,
        "setup": asdict(record.setup),
    }


def _record_of(row: Mapping[Any, Any]) -> SandboxRecord:
    return SandboxRecord(
        **{name: row[name] for name in _SCALARS},
        state=State(row["state"]),
        resources=Resources(**row["resources"]),
        network=None if row["network"] is None else _network_of(row["network"]),
        pause_mode=None if row["pause_mode"] is None else PauseMode(row["pause_mode"]),
        setup=Setup() if row["setup"] is None else Setup(**row["setup"]),
    )


def _network_of(stored: Mapping[str, Any]) -> NetworkRules:
    return NetworkRules(
        **{**stored, "allow_out": tuple(stored["allow_out"]), "deny_out": tuple(stored["deny_out"])},
    )


def _default_url(path: Path) -> URL:
    try:
        # Made by us, so that nobody else may read it whatever the umask is; SQLite gives its log the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise FailedPrecondition(f"the database {path} cannot be used: {error.strerror}") from error
    return URL.create("sqlite+aiosqlite", database=str(path))


_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
}


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        # Not repeated in the line: what cannot be parsed may hold a password anywhere.
        raise FailedPrecondition(
            "the database URL cannot be read: expected postgresql://user:password@host/name"
        ) from None
    driver = _DRIVERS.get(url.drivername, url.drivername)
    if driver not in _DRIVERS.values():
        raise FailedPrecondition(
            f"databases of kind '{url.drivername}' are not supported: use postgresql:// or sqlite://"
        )
    return url.set(drivername=driver)


def _engine(url: URL) -> AsyncEngine:
    # Statements carry variables and handles of sandboxes: an error's text, which goes to the log, must not.
    options: dict[str, Any] = {"hide_parameters": True}
    if url.get_backend_name() == "sqlite":
        # SQLite has one writer at a time: one connection queues writers in order, where several would take turns by
        # waiting and retrying on a locked file.
        options |= {"pool_size": 1, "max_overflow": 0, "pool_timeout": 60, "poolclass": sa.AsyncAdaptedQueuePool}
    else:
        options |= {"pool_pre_ping": True}
    try:
        engine = create_async_engine(url, **options)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise FailedPrecondition(
            f"the driver for {url.get_backend_name()} is not installed: pip install 'sandgate[postgresql]'"
        ) from error
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine.sync_engine, "connect", _set_up_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _set_up_sqlite(connection: Any, _: object) -> None:
    # The driver would begin transactions by itself, but not before a change of the schema: a migration that is cut off
    # would stay half done. So beginning is ours (_begin_sqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout = {_BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


async def _locked(engine: AsyncEngine, undo: AsyncExitStack) -> DatabaseLock | None:
    """A database that other hosts can reach is this core's alone; an SQLite file is, by the state directory's lock."""
    if engine.dialect.name == "sqlite":
        return None
    lock = DatabaseLock(engine)
    undo.push_async_callback(lock.release)
    await lock.acquire()
    return lock


async def _bring_up_to_date(connection: AsyncConnection) -> None:
    if await _revision(connection) != schema.HEAD:
        await connection.run_sync(_migrate)


async def _revision(connection: AsyncConnection) -> str | None:
    if not await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version")):
        return None
    found: str | None = (
        await connection.execute(sa.text("SELECT version_num FROM alembic_version"))
    ).scalar_one_or_none()
    return found


def _migrate(connection: sa.Connection) -> None:
    # Loaded only where there is something to migrate: it costs a tenth of a second.
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    for revision in MigrationContext.configure(connection).get_current_heads():
        if revision not in known:
            raise FailedPrecondition(
                f"the database was written by a newer version of sandgate (schema '{revision}', this one knows "
                f"'{schema.HEAD}'): upgrade sandgate, or use another state directory"
            )
    command.upgrade(config, "head")


async def _prune(connection: AsyncConnection) -> None:
    await connection.execute(schema.sandboxes.delete().where(schema.sandboxes.c.ended_at < clock.now() - KEEP_ENDED))


def _cause(error: Exception) -> str:
    """The driver's own words, without SQLAlchemy's statement and parameters, in one line."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split()) or type(cause).__name__
