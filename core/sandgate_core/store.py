"""The store: what the core must not forget, in SQL.

One file of SQLite, or a PostgreSQL database that several cores share (:mod:`sandgate_core.database`). Every change of a
sandbox is one compare-and-set row update, of its state and of the core whose it is, in one transaction with its entry in the
history, so two who race cannot both win.

The store knows rows and nothing of lifecycles; :mod:`sandgate_core.live` holds what it says in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sandgate_core import clock, counting, database, schema
from sandgate_core.chores import Pause
from sandgate_core.database import KEEP_ENDED
from sandgate_core.locking import DatabaseLock
from sandgate_core.node import node_of
from sandgate_core.records import NetworkRules, PauseMode, SandboxRecord, Setup, Use
from sandgate_core.states import State
from sandgate_errors import AlreadyExists, Conflict
from sandgate_plugin_api import Resources

__all__ = ["HISTORY_LENGTH", "KEEP_ENDED", "Change", "Piece", "Store", "record_of", "unended"]

#: Entries of history kept with a record.
HISTORY_LENGTH = 100
#: Seconds between two looks for what ended long ago.
_FORGET = 3600.0
_log = structlog.get_logger(__name__)


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

    def __init__(self, engine: AsyncEngine, lock: DatabaseLock | None, node: str) -> None:
        self.engine = engine
        #: The node id of the core that has it open.
        self.node = node
        self._engine = engine
        self._lock = lock

    @classmethod
    async def open(cls, *, url: str | None, state_dir: Path) -> Self:
        """Connects and brings the schema up to date.

        Raises FailedPrecondition with one line for the operator, without the password of a URL.
        """
        node = node_of(state_dir)
        engine, lock = await database.opened(url=url, state_dir=state_dir, node=node)
        return cls(engine, lock, node)

    async def close(self) -> None:
        if self._lock is not None:
            await self._lock.release()
        await self._engine.dispose()

    @property
    def shared(self) -> bool:
        """Whether other cores may have the same database open."""
        return self._lock is not None

    @property
    def lost(self) -> asyncio.Event | None:
        """Set when another core has this one's name now; None where that cannot be."""
        return None if self._lock is None else self._lock.lost

    async def forgetting(self, pause: Pause) -> None:
        """The chore that forgets sandboxes that ended long ago."""
        while True:
            try:
                await database.forget_ended(self._engine)
            except Exception:
                _log.exception("the records of ended sandboxes could not be removed")
            if not await pause(_FORGET):
                return

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For tables that have a module of their own."""
        return self._engine.begin()

    # Sandboxes

    async def live(self) -> list[SandboxRecord]:
        """Every record that has not ended, of all cores."""
        query = sa.select(schema.sandboxes).where(unended())
        async with self._engine.connect() as connection:
            return [record_of(row) for row in (await connection.execute(query)).mappings()]

    async def claim(self) -> list[SandboxRecord]:
        """This core's records that have not ended; those that are nobody's are its own from now on.

        An SQLite file has one core, so whatever it holds is its own, whichever state directory it came from.
        """
        table = schema.sandboxes
        free = table.c.core == "" if self.shared else table.c.core != self.node
        mine = sa.select(table).where(table.c.core == self.node, unended())
        async with self._engine.begin() as connection:
            await connection.execute(table.update().where(free, unended()).values(core=self.node))
            return [record_of(row) for row in (await connection.execute(mine)).mappings()]

    async def find(self, sandbox_id: str) -> SandboxRecord | None:
        """The record of any sandbox, ended ones included."""
        query = sa.select(schema.sandboxes).where(schema.sandboxes.c.id == sandbox_id)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else record_of(row)

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
        return None if row is None else record_of(row)

    async def add(self, record: SandboxRecord, *, note: str, admit: Callable[[Use], None] | None = None) -> None:
        """Writes a new record and the beginning of its history.

        ``admit`` hears what the owner has already, and may raise; no other record of this owner comes in between.
        Raises AlreadyExists when another record has its idempotency key.
        """
        try:
            async with self._engine.begin() as connection:
                if admit is not None:
                    admit(await counting.use_of(connection, record.owner))
                await connection.execute(schema.sandboxes.insert(), _row_of(record))
                await connection.execute(schema.transitions.insert(), _entry(record, came_from=None, note=note))
        except IntegrityError as error:
            if record.idempotency_key is None or await self.find_by_key(record.owner, record.idempotency_key) is None:
                raise
            raise AlreadyExists("a create with this idempotency key exists") from error

    async def retract(self, sandbox_ids: Collection[str]) -> None:
        """Takes out new records, if they were written: nothing has been done for them yet."""
        table = schema.sandboxes
        new = (table.c.id.in_(sandbox_ids), table.c.state == State.CREATING.value, table.c.core == self.node)
        async with self._engine.begin() as connection:
            await connection.execute(table.delete().where(*new))

    async def move(self, record: SandboxRecord, *, came_from: State, note: str) -> None:
        """Writes ``record`` over its row if the row is still in state ``came_from``. Raises Conflict if not."""
        async with self._engine.begin() as connection:
            await _compare_and_set(connection, record, expected=came_from)
            await connection.execute(schema.transitions.insert(), _entry(record, came_from=came_from, note=note))
            if record.revision >= HISTORY_LENGTH:
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

    async def take_token(self, team: str, *, rate: int) -> float | None:
        """One create of a team that may have ``rate`` a minute: None, or seconds until it may. For shared stores."""
        async with self._engine.begin() as connection:
            return await counting.take_token(connection, team, rate=rate)

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
        """What was kept of each sandbox of this core, in pieces, oldest first."""
        table, sandboxes = schema.measurements, schema.sandboxes
        mine = sa.select(sandboxes.c.id).where(sandboxes.c.core == self.node, unended())
        query = sa.select(table.c.sandbox_id, table.c.samples).where(table.c.sandbox_id.in_(mine)).order_by(table.c.at)
        async with self._engine.connect() as connection:
            return [(row[0], row[1]) for row in await connection.execute(query)]

    async def measurements_of(self, sandbox_id: str) -> list[bytes]:
        """The same of one sandbox, whosever it is."""
        table = schema.measurements
        query = sa.select(table.c.samples).where(table.c.sandbox_id == sandbox_id).order_by(table.c.at)
        async with self._engine.connect() as connection:
            return list((await connection.execute(query)).scalars())

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
        """Raises AlreadyExists for one that is there."""
        await self._insert(schema.api_keys, row)

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
                # Another core may have seen it later.
                earlier = sa.or_(table.c.last_used_at.is_(None), table.c.last_used_at < at)
                await connection.execute(table.update().where(table.c.id == key_id, earlier).values(last_used_at=at))

    # Teams

    async def teams(self) -> list[dict[str, Any]]:
        async with self._engine.connect() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(schema.teams))).mappings()]

    async def add_team(self, row: Mapping[str, object]) -> None:
        """Raises AlreadyExists for one that is there."""
        await self._insert(schema.teams, row)

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

    async def agree(self, name: str, value: str) -> str:
        """What stands under ``name``: ``value``, unless another core was faster."""
        try:
            await self._insert(schema.meta, {"name": name, "value": value})
        except AlreadyExists:
            return await self.remembered(name) or value
        return value

    async def _insert(self, table: sa.Table, row: Mapping[str, object]) -> None:
        try:
            async with self._engine.begin() as connection:
                await connection.execute(table.insert(), dict(row))
        except IntegrityError as error:
            raise AlreadyExists("it is in the store already") from error

    async def remember(self, name: str, value: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(schema.meta.delete().where(schema.meta.c.name == name))
            await connection.execute(schema.meta.insert(), {"name": name, "value": value})


#: Made once, since it is what the store does most: making it for its thirty columns takes longer than SQLite does.
_UPDATE = schema.sandboxes.update().where(
    schema.sandboxes.c.id == sa.bindparam("was_id"),
    schema.sandboxes.c.state == sa.bindparam("was_state"),
    schema.sandboxes.c.core == sa.bindparam("was_core"),
)


async def _compare_and_set(connection: AsyncConnection, record: SandboxRecord, *, expected: State) -> None:
    unchanged = {"was_id": record.id, "was_state": expected.value, "was_core": record.core}
    if (await connection.execute(_UPDATE, {**_row_of(record), **unchanged})).rowcount != 1:
        raise Conflict(f"sandbox {record.id} is no longer {expected.value}")


def unended() -> sa.ColumnElement[bool]:
    return schema.sandboxes.c.state.not_in([state.value for state in State if state.ended])


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


def record_of(row: Mapping[Any, Any]) -> SandboxRecord:
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
