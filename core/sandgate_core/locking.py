"""The locks that keep a core alone: on its state directory, and under its name on a database that it shares with others.

Two cores of one name would each hold half the truth about the same sandboxes in memory. Both locks are somebody else's to
free (the kernel's flock, an advisory lock of a PostgreSQL session), so they are free again when their holder is gone,
however it went. A new core waits a little for a predecessor that is still ending.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
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
#: What all cores of a database hold together, and alone who changes its schema: "sandgate" in ASCII. Versions that had a
#: database for one core held it alone all the time, so they and this one keep each other out.
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
    """One core per node id on a PostgreSQL database: an advisory lock, held by a session of its own.

    The session is watched, since the server frees the lock when it ends. It is taken anew then; if another core was
    faster, :attr:`lost` is set, and this core must end without touching what is the other's now. Until it has noticed, the
    compare-and-set of the store keeps both from making the same change.
    """

    def __init__(self, engine: AsyncEngine, node: str) -> None:
        self._engine = engine
        self._node = node
        self._number = int.from_bytes(hashlib.sha256(f"sandgate {node}".encode()).digest()[:8], "big", signed=True)
        self._session: AsyncConnection | None = None
        self._watch = AsyncExitStack()
        self._alone = False
        #: Set when another core has this one's name.
        self.lost = asyncio.Event()

    async def acquire(self, *, alone: Callable[[], Awaitable[bool]]) -> None:
        """Waits for a predecessor as :func:`state_lock` does; ``alone``: whether no other core may be there, of any name.

        Raises FailedPrecondition, and the database's own errors. :meth:`share` comes next.
        """
        refusal = await self._take(alone)
        if refusal is not None:
            raise FailedPrecondition(refusal)

    async def share(self) -> None:
        """Let other cores in, and begin to watch the session."""
        if self._alone:
            # Both at once for a moment, which one session may: no other core comes between.
            await self._try("pg_try_advisory_lock_shared", _ADVISORY)
            await self._try("pg_advisory_unlock", _ADVISORY)
            self._alone = False
        await self._watch.enter_async_context(running(self._keep))

    async def release(self) -> None:
        await self._watch.aclose()
        await self._drop()

    async def _take(self, alone: Callable[[], Awaitable[bool]]) -> str | None:
        """None, or why it cannot be had."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        # Not from the pool: a session that goes back there would keep the lock.
        self._session = await self._engine.connect()
        await self._session.execution_options(isolation_level="AUTOCOMMIT")
        named = False
        while True:
            # What another core does meanwhile may change the answer.
            self._alone = await alone()
            named = named or await self._try("pg_try_advisory_lock", self._number)
            if named and await self._try(
                "pg_try_advisory_lock" if self._alone else "pg_try_advisory_lock_shared", _ADVISORY
            ):
                return None
            if loop.time() >= deadline:
                await self._drop()
                return self._refusal(named=named)
            await asyncio.sleep(_PAUSE)

    def _refusal(self, *, named: bool) -> str:
        if not named:
            return (
                f"another core uses this database under the same node id, {self._node}: it was started on a copy of this "
                "state directory. Stop its gateway, or give this one a state directory of its own"
            )
        if self._alone:
            return (
                "the database has the schema of another version of sandgate, and other cores use this database: "
                "stop their gateways first, or install their version here"
            )
        return "another core uses this database alone, as earlier versions of sandgate did: stop its gateway first"

    async def _try(self, function: str, number: int) -> bool:
        assert self._session is not None  # noqa: S101 - it is there from _take to _drop
        query = sa.select(getattr(sa.func, function)(sa.cast(number, sa.BigInteger)))
        return bool((await self._session.execute(query)).scalar_one())

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
                if await self._take(_never) is None:
                    return True
                _log.error("another core has taken this one's name: this one ends", node=self._node)
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


async def _never() -> bool:
    return False
