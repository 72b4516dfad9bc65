"""The sandboxes that have not ended, in memory and in the store at once.

The store is written first, then memory follows without another await, so whoever reads memory (Get, List, Locate) never
sees what a crash could take back, and touches no disk. A sandbox's lock is held by whoever changes it; readers take none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sandgate_core import clock
from sandgate_core.records import PauseMode, SandboxRecord
from sandgate_core.states import TRANSITIONS, State
from sandgate_core.store import Store
from sandgate_errors import Conflict
from sandgate_plugin_api import AgentAddress

__all__ = ["JoinedPause", "Live", "LiveTable"]


@dataclass(frozen=True, kw_only=True)
class JoinedPause:
    """A pause by request, what it was asked to keep, and whether only with an agent that answers."""

    mode: PauseMode
    healthy: bool
    task: asyncio.Task[SandboxRecord]


@dataclass(eq=False)
class Live:
    """One sandbox that has not ended, or that ended while somebody still held this object."""

    record: SandboxRecord
    #: Held over every change and the backend's work that belongs to it.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Where its agent is; None until it is known.
    agent: AgentAddress | None = None
    #: The pause that is under way; callers may join it (C39).
    pausing: JoinedPause | None = None
    #: The next attempt to free it, after one that failed.
    retry: asyncio.TimerHandle | None = None


class LiveTable:
    """All of them, by id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_id: dict[str, Live] = {}

    async def load(self) -> None:
        self._by_id = {record.id: Live(record) for record in await self._store.live()}

    def get(self, sandbox_id: str) -> Live | None:
        return self._by_id.get(sandbox_id)

    def __iter__(self) -> Iterator[Live]:
        """A snapshot: the table may change while it is walked."""
        return iter(list(self._by_id.values()))

    def records(self) -> Iterator[SandboxRecord]:
        return (live.record for live in self._by_id.values())

    async def add(self, record: SandboxRecord, *, note: str) -> Live:
        """Write before act: the record is in the store when this returns."""
        await self._store.add(record, note=note)
        live = Live(record)
        self._by_id[record.id] = live
        return live

    async def move(self, live: Live, to: State, *, note: str, **changes: Any) -> None:
        """Bring a sandbox whose lock is held into another state. Raises Conflict when the store was changed meanwhile."""
        before = live.record
        if to not in TRANSITIONS[before.state]:
            raise Conflict(f"sandbox {before.id} is {before.state.value} and cannot become {to.value} now")
        if to.ended:
            changes["ended_at"] = clock.now()
            if before.started_at is None:
                # It came to nothing, so the next attempt with its key is the first one again.
                changes["idempotency_key"] = None
        after = replace(before, state=to, revision=before.revision + 1, **changes)
        await self._store.move(after, came_from=before.state, note=note)
        live.record = after
        if to.ended:
            self._by_id.pop(after.id, None)

    async def amend(self, live: Live, **changes: Any) -> None:
        """Change a record whose lock is held without changing its state. Raises Conflict as :meth:`move` does."""
        after = replace(live.record, **changes)
        await self._store.amend(after)
        live.record = after
