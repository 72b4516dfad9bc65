"""One core among those of a database: it joins, says that it lives, sees who has died, and leaves.

The rounds are three to a lease. Each renews the lease first; what else there is to do must not keep the next one waiting.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from typing import Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from sandgate_core.chores import Pause, running
from sandgate_core.lease import Lease
from sandgate_core.records import SandboxRecord
from sandgate_core.roster import Peer, Roster

__all__ = ["Membership", "Takers"]

_ROUNDS = 3
#: Seconds until a renewal is tried again that the database did not take.
_RETRY = 0.5
_log = structlog.get_logger(__name__)


class Takers(Protocol):
    """What the sandboxes of this core do about others'."""

    async def take_over(self, records: Collection[SandboxRecord]) -> None:
        """Adopt what was another core's and is this one's now."""

    async def give_up_lost(self, mine: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Forget the sandboxes that are not among ``mine``, which the store says when it is asked."""


class Membership:
    """Joined by :meth:`join`, ended by :meth:`leave`."""

    def __init__(self, roster: Roster, lease: Lease, *, host: str, lost: asyncio.Event) -> None:
        self._roster = roster
        self._lease = lease
        self._host = host
        self._boot = secrets.token_hex(8)
        self._lost = lost
        self._chores = AsyncExitStack()
        #: Where others reach this core; empty until :meth:`serve`.
        self.address = ""
        #: Whose sandboxes these are; set before they are read.
        self.takers: Takers | None = None
        self._movable: Collection[str] = ()
        self._refresh: Callable[[], Awaitable[None]] | None = None
        #: Whether the last round failed.
        self._silent = False

    async def join(self) -> list[Peer]:
        """From now on others know of this core; the others that live."""
        asked_at = self._lease.clock()
        await self._roster.join(boot=self._boot, host=self._host, seconds=self._lease.seconds)
        self._lease.renewed(asked_at=asked_at)
        # A start may take longer than a lease.
        await self._chores.enter_async_context(running(self._keep))
        return [peer for peer in await self._roster.others() if peer.alive]

    async def serve(
        self,
        address: str,
        *,
        movable: Collection[str],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        """From now on others may call, and this core takes over from those that die.

        ``movable``: backends whose sandboxes any core can reach. ``refresh``: reads what may have changed elsewhere.
        """
        self.address = address
        await self._roster.announce(address, boot=self._boot)
        self._movable, self._refresh = movable, refresh

    def rest(self) -> None:
        """Take nothing over any more: this core is about to leave."""
        self._movable = ()

    async def leave(self) -> None:
        """Nothing is this core's to decide any more: what others can take over, they may."""
        await self._chores.aclose()
        self._lease.given_back()
        try:
            await self._roster.leave(boot=self._boot)
        except (SQLAlchemyError, OSError):
            _log.warning("the lease could not be given back: the other cores wait for its end")

    async def _keep(self, pause: Pause) -> None:
        wait = self._lease.seconds / _ROUNDS
        while await pause(wait):
            try:
                async with asyncio.timeout(self._lease.seconds):
                    if not await self._renewed():
                        return
                    await self._look_around()
                wait = self._lease.seconds / _ROUNDS
                self._silent = False
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                # The lease ends by itself, and what it was for must be taken up again.
                wait = self._failed("the database does not take the renewal of the lease", reason=type(error).__name__)
            except Exception:
                _log.exception("a round among the cores failed")
                wait = self._failed("the lease may not be renewed")

    def _failed(self, what: str, **fields: str) -> float:
        """Seconds until the next attempt. Said once."""
        if not self._silent:
            _log.warning(what, **fields)
        self._silent = True
        return min(_RETRY, self._lease.seconds / _ROUNDS)

    async def _renewed(self) -> bool:
        """False: this core's name is another one's."""
        was_held, asked_at = self._lease.held, self._lease.clock()
        held = await self._roster.renew(boot=self._boot, seconds=self._lease.seconds)
        if held is None:
            _log.error("another core has this one's node id: this one ends")
            self._lost.set()
            return False
        if self.takers is not None and not (held and was_held):
            _log.warning("the lease had ended: looking at what was taken over")
            await self.takers.give_up_lost(self._roster.mine)
        self._lease.renewed(asked_at=asked_at)
        return True

    async def _look_around(self) -> None:
        if self._refresh is not None:
            await self._refresh()
        if not self._movable or self.takers is None:
            return
        for gone in await self._roster.orphaned(self._movable):
            records = await self._roster.take_over(gone.id, self._movable, boot=self._boot)
            if records:
                _log.warning(
                    "taking over from a core that is away", core=gone.id, host=gone.host, sandboxes=len(records)
                )
                await self.takers.take_over(records)
