"""Snapshots in the store: which copies of files are kept, under which ids and names.

A row is one copy. It is written before the backend begins (``making``), becomes ``ready`` with the backend's handle, and is
``deleting`` from the moment nobody may use it any more until the backend has given it up; then it goes. Whatever breaks off
in between leaves a row that says what is left to do (:mod:`sandgate_core.snapshots`).

Only the store knows snapshots, so several cores on one database agree on them. That a copy is under way is known by its
sandbox, which is ``snapshotting`` in the store for as long.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from sandgate_core import schema
from sandgate_core.records import Setup
from sandgate_core.snapshot_names import DEFAULT_TAG, SnapshotName
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_errors import Conflict
from sandgate_plugin_api import Resources

__all__ = ["Place", "SnapshotRecord", "SnapshotState", "SnapshotTable"]

#: Of two that publish the same name at once on PostgreSQL, the second finds it taken and replaces it then.
_PUBLISH_ATTEMPTS = 3
_table = schema.snapshots


class SnapshotState(enum.StrEnum):
    MAKING = "making"
    READY = "ready"
    DELETING = "deleting"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a list a page begins: after this one."""

    created_at: int
    content: str


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """One kept copy. ``created_at`` in microseconds since 1970."""

    #: What the backend knows the copy by.
    content: str
    #: What clients know it by; of a named one it stays when a newer copy takes its place.
    id: str
    owner: str
    backend: str
    #: Empty: it has none, and ``tag`` is empty too.
    name: str
    tag: str
    #: Of what it is a copy.
    sandbox_id: str
    state: SnapshotState
    created_at: int
    resources: Resources
    envs: Mapping[str, str] = field(default_factory=dict, repr=False)
    setup: Setup = field(default_factory=Setup)
    #: The backend's own note; None until it is made.
    handle: Mapping[str, object] | None = None
    #: Whose sandbox it is a copy of, where only that core reaches its files; else empty.
    core: str = ""


class SnapshotTable:
    """The rows, through an open store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def node(self) -> str:
        """The name of the core whose store this is."""
        return self._store.node

    def reaches(self, record: SnapshotRecord) -> bool:
        """Whether this core can do anything with a copy. What a file holds is its own, as with sandboxes."""
        return not self._store.shared or record.core in {"", self.node}

    async def add(self, record: SnapshotRecord) -> None:
        async with self._store.transaction() as connection:
            await connection.execute(_table.insert(), _row_of(record))

    async def publish(self, content: str, *, handle: Mapping[str, object]) -> SnapshotRecord:
        """From making to ready; a copy that had the same name is for deletion from then on, and gives its id.

        Raises Conflict when it is not being made any more.
        """
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                async with self._store.transaction() as connection:
                    return await _publish(connection, content, handle)
            except IntegrityError:
                continue
        raise Conflict("another snapshot took the same name at the same moment, again and again")

    async def give_up(self, content: str) -> None:
        """A copy that is not to be used (any more) is for deletion."""
        async with self._store.transaction() as connection:
            await connection.execute(_moved(_table.c.content == content))

    async def take_out(self, snapshot_id: str, *, owner: str) -> bool:
        """A ready one is for deletion; False when there is none of that id and owner."""
        ready = sa.and_(_table.c.id == snapshot_id, _table.c.owner == owner, _is(SnapshotState.READY))
        async with self._store.transaction() as connection:
            return bool((await connection.execute(_moved(ready))).rowcount)

    async def give_up_abandoned(self) -> None:
        """What was being made when its core stopped is for deletion: no sandbox is being copied for it."""
        copied = sa.exists().where(
            schema.sandboxes.c.id == _table.c.sandbox_id, schema.sandboxes.c.state == State.SNAPSHOTTING.value
        )
        async with self._store.transaction() as connection:
            await connection.execute(_moved(sa.and_(_is(SnapshotState.MAKING), ~copied)))

    async def for_deletion(self) -> list[SnapshotRecord]:
        return await self._all(sa.select(_table).where(_is(SnapshotState.DELETING)))

    async def forget(self, content: str) -> None:
        """The backend has given it up."""
        async with self._store.transaction() as connection:
            await connection.execute(_table.delete().where(_table.c.content == content, _is(SnapshotState.DELETING)))

    async def find(self, wanted: str, name: SnapshotName | None, *, owner: str | None) -> SnapshotRecord | None:
        """The ready one of an id, else of a name; a name without a tag is its `default`. ``owner`` None: anybody's."""
        meant: sa.ColumnElement[bool] = _table.c.id == wanted
        if name is not None:
            meant = sa.or_(meant, sa.and_(_table.c.name == name.name, _table.c.tag == (name.tag or DEFAULT_TAG)))
        query = sa.select(_table).where(meant, _is(SnapshotState.READY))
        found = await self._all(query if owner is None else query.where(_table.c.owner == owner))
        return next((record for record in found if record.id == wanted), None) or next(iter(found), None)

    async def page(
        self,
        *,
        owner: str | None,
        sandbox_id: str,
        wanted: str,
        name: SnapshotName | None,
        after: Place | None,
        limit: int,
    ) -> list[SnapshotRecord]:
        """Ready ones, newest first. Empty filters do not filter."""
        query = sa.select(_table).where(_is(SnapshotState.READY))
        query = query.order_by(_table.c.created_at.desc(), _table.c.content).limit(limit)
        if owner is not None:
            query = query.where(_table.c.owner == owner)
        if sandbox_id:
            query = query.where(_table.c.sandbox_id == sandbox_id)
        if wanted:
            query = query.where(_matches(wanted, name))
        if after is not None:
            created, content = _table.c.created_at, _table.c.content
            query = query.where(
                sa.or_(created < after.created_at, sa.and_(created == after.created_at, content > after.content))
            )
        return await self._all(query)

    async def count(self, owner: str) -> int:
        """Of an owner, those under way included."""
        query = sa.select(sa.func.count()).where(
            _table.c.owner == owner, _table.c.state != SnapshotState.DELETING.value
        )
        async with self._store.transaction() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def _all(self, query: sa.Select[Any]) -> list[SnapshotRecord]:
        async with self._store.transaction() as connection:
            return [_record_of(row) for row in (await connection.execute(query)).mappings()]


async def _publish(connection: AsyncConnection, content: str, handle: Mapping[str, object]) -> SnapshotRecord:
    own = sa.and_(_table.c.content == content, _is(SnapshotState.MAKING))
    row = (await connection.execute(sa.select(_table).where(own))).mappings().one_or_none()
    if row is None:
        raise Conflict("the snapshot was given up while it was being made")
    snapshot_id = row["id"]
    if row["name"]:
        same = sa.and_(
            _table.c.owner == row["owner"],
            _table.c.name == row["name"],
            _table.c.tag == row["tag"],
            _is(SnapshotState.READY),
        )
        earlier = (await connection.execute(sa.select(_table.c.id).where(same))).scalar_one_or_none()
        if earlier is not None:
            snapshot_id = earlier
            await connection.execute(_moved(same))
    change = {"id": snapshot_id, "state": SnapshotState.READY.value, "handle": dict(handle)}
    await connection.execute(_table.update().where(own).values(change))
    return _record_of({**row, **change})


def _matches(wanted: str, name: SnapshotName | None) -> sa.ColumnElement[bool]:
    by_id = _table.c.id == wanted
    if name is None:
        return by_id
    by_name = _table.c.name == name.name
    return sa.or_(by_id, by_name if name.tag is None else sa.and_(by_name, _table.c.tag == name.tag))


def _is(state: SnapshotState) -> sa.ColumnElement[bool]:
    return _table.c.state == state.value


def _moved(which: sa.ColumnElement[bool]) -> sa.Update:
    return _table.update().where(which).values(state=SnapshotState.DELETING.value)


_SCALARS = [item.name for item in fields(SnapshotRecord) if item.name not in {"state", "resources", "setup"}]


def _row_of(record: SnapshotRecord) -> dict[str, object]:
    return {
        **{name: getattr(record, name) for name in _SCALARS},
        "state": record.state.value,
        "resources": asdict(record.resources),
        "setup": asdict(record.setup),
    }


def _record_of(row: Mapping[Any, Any]) -> SnapshotRecord:
    return SnapshotRecord(
        **{name: row[name] for name in _SCALARS},
        state=SnapshotState(row["state"]),
        resources=Resources(**row["resources"]),
        setup=Setup(**row["setup"]),
    )
