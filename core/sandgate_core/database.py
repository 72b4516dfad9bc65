"""The database behind the store: found by its URL, locked, brought up to date.

SQLite (write-ahead log) in the state directory by default, PostgreSQL by one URL. The schema is brought up to date when
the database is opened (``migrations/``), with no other core on it; a database of a newer version is refused.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from sandgate_core import clock, schema
from sandgate_core.locking import DatabaseLock
from sandgate_core.sqlite_cursors import shorten
from sandgate_errors import FailedPrecondition

__all__ = ["KEEP_ENDED", "NOW", "forget_ended", "opened", "outage_of"]

#: How long the record of an ended sandbox is kept, in microseconds: a week to ask what became of it.
KEEP_ENDED = 7 * 24 * 3600 * clock.MICROSECONDS
#: Records that are removed in one transaction, which holds up everybody else's on SQLite.
_FORGET_AT_ONCE = 100
#: How long the entry of a core that is gone is kept when nothing is its own any more.
_KEEP_CORES = 24 * 3600 * clock.MICROSECONDS
#: How long a writer waits for another process that has the database locked, such as a backup.
_BUSY_TIMEOUT_MS = 5_000
#: The time by PostgreSQL, which all its cores go by, in microseconds since 1970.
NOW = sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * clock.MICROSECONDS, sa.BigInteger)
_MIGRATIONS = Path(__file__).with_name("migrations")


async def opened(*, url: str | None, state_dir: Path, node: str) -> tuple[AsyncEngine, DatabaseLock | None]:
    """The database, up to date, and the lock of the core ``node`` on it; no lock on SQLite, which has one core anyway.

    Raises FailedPrecondition with one line for the operator, without the password of a URL.
    """
    target = _default_url(state_dir / "sandgate.db") if url is None else _parsed(url)
    async with AsyncExitStack() as undo:
        engine = _engine(target)
        undo.push_async_callback(engine.dispose)
        lock: DatabaseLock | None = None
        try:
            if target.get_backend_name() != "sqlite":
                lock = DatabaseLock(engine, node)
                undo.push_async_callback(lock.release)
                # Whoever has it alone may change the schema; afterwards it is held together with the other cores.
                await lock.acquire(alone=lambda: _is_behind(engine))
            await _bring_up_to_date(engine)
            if lock is not None:
                await lock.share()
        except (SQLAlchemyError, OSError) as error:
            raise FailedPrecondition(
                f"the database {target.render_as_string()} cannot be used: {_cause(error)}"
            ) from error
        undo.pop_all()
    return engine, lock


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
        options |= {"pool_reset_on_return": None}
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
        sa.event.listen(engine.sync_engine, "reset", _reset_sqlite)
    else:
        sa.event.listen(engine.sync_engine, "do_connect", _connect)
    return engine


def _connect(dialect: Any, _record: object, arguments: Any, options: Any) -> Any:
    # The driver lets through what its socket says, which nobody could tell from a fault of another kind.
    try:
        return dialect.connect(*arguments, **options)
    except dialect.loaded_dbapi.Error:
        raise
    except Exception as error:
        raise OperationalError("connect", None, error) from error


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _reset_sqlite(connection: Any, _record: object, _state: object) -> None:
    # As the pool does it, which goes to the driver's thread to find that there is nothing to roll back.
    if connection.driver_connection.in_transaction:
        connection.rollback()


def _set_up_sqlite(connection: Any, _: object) -> None:
    # The driver would begin transactions by itself, but not before a change of the schema: a migration that is cut off
    # would stay half done. So beginning is ours (_begin_sqlite).
    connection.isolation_level = None
    shorten(connection.driver_connection)
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout = {_BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


async def _is_behind(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        return await _revision(connection) != schema.HEAD


async def _bring_up_to_date(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        if await _revision(connection) != schema.HEAD:
            await connection.run_sync(_migrate)
        await _forget_cores(connection)


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


async def forget_ended(engine: AsyncEngine) -> None:
    """Remove the records of sandboxes that ended long ago with all that goes with them, a few in each transaction."""
    table = schema.sandboxes
    old = sa.select(table.c.id).where(table.c.ended_at < clock.now() - KEEP_ENDED).limit(_FORGET_AT_ONCE)
    while True:
        async with engine.begin() as connection:
            if (await connection.execute(table.delete().where(table.c.id.in_(old)))).rowcount < _FORGET_AT_ONCE:
                return


async def _forget_cores(connection: AsyncConnection) -> None:
    cores, owners = schema.cores, sa.select(schema.sandboxes.c.core)
    gone = cores.c.lease_end < clock.now() - _KEEP_CORES
    await connection.execute(cores.delete().where(gone, cores.c.id.not_in(owners)))


def outage_of(error: Exception) -> str | None:
    """Why the database cannot be asked now (it is away, locked, full, or hands out no connection), for the log.

    None: the error says nothing of the kind.
    """
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return _cause(error) if lost or isinstance(error, OperationalError | InterfaceError | PoolTimeout) else None


def _cause(error: Exception) -> str:
    """The driver's own words, without SQLAlchemy's statement and parameters, in one line."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split()) or type(cause).__name__
