"""What teams have and how often they create, counted in the store, where several cores share it.

In PostgreSQL only: a core that is alone counts in memory (:mod:`sandgate_core.quotas`).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from sandgate_core import clock, schema
from sandgate_core.database import NOW
from sandgate_core.records import Use
from sandgate_core.states import State

__all__ = ["take_token", "use_of"]

_MINUTE = 60 * clock.MICROSECONDS


async def use_of(connection: AsyncConnection, team: str) -> Use:
    """What a team has on all cores. Until the transaction ends no other core counts the same team."""
    teams, table = schema.teams, schema.sandboxes
    await connection.execute(sa.select(teams.c.id).where(teams.c.id == team).with_for_update())
    ended = [state.value for state in State if state.ended]
    query = sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(table.c.resources["cpu_count"].as_integer()), 0),
        sa.func.coalesce(sa.func.sum(table.c.resources["memory_mb"].as_integer()), 0),
    ).where(table.c.owner == team, table.c.state.not_in(ended))
    sandboxes, cpus, memory_mb = (await connection.execute(query)).one()
    return Use(int(sandboxes), int(cpus), int(memory_mb))


async def take_token(connection: AsyncConnection, team: str, *, rate: int) -> float | None:
    """One create of a team that has ``rate`` of them a minute, at least one. None, or seconds until the next is due."""
    table = schema.create_rates
    refilled = sa.func.least(float(rate), table.c.tokens + sa.cast(NOW - table.c.at, sa.Double) * rate / _MINUTE)
    first = insert(table).values(team=team, tokens=float(rate - 1), at=NOW)
    take = first.on_conflict_do_update(
        index_elements=[table.c.team], set_={"tokens": refilled - 1, "at": NOW}, where=refilled >= 1
    ).returning(table.c.tokens)
    if (await connection.execute(take)).first() is not None:
        return None
    left: float = (await connection.execute(sa.select(refilled).where(table.c.team == team))).scalar_one()
    return max(0.0, 1 - left) * 60 / rate
