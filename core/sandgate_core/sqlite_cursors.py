"""SQLite's statements, each in one visit to the thread of its driver.

What SQLite does takes microseconds; the way to the driver's thread (aiosqlite) and back takes ten times as long, more where
the machine is busy, and every writer waits for it. Used as the driver means it, a statement goes there four times: to make
a cursor, to execute, to fetch, to close. A cursor made here goes there to execute, and once more for rows where there are any.

Between the driver and SQLAlchemy, of which this is what it asks of a cursor (:pep:`249`, awaited).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Self

import aiosqlite

__all__ = ["Cursor", "shorten"]


def shorten(connection: aiosqlite.Connection) -> None:
    """Have a connection make such cursors."""
    setattr(connection, "cursor", lambda: Cursor(connection))  # noqa: B010 - a method, as far as types go


class Cursor:
    """One statement after another; none is left unfinished when it is closed."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._inner: aiosqlite.Cursor | None = None
        #: Whether there may be rows that nobody has fetched: SQLite then goes on with the statement.
        self._open = False
        self.arraysize = 1

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> Cursor:
        await self.close()
        self._inner = await self._connection.execute(sql, parameters)
        self._open = self.description is not None
        return self

    async def executemany(self, sql: str, parameters: Iterable[Iterable[Any]]) -> Cursor:
        await self.close()
        self._inner = await self._connection.executemany(sql, parameters)
        return self

    async def fetchall(self) -> Sequence[Any]:
        rows: Sequence[Any] = [] if self._inner is None else list(await self._inner.fetchall())
        self._open = False
        return rows

    async def close(self) -> None:
        """What has come to its end is closed already."""
        if self._open and self._inner is not None:
            await self._inner.close()
        self._open = False

    @property
    def description(self) -> Any:
        return None if self._inner is None else self._inner.description

    @property
    def rowcount(self) -> int:
        return -1 if self._inner is None else self._inner.rowcount

    @property
    def lastrowid(self) -> int | None:
        return None if self._inner is None else self._inner.lastrowid
