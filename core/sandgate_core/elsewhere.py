"""Sandboxes of other cores, as the store has them: for questions that any core answers.

Every core writes the store before its memory, so what stands here is never older than what their owner would say. Nothing
is read where the store has one core.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import sqlalchemy as sa

from sandgate_core import schema
from sandgate_core.listing import Query, position_of, shown_state
from sandgate_core.records import SandboxRecord
from sandgate_core.samples import Series
from sandgate_core.states import State
from sandgate_core.store import Store, record_of

__all__ = ["Elsewhere", "Protected"]

_TABLE = schema.sandboxes
#: Rows turned into records between two looks at the other calls: about ten milliseconds of work.
_SLICE = 128
#: Ordered as Python orders them, whatever the database's language is.
_ID = sa.collate(_TABLE.c.id, "C")
_STARTED = sa.func.coalesce(_TABLE.c.started_at, 0)


class Protected(NamedTuple):
    """What the token of a sandbox is made from."""

    id: str
    token_version: int


class Elsewhere:
    """Reads what this core does not hold in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: One at a time: anybody may make this be asked, and it reads a row for each sandbox.
        self._turn = asyncio.Lock()

    async def find(self, sandbox_id: str) -> SandboxRecord | None:
        """The record of a sandbox that has not ended."""
        if not self._store.shared:
            return None
        record = await self._store.find(sandbox_id)
        return None if record is None or record.state.ended else record

    async def for_page(self, query: Query, *, owner: str | None) -> tuple[list[SandboxRecord], int]:
        """What may stand on the page that ``query`` asks for, and how many running ones match it beyond these."""
        if not self._store.shared:
            return [], 0
        wanted = _wanted(query) & self._others(owner)
        rows = sa.select(_TABLE).where(wanted).order_by(*_order(query))
        limited = query.page_size is not None
        if query.page_size is not None:
            rows = rows.where(_after(query)).limit(query.page_size + 1)
        async with self._store.engine.connect() as connection:
            found = list((await connection.execute(rows)).mappings())
            running = 0
            if limited:
                count = sa.select(sa.func.count()).select_from(_TABLE).where(wanted, _TABLE.c.state.in_(_RUNNING))
                running = (await connection.execute(count)).scalar_one()
        records: list[SandboxRecord] = []
        for number, row in enumerate(found):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            records.append(record_of(row))
        if limited:
            running -= sum(shown_state(record.state) is State.RUNNING for record in records)
        return records, running

    async def protected(self) -> list[Protected]:
        """Those that a token protects and that callers may see."""
        if not self._store.shared:
            return []
        query = sa.select(_TABLE.c.id, _TABLE.c.token_version).where(
            self._others(None), _TABLE.c.secure, _TABLE.c.state.in_(_SHOWN)
        )
        async with self._turn, self._store.engine.connect() as connection:
            return [Protected(*row) for row in await connection.execute(query)]

    async def series(self, sandbox_id: str) -> Series:
        """What a sandbox used, as of a minute ago at most."""
        series = Series()
        for packed in await self._store.measurements_of(sandbox_id):
            series.load(packed)
        return series

    def _others(self, owner: str | None) -> sa.ColumnElement[bool]:
        others = _TABLE.c.core != self._store.node
        return others if owner is None else others & (_TABLE.c.owner == owner)


_SHOWN = [state.value for state in State if state.shown]
_RUNNING = [state.value for state in State if state.shown and shown_state(state) is State.RUNNING]


def _wanted(query: Query) -> sa.ColumnElement[bool]:
    states = [
        state.value for state in State if state.shown and (not query.states or shown_state(state) in query.states)
    ]
    wanted: sa.ColumnElement[bool] = _TABLE.c.state.in_(states)
    if query.templates is not None:
        wanted &= _TABLE.c.template_id.in_(query.templates)
    if query.started_after is not None:
        wanted &= sa.literal(query.started_after) <= _STARTED
    for key, value in query.metadata.items():
        wanted &= _has_pair(key, value)
    return wanted


def _has_pair(key: str, value: str) -> sa.ColumnElement[bool]:
    """Whether the metadata have this pair, by their text as it was stored.

    The database's own way into JSON fails for all when one has a NUL in it. Inside a text every quote is escaped, so the
    pair with what stands before it is found nowhere but where it is one.
    """
    pair = f"{json.dumps(key)}: {json.dumps(value)}"
    text = sa.cast(_TABLE.c.metadata, sa.Text)
    return sa.or_(sa.func.strpos(text, f"{{{pair}") > 0, sa.func.strpos(text, f", {pair}") > 0)


def _order(query: Query) -> tuple[sa.UnaryExpression[Any], ...]:
    if query.ascending:
        return _STARTED.asc(), _ID.desc()
    return _STARTED.desc(), _ID.asc()


def _after(query: Query) -> sa.ColumnElement[bool]:
    position = position_of(query)
    if position is None:
        return sa.true()
    started, sandbox_id = -position[0], position[1]
    at_once = sa.literal(started) == _STARTED
    if query.ascending:
        return sa.or_(sa.literal(started) < _STARTED, sa.and_(at_once, sa.literal(sandbox_id) > _ID))
    return sa.or_(sa.literal(started) > _STARTED, sa.and_(at_once, sa.literal(sandbox_id) < _ID))
