"""Sandboxes made ahead: a create takes one that is up instead of waiting for an interpreter to start.

What is kept here is nobody's: no record of the core names it. So it ends with the backend object, and what a crash has
left of it ends at the next start (``ProcessBackend.open``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["WarmPool"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A refill costs as much CPU as the create that made it needed and the sandbox's first commands: those come first.
REFILL_DELAY_SECONDS = 0.2
# After a failure, doubling: a machine that is out of room stays so for a while, and creates still try by themselves.
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


class WarmPool(Generic[T]):
    """Keeps ``size`` things that ``make`` makes, until :meth:`close` discards them."""

    def __init__(self, size: int, *, make: Callable[[], Awaitable[T]], discard: Callable[[T], Awaitable[None]]) -> None:
        self._size = size
        self._make = make
        self._discard = discard
        self._ready: deque[T] = deque()
        self._wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start filling; the task lives as long as the pool, whoever takes from it."""
        if self._size:
            self._filler = asyncio.create_task(self._fill(), name="warm sandboxes")

    def take(self) -> T | None:
        """The oldest one; None when none is ready. Another will be made."""
        self._wanted.set()
        return self._ready.popleft() if self._ready else None

    async def close(self) -> None:
        """Stop filling and discard what is there. What fails to go is left to the next start."""
        if self._filler is not None:
            self._filler.cancel()
            # Not awaited itself: its cancellation would look like one of this call.
            await asyncio.wait({self._filler})
        while self._ready:
            try:
                await self._discard(self._ready.popleft())
            except Exception as error:
                _log.warning("a warm sandbox was left behind: %s", error)

    async def _fill(self) -> None:
        await self._top_up()
        while True:
            await self._wanted.wait()
            # Before and not after: what was taken is still on its way to the caller, through this very process.
            await asyncio.sleep(REFILL_DELAY_SECONDS)
            self._wanted.clear()
            await self._top_up()

    async def _top_up(self) -> None:
        retry = FIRST_RETRY_SECONDS
        while len(self._ready) < self._size:
            try:
                self._ready.append(await self._make())
                retry = FIRST_RETRY_SECONDS
            except Exception as error:
                _log.warning("no warm sandbox could be made, next try in %g s: %s", retry, error)
                await asyncio.sleep(retry)
                retry = min(2 * retry, LAST_RETRY_SECONDS)
