"""The locks that keep a core alone: on its state directory, and on a database that others can reach too.

Two cores on one store would each hold half the truth in memory. Both locks are somebody else's to free (the kernel's
flock, an advisory lock of a PostgreSQL session), so they are free again when their holder is gone, however it went. A new
core waits a little for a predecessor that is still ending.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sandgate_core.chores import Pause, running
from sandgate_errors import FailedPrecondition

__all__ = ["DatabaseLock", "state_lock"]

_PATIENCE = 10.0
_PAUSE = 0.05
#: Seconds between two looks at the session that holds a database's lock, and the longest that one may take.
_LOOK = 5.0
_ANSWER = 10.0
#: Seconds between two attempts to reach a database that is down.
_RECONNECT = 0.5
#: Any number that no other program uses for its advisory locks: "sandgate" in ASCII.
_ADVISORY = 0x73616E6467617465
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def state_lock(state_dir: Path, *, patience: float = _PATIENCE) -> AsyncIterator[None]:
    """Holds the lock while the block runs. Raises FailedPrecondition after ``patience`` seconds."""
    descriptor = os.open(state_dir / "core.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _acquire(descriptor, state_dir, patience)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


async def _acquire(descriptor: int, state_dir: Path, patience: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise FailedPrecondition(f"another core uses the state directory {state_dir} (pid {holder})") from None
        await asyncio.sleep(_PAUSE)


class DatabaseLock:
    """One core per PostgreSQL database: an advisory lock, held by a session of its own.

    The session is watched, since the server frees the lock when it ends. It is taken anew then; if another core was
    faster, :attr:`lost` is set, and this core must end without touching what is the other's now. Until it has noticed, the
    compare-and-set of the store keeps both from making the same change.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._session: AsyncConnection | None = None
        self._watch = AsyncExitStack()
        #: Set when another core has the database.
        self.lost = asyncio.Event()

    async def acquire(self) -> None:
        """Waits for a predecessor as :func:`state_lock` does. Raises FailedPrecondition, and the database's own errors."""
        if not await self._take():
            raise FailedPrecondition(
                "another core uses this database: stop its gateway first, or give this one a database of its own"
            )
        await self._watch.enter_async_context(running(self._keep))

    async def release(self) -> None:
        await self._watch.aclose()
        await self._drop()

    async def _take(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        # Not from the pool: a session that goes back there would keep the lock.
        self._session = await self._engine.connect()
        await self._session.execution_options(isolation_level="AUTOCOMMIT")
        while True:
            if (await self._session.execute(sa.select(sa.func.pg_try_advisory_lock(_ADVISORY)))).scalar_one():
                return True
            if loop.time() >= deadline:
                await self._drop()
                return False
            await asyncio.sleep(_PAUSE)

    async def _keep(self, pause: Pause) -> None:
        while await pause(_LOOK):
            if await self._holds():
                continue
            _log.warning("the session that holds the database's lock has ended")
            await self._drop()
            if not await self._retaken(pause):
                return

    async def _holds(self) -> bool:
        assert self._session is not None  # noqa: S101 - acquired before it is watched
        try:
            async with asyncio.timeout(_ANSWER):
                await self._session.execute(sa.select(1))
            return True
        except (SQLAlchemyError, OSError, TimeoutError):
            return False

    async def _retaken(self, pause: Pause) -> bool:
        """False: another core has it, or it is time to end."""
        while await pause(_RECONNECT):
            try:
                if await self._take():
                    return True
                _log.error("another core has taken the database over: this one ends")
                self.lost.set()
                return False
            except (SQLAlchemyError, OSError):
                # Down for everybody: nobody else can have it either.
                await self._drop()
        return False

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            async with asyncio.timeout(_ANSWER):
                # The lock goes with the connection, so it must not return to the pool.
                await session.invalidate()
                await session.close()
        except (SQLAlchemyError, OSError, TimeoutError):
            _log.warning("a session of the database could not be closed in order")
