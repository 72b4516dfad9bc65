"""The sandboxes that have not ended, in memory and in the store at once.

The store is written first, then memory follows without another await, so whoever reads memory (Get, List, Locate) never
sees what a crash could take back, and touches no disk. A sandbox's lock is held by whoever changes it; readers take none.

Where several cores share the store, these are the sandboxes that are this core's. A change needs the lease, before the
write and after it: what follows the write is the backend's deed, and another core may have taken the sandbox over while the
write was under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sandgate_core import clock
from sandgate_core.callers import Caller
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.ordering import Ordering
from sandgate_core.records import PauseMode, SandboxRecord, Use
from sandgate_core.states import TRANSITIONS, State
from sandgate_core.store import Store
from sandgate_errors import Conflict, SandboxNotFound, Unavailable
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
    #: It is another core's now, so nothing of it is to be touched here.
    taken: bool = False


class LiveTable:
    """All of them, by id."""

    def __init__(self, store: Store, *, may_act: Callable[[], None] = lambda: None) -> None:
        """``may_act`` raises when another core may act in this one's place."""
        self._store = store
        self._may_act = may_act
        self._by_id: dict[str, Live] = {}
        #: Their records as lists show them.
        self.ordering = Ordering()
        #: Told of every change of state, after it: the record, the state it came from (None: it is new) and why.
        self.changed: Callable[[SandboxRecord, State | None, str], None] = lambda _record, _came_from, _note: None
        #: Told of every sandbox that is another core's now, after it.
        self.given_up: Callable[[Live], None] = lambda _live: None

    async def load(self) -> None:
        self.take_in(Live(record) for record in await self._store.claim())

    def take_in(self, lives: Iterable[Live]) -> None:
        """Sandboxes that are this core's from now on, but for those that have ended or gone on to another one meanwhile."""
        for live in lives:
            if not (live.record.state.ended or live.taken):
                self._by_id[live.record.id] = live
                self.ordering.put(live.record)

    def give_up(self, live: Live) -> None:
        """Another core has it: whoever still holds this object changes nothing any more."""
        if live.taken:
            return
        live.taken = True
        if live.retry is not None:
            live.retry.cancel()
        self._forget(live)
        self.given_up(live)

    def get(self, sandbox_id: str) -> Live | None:
        return self._by_id.get(sandbox_id)

    def find(self, sandbox_id: str, caller: Caller) -> Live:
        """A sandbox of the caller's that has not ended, in any state. Raises InvalidArgument, SandboxNotFound (S12)."""
        name = parse_sandbox_id(sandbox_id)
        live = self._by_id.get(name)
        if live is None or not caller.sees(live.record.owner):
            raise SandboxNotFound.of(name)
        return live

    def shown(self, sandbox_id: str, caller: Caller) -> Live:
        """One in a state that callers may see. Raises as :meth:`find` does."""
        live = self.find(sandbox_id, caller)
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
        return live

    def __iter__(self) -> Iterator[Live]:
        """A snapshot: the table may change while it is walked."""
        return iter(list(self._by_id.values()))

    def records(self) -> Iterator[SandboxRecord]:
        return (live.record for live in self._by_id.values())

    async def add(self, record: SandboxRecord, *, note: str, admit: Callable[[Use], None] | None = None) -> Live:
        """Write before act: the record is in the store when this returns. ``admit`` as of :meth:`Store.add`."""
        self._may_act()
        record = replace(record, core=self._store.node)
        await self._store.add(record, note=note, admit=admit)
        live = Live(record)
        self._by_id[record.id] = live
        self.changed(record, None, note)
        return live

    async def move(self, live: Live, to: State, *, note: str, **changes: Any) -> None:
        """Bring a sandbox whose lock is held into another state. Raises Conflict when the store was changed meanwhile.

        Raises Unavailable when it may be another core's, which it may be after the write too.
        """
        self._check(live)
        before = live.record
        if to not in TRANSITIONS[before.state]:
            raise Conflict(f"sandbox {before.id} is {before.state.value} and cannot become {to.value} now")
        if to.ended:
            changes["ended_at"] = clock.now()
            if before.started_at is None:
                # It came to nothing, so the next attempt with its key is the first one again.
                changes["idempotency_key"] = None
        after = replace(before, state=to, revision=before.revision + 1, **changes)
        async with self._ours(live):
            await self._store.move(after, came_from=before.state, note=note)
        self._become(live, after)
        self.changed(after, before.state, note)
        if to.ended:
            self._forget(live)
        else:
            self._check(live)

    async def amend(self, live: Live, **changes: Any) -> None:
        """Change a record whose lock is held without changing its state. Raises Conflict as :meth:`move` does."""
        self._check(live)
        after = replace(live.record, **changes)
        async with self._ours(live):
            await self._store.amend(after)
        self._become(live, after)

    def _become(self, live: Live, record: SandboxRecord) -> None:
        live.record = record
        # One that is being taken over is not shown yet.
        if self._by_id.get(record.id) is live:
            self.ordering.put(record)

    def _forget(self, live: Live) -> None:
        if self._by_id.get(live.record.id) is live:
            del self._by_id[live.record.id]
            self.ordering.drop(live.record.id)

    @asynccontextmanager
    async def _ours(self, live: Live) -> AsyncIterator[None]:
        """Around a write: where it comes too late because another core has taken the sandbox over, that is said."""
        try:
            yield
        except Conflict:
            found = await self._store.find(live.record.id) if self._store.shared else None
            if found is not None and found.core != live.record.core:
                self.give_up(live)
                self._check(live)
            raise

    def _check(self, live: Live) -> None:
        if live.taken:
            raise Unavailable(f"sandbox {live.record.id} is another core's now", retry_after=1, should_retry=True)
        self._may_act()
