"""Sandboxes change hands: what this core takes over from one that died, and what was taken from it while it was away.

What is taken over is put in order as after a restart (:mod:`sandgate_core.recovery`) and only then shown here; until then
callers are told to come back. What another core has taken is forgotten: its channel, its deadline, the next attempt to free
it. Whoever still works on it finds that it is taken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import structlog

from sandgate_core.agents import Agents
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.live import Live, LiveTable
from sandgate_core.metrics import Metrics
from sandgate_core.records import SandboxRecord
from sandgate_core.recovery import Recovery

__all__ = ["Adoption"]

_log = structlog.get_logger(__name__)


class Adoption:
    """Gives and takes. ``taken_up`` is called with each sandbox that is this core's now and rests."""

    def __init__(
        self,
        *,
        table: LiveTable,
        recovery: Recovery,
        expiry: Expiry,
        agents: Agents,
        errands: Errands,
        metrics: Metrics,
        taken_up: Callable[[Live], None],
    ) -> None:
        self._table = table
        self._recovery = recovery
        self._expiry = expiry
        self._agents = agents
        self._errands = errands
        self._metrics = metrics
        self._taken_up = taken_up
        #: This core's by the store, and not in the table yet.
        self._adopting: set[Live] = set()
        table.given_up = self._forget

    async def take_over(self, records: Collection[SandboxRecord]) -> None:
        """Begins to adopt what the store says is this core's now."""
        lives = {Live(record) for record in records}
        self._adopting |= lives
        self._errands.post(self._adopt(lives), "sandboxes could not be taken over")

    async def give_up_lost(self, mine: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Forget the sandboxes that are not among ``mine``, which is asked after the table: what comes later is this core's."""
        known = [*self._table, *self._adopting]
        kept = await mine()
        for live in known:
            if live.record.id not in kept and not live.record.state.ended:
                self._table.give_up(live)

    def _forget(self, live: Live) -> None:
        """Nothing of a sandbox that is another core's is kept; its measurements in the store are that core's too."""
        _log.warning("another core has taken a sandbox over", sandbox=live.record.id)
        self._expiry.drop(live.record.id)
        self._metrics.forget(live.record.id)
        if live.agent is not None:
            self._errands.post(self._agents.forget(live.agent.target), "the channel to an agent could not be closed")

    async def _adopt(self, lives: Collection[Live]) -> None:
        try:
            await self._recovery.take_up(lives)
        finally:
            # Also where something failed: what is in the store as this core's is in its table.
            self._adopting.difference_update(lives)
            self._table.take_in(lives)
            for live in lives:
                if not (live.record.state.ended or live.taken):
                    self._taken_up(live)
        await self._metrics.take_up({live.record.id for live in lives})
