"""Quotas: whether a team may have one more sandbox (C57, errors.md 2.1: 429).

Two kinds of limit. What a team has at one time (sandboxes, CPUs, memory) is counted from the live records, so it cannot
drift from the truth; a create holds its place from the check until its record is among them, and of many that come at
once none slips through. How often it creates is a bucket of tokens that refills evenly; it is full after a restart.

Where several cores share the store, both are counted there (:mod:`sandgate_core.counting`): what a team has in the
transaction that adds the record, its tokens in a row of their own.

A paused sandbox counts like a running one: it keeps its memory or its disk, and a resume never fails for want of a quota.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sandgate_core.live import LiveTable
from sandgate_core.records import Use
from sandgate_core.store import Store
from sandgate_core.teams import Teams
from sandgate_errors import ResourceExhausted
from sandgate_plugin_api import Resources

__all__ = ["Quotas"]

#: Seconds until a client may ask again for what another sandbox's end has to free first.
_RETRY_AFTER = 10.0
_MINUTE = 60.0


@dataclass
class _Bucket:
    tokens: float
    at: float


class Quotas:
    """The limits of all teams, against what they have."""

    def __init__(self, teams: Teams, table: LiveTable, store: Store) -> None:
        self._teams = teams
        self._table = table
        self._store = store
        #: Creates whose record is not in the table yet.
        self._placed: defaultdict[str, Use] = defaultdict(Use)
        self._buckets: dict[str, _Bucket] = {}

    def longest_life(self, team: str, *, most: int) -> int:
        """Microseconds: the team's limit or the deployment's, whichever is shorter."""
        limit = self._teams.limits_of(team).max_life
        return most if limit is None else min(limit, most)

    async def count_create(self, team: str) -> None:
        """One create more in this minute. Raises ResourceExhausted with the time until the next is due."""
        rate = self._teams.limits_of(team).creates_per_minute
        if rate is None:
            self._buckets.pop(team, None)
            return
        if not rate:
            raise ResourceExhausted("the team may create no sandboxes", should_retry=False, limit=0)
        wait = await self._store.take_token(team, rate=rate) if self._store.shared else self._take(team, rate)
        if wait is not None:
            raise ResourceExhausted(f"the team may create {rate} sandboxes a minute", retry_after=wait, limit=rate)

    def _take(self, team: str, rate: int) -> float | None:
        """None, or seconds until the next create. ``rate``: at least one."""
        now = asyncio.get_running_loop().time()
        bucket = self._buckets.setdefault(team, _Bucket(tokens=rate, at=now))
        bucket.tokens = min(rate, bucket.tokens + (now - bucket.at) * rate / _MINUTE)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * _MINUTE / rate
        bucket.tokens -= 1
        return None

    @contextmanager
    def place(self, team: str, resources: Resources) -> Iterator[Callable[[Use], None] | None]:
        """Holds room for one sandbox while its record is written. Raises ResourceExhausted.

        Gives what :meth:`Store.add` is to ask about the team's use, where that is for the store to say.
        """
        if self._store.shared:
            yield partial(self._check, team, resources) if self._limited(team) else None
            return
        if self._limited(team):  # counting walks all live records
            self._check(team, resources, self._use_of(team))
        placed = self._placed[team]
        placed.add(resources)
        try:
            yield None
        finally:
            placed.add(resources, times=-1)
            if not placed.sandboxes:
                self._placed.pop(team, None)

    def _limited(self, team: str) -> bool:
        limits = self._teams.limits_of(team)
        return any(limit is not None for limit in (limits.max_sandboxes, limits.max_cpus, limits.max_memory_mb))

    def _check(self, team: str, resources: Resources, use: Use) -> None:
        limits = self._teams.limits_of(team)
        use.add(resources)
        for limit, wanted, what in (
            (limits.max_sandboxes, use.sandboxes, "sandboxes at a time"),
            (limits.max_cpus, use.cpus, "CPUs at a time"),
            (limits.max_memory_mb, use.memory_mb, "MiB of memory at a time"),
        ):
            if limit is not None and wanted > limit:
                raise ResourceExhausted(
                    f"the team may have {limit} {what}", retry_after=_RETRY_AFTER, should_retry=False, limit=limit
                )

    def _use_of(self, team: str) -> Use:
        placed = self._placed.get(team, Use())
        use = Use(placed.sandboxes, placed.cpus, placed.memory_mb)
        for record in self._table.records():
            if record.owner == team:
                use.add(record.resources)
        return use
