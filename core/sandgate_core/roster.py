"""Which cores a database has, until when each is known to live, and which sandbox is whose: the SQL of it.

PostgreSQL only. All times are the database's own, so that clocks of hosts may differ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from sandgate_core import clock, schema
from sandgate_core.database import NOW
from sandgate_core.records import SandboxRecord
from sandgate_core.states import State
from sandgate_core.store import Store, record_of, unended

__all__ = ["Owner", "Peer", "Roster"]

_CORES = schema.cores
_SANDBOXES = schema.sandboxes
_ALIVE = sa.func.coalesce(_CORES.c.lease_end > NOW, sa.false())


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another core."""

    id: str
    #: Empty while it starts.
    address: str
    host: str
    alive: bool


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a sandbox is that has not ended, and what is known of it."""

    core: Peer
    team: str
    state: State
    backend: str


class Roster:
    """The cores of one database, as the core that has it open sees them."""

    def __init__(self, store: Store) -> None:
        self._engine = store.engine
        self._node = store.node

    async def join(self, *, boot: str, host: str, seconds: float) -> None:
        """An earlier entry of this node is replaced: the database's lock says that its core is gone."""
        values = {"address": "", "host": host, "boot": boot, "lease_end": _end(seconds)}
        entry = insert(_CORES).values(id=self._node, **values)
        async with self._engine.begin() as connection:
            await connection.execute(entry.on_conflict_do_update(index_elements=[_CORES.c.id], set_=values))

    async def announce(self, address: str, *, boot: str) -> None:
        """Others reach this core at ``address`` from now on."""
        async with self._engine.begin() as connection:
            await connection.execute(_CORES.update().where(*self._mine(boot)).values(address=address))

    async def renew(self, *, boot: str, seconds: float) -> bool | None:
        """Whether the lease had held until now; None: another core has this node's name."""
        async with self._engine.begin() as connection:
            held = (
                await connection.execute(sa.select(_ALIVE).where(*self._mine(boot)).with_for_update())
            ).scalar_one_or_none()
            if held is None:
                return None
            await connection.execute(_CORES.update().where(*self._mine(boot)).values(lease_end=_end(seconds)))
            return bool(held)

    async def leave(self, *, boot: str) -> None:
        """The lease is over; the entry stays for as long as sandboxes are this core's."""
        async with self._engine.begin() as connection:
            await connection.execute(_CORES.update().where(*self._mine(boot)).values(lease_end=0))

    async def others(self) -> list[Peer]:
        query = _peers().where(_CORES.c.id != self._node)
        async with self._engine.connect() as connection:
            return [Peer(**row) for row in (await connection.execute(query)).mappings()]

    async def find(self, core: str) -> Peer | None:
        query = _peers().where(_CORES.c.id == core)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else Peer(**row)

    async def lives(self, core: str) -> bool:
        query = sa.select(_ALIVE).where(_CORES.c.id == core)
        async with self._engine.connect() as connection:
            return bool((await connection.execute(query)).scalar_one_or_none())

    async def owner_of(self, sandbox_id: str) -> Owner | None:
        """None for an unknown or ended one."""
        query = (
            sa.select(_SANDBOXES.c.core, _SANDBOXES.c.owner, _SANDBOXES.c.state, _SANDBOXES.c.backend)
            .add_columns(_CORES.c.address, _CORES.c.host, _ALIVE.label("alive"))
            .select_from(_SANDBOXES.outerjoin(_CORES, _CORES.c.id == _SANDBOXES.c.core))
            .where(_SANDBOXES.c.id == sandbox_id, unended())
        )
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        if row is None:
            return None
        core = Peer(id=row["core"], address=row["address"] or "", host=row["host"] or "?", alive=row["alive"])
        return Owner(core=core, team=row["owner"], state=State(row["state"]), backend=row["backend"])

    async def mine(self) -> set[str]:
        """Ids of this core's sandboxes that have not ended."""
        query = sa.select(_SANDBOXES.c.id).where(_SANDBOXES.c.core == self._node, unended())
        async with self._engine.connect() as connection:
            return set((await connection.execute(query)).scalars())

    async def theirs(self, sandbox_ids: Collection[str]) -> set[str]:
        """Which of these are sandboxes of other cores and have not ended."""
        query = sa.select(_SANDBOXES.c.id).where(
            _SANDBOXES.c.id.in_(sandbox_ids), _SANDBOXES.c.core != self._node, unended()
        )
        async with self._engine.connect() as connection:
            return set((await connection.execute(query)).scalars())

    async def orphaned(self, backends: Collection[str]) -> list[Peer]:
        """Cores that are gone and whose sandboxes in these backends have not ended."""
        left = sa.exists().where(_SANDBOXES.c.core == _CORES.c.id, _SANDBOXES.c.backend.in_(backends), unended())
        query = _peers().where(_CORES.c.id != self._node, sa.not_(_ALIVE), left)
        async with self._engine.connect() as connection:
            return [Peer(**row) for row in (await connection.execute(query)).mappings()]

    async def take_over(self, core: str, backends: Collection[str], *, boot: str) -> list[SandboxRecord]:
        """The sandboxes of a core that is gone, in these backends: they are this core's now. None where it came back.

        The rows of both cores are held, so neither renews its lease or loses it while this is decided.
        """
        gone = sa.select(_CORES.c.id).where(_CORES.c.id == core, sa.not_(_ALIVE))
        here = sa.select(_CORES.c.id).where(*self._mine(boot), _ALIVE)
        taken = (
            _SANDBOXES.update()
            .where(_SANDBOXES.c.core == core, _SANDBOXES.c.backend.in_(backends), unended())
            .values(core=self._node)
            .returning(_SANDBOXES)
        )
        async with self._engine.begin() as connection:
            # In one order everywhere, so that two cores that take from one another do not wait for one another.
            for entry in (here, gone) if self._node < core else (gone, here):
                if (await connection.execute(entry.with_for_update())).first() is None:
                    return []
            return [record_of(row) for row in (await connection.execute(taken)).mappings()]

    def _mine(self, boot: str) -> tuple[sa.ColumnElement[bool], ...]:
        return _CORES.c.id == self._node, _CORES.c.boot == boot


def _peers() -> sa.Select[tuple[str, str, str, bool]]:
    return sa.select(_CORES.c.id, _CORES.c.address, _CORES.c.host, _ALIVE.label("alive"))


def _end(seconds: float) -> sa.ColumnElement[int]:
    return NOW + round(seconds * clock.MICROSECONDS)
