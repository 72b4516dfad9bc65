"""What waits for the one reader of a stream: items in order, then its end; in between, signs of life.

Shared by all streams that the agent sends (process output, file events). Bounded: the producer looks at :attr:`full`
before it makes more, and is called back when there is room.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sandgate_errors import SandgateError

__all__ = ["Mailbox", "Mark"]

T = TypeVar("T")


class Mark(enum.Enum):
    """What a reader gets besides items."""

    #: Nothing was taken out for the interval.
    KEEPALIVE = "keepalive"
    #: No item will come any more.
    END = "end"


class Mailbox(Generic[T]):
    """A queue with one reader. Everything but :meth:`next` is called from the event loop and returns at once."""

    def __init__(self, capacity: int, *, on_room: Callable[[], None] | None = None) -> None:
        self._capacity = capacity
        self._on_room = on_room
        self._items: deque[T] = deque()
        self._ended = False
        self._failure: SandgateError | None = None
        self._failed_at_once = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._interval = 0.0
        self._quiet_since = 0.0
        self._beat = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def waiting(self) -> int:
        """How many items the reader has not taken yet."""
        return len(self._items)

    @property
    def full(self) -> bool:
        return self.waiting >= self._capacity

    def put(self, item: T) -> None:
        """Add an item, beyond the capacity too: a producer that cannot wait any more loses nothing."""
        if not self._ended:
            self._items.append(item)
            self._wake()

    def end(self, failure: SandgateError | None = None) -> None:
        """Nothing more will come; ``failure`` is raised at the reader after the items."""
        if not self._ended:
            self._ended = True
            self._failure = failure
            self._wake()

    def fail(self, failure: SandgateError) -> None:
        """Raise ``failure`` at the reader now, whatever still waits."""
        self._ended = self._failed_at_once = True
        self._failure = failure
        self._wake()

    def fail_after(self, seconds: float, failure: SandgateError) -> None:
        self._timers.append(self._loop.call_later(seconds, self.fail, failure))

    def keep_alive(self, interval: float) -> None:
        """From now on give a KEEPALIVE when the reader got nothing for ``interval`` seconds."""
        self._interval = interval
        self._quiet_since = self._loop.time()
        self._timers.append(self._loop.call_later(interval, self._tick))

    def close(self) -> None:
        """The reader left."""
        self._ended = True
        self._items.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._interval = 0.0

    async def next(self) -> T | Mark:
        """The next item. Raises the failure that the stream ends with."""
        while True:
            if self._failed_at_once and self._failure is not None:
                raise self._failure
            if self.waiting:
                return self._take()
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return Mark.END
            if self._beat:
                self._beat = False
                self._quiet_since = self._loop.time()
                return Mark.KEEPALIVE
            await self._wait()

    def _pop(self) -> T:
        return self._items.popleft()

    def _take(self) -> T:
        item = self._pop()
        self._beat = False
        if self._interval:
            self._quiet_since = self._loop.time()
        # At half and not at once: a producer that is called for every item would be paused for every item.
        if self._on_room is not None and self.waiting == self._capacity // 2:
            self._on_room()
        return item

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        """One timer for all keepalives: it looks how long the reader has had nothing, and sleeps for what is left."""
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        if not self._interval or self._ended:
            return
        left = self._quiet_since + self._interval - self._loop.time()
        if left <= 0:
            self._beat = True
            self._wake()
            left = self._interval
        self._timers.append(self._loop.call_later(left, self._tick))
