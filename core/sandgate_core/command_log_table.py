"""What commands wrote, in the store: pieces of some lines each, compressed.

A piece is written once and never changed; pieces go whole, the oldest first. With each stands which line of which journal
of the agent was its last, so that a core that starts again takes up exactly where the store ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from sandgate_core import schema
from sandgate_core.store import Store

__all__ = ["CommandLogTable", "Line", "Piece", "Position"]

_table = schema.command_logs
#: Pieces that are read together.
_AT_ONCE = 16


class Line(NamedTuple):
    """``at`` in microseconds since 1970; ``stream`` is empty for a remark of the gateway's own."""

    at: int
    pid: int
    tag: str
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Position:
    """Up to where an agent's journal is known, and the time of the last line."""

    journal: int = 0
    number: int = 0
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Lines of one sandbox, in the order of time; ``size`` in bytes, before compression."""

    sandbox_id: str
    number: int
    lines: Sequence[Line]
    size: int
    end: Position


class CommandLogTable:
    """The rows, through an open store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, pieces: Collection[Piece]) -> None:
        """In one transaction; pieces of unknown sandboxes are dropped."""
        async with self._store.transaction() as connection:
            for piece in pieces:
                known = sa.exists().where(schema.sandboxes.c.id == piece.sandbox_id)
                row = _row_of(piece)
                values = [sa.literal(value, _table.c[name].type) for name, value in row.items()]
                await connection.execute(_table.insert().from_select(list(row), sa.select(*values).where(known)))

    async def end_of(self, sandbox_id: str) -> tuple[Position, list[tuple[int, int]]]:
        """Up to where the journal of a sandbox is stored, and the number and size of its pieces, oldest first."""
        columns = (_table.c.number, _table.c.size, _table.c.journal, _table.c.last_line, _table.c.last_at)
        query = sa.select(*columns).where(_table.c.sandbox_id == sandbox_id).order_by(_table.c.number)
        async with self._store.transaction() as connection:
            rows = list(await connection.execute(query))
        if not rows:
            return Position(), []
        _, _, journal, number, at = rows[-1]
        return Position(journal=journal, number=number, at=at), [(row[0], row[1]) for row in rows]

    async def merge(self, sandbox_id: str, *, first: int, last: int) -> None:
        """Make one piece, the last, of those from ``first`` to ``last``."""
        mine = sa.and_(_table.c.sandbox_id == sandbox_id, _table.c.number.between(first, last))
        async with self._store.transaction() as connection:
            rows = list((await connection.execute(sa.select(_table).where(mine).order_by(_table.c.number))).mappings())
            if not rows:
                return
            lines = [line for row in rows for line in _lines_of(row["lines"])]
            whole = {
                **rows[-1],
                "first_at": rows[0]["first_at"],
                "size": sum(row["size"] for row in rows),
                "lines": _packed(lines),
            }
            await connection.execute(_table.delete().where(mine))
            await connection.execute(_table.insert(), whole)

    async def drop(self, sandbox_id: str, *, up_to: int) -> None:
        async with self._store.transaction() as connection:
            await connection.execute(_table.delete().where(_table.c.sandbox_id == sandbox_id, _table.c.number <= up_to))

    async def forget(self, *, before: int) -> None:
        """Pieces that ended before this time, of all sandboxes."""
        async with self._store.transaction() as connection:
            await connection.execute(_table.delete().where(_table.c.last_at < before))

    async def pieces(
        self, sandbox_id: str, *, since: int | None, until: int | None, backward: bool
    ) -> AsyncIterator[list[Line]]:
        """The lines of each piece that may have some of this time, in the order asked for; a few pieces at a time."""
        last: int | None = None
        while True:
            query = sa.select(_table.c.number, _table.c.lines).where(_table.c.sandbox_id == sandbox_id)
            if since is not None:
                query = query.where(_table.c.last_at >= since)
            if until is not None:
                query = query.where(_table.c.first_at <= until)
            if last is not None:
                query = query.where(_table.c.number < last if backward else _table.c.number > last)
            query = query.order_by(_table.c.number.desc() if backward else _table.c.number).limit(_AT_ONCE)
            async with self._store.transaction() as connection:
                rows = list(await connection.execute(query))
            for number, packed in rows:
                lines = _lines_of(packed)
                yield lines[::-1] if backward else lines
                last = number
            if len(rows) < _AT_ONCE:
                return


def _row_of(piece: Piece) -> dict[str, object]:
    return {
        "sandbox_id": piece.sandbox_id,
        "number": piece.number,
        "first_at": piece.lines[0].at,
        "last_at": piece.lines[-1].at,
        "journal": piece.end.journal,
        "last_line": piece.end.number,
        "size": piece.size,
        "lines": _packed(piece.lines),
    }


def _packed(lines: Sequence[Line]) -> bytes:
    return zlib.compress(json.dumps(lines, separators=(",", ":")).encode(), 1)


def _lines_of(packed: bytes) -> list[Line]:
    return [Line(*fields) for fields in json.loads(zlib.decompress(packed))]
