"""Deadlines: absolute times, and one timer for the earliest of them.

There is no scan. Moving a deadline leaves its old entry in the heap, which is dropped when it comes up; when such entries
outnumber the real ones, the heap is built anew, so it stays proportional to the sandboxes however often one is moved.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable

from sandgate_core import clock

__all__ = ["Expiry"]

#: Seconds. The timer runs by the monotonic clock and deadlines by the wall clock: when that is set, or the machine
#: slept, the earliest deadline is at most this late. It also keeps a deadline in a thousand years a valid timer.
_LONGEST_WAIT = 5.0
_SPARE_ENTRIES = 64


class Expiry:
    """Calls ``fire`` with the id of each sandbox whose deadline has come, once for each deadline set."""

    def __init__(self, fire: Callable[[str], None]) -> None:
        self._fire = fire
        self._deadlines: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def set(self, sandbox_id: str, deadline: int) -> None:
        """Fire at ``deadline`` (microseconds since 1970), at once when it has passed; replaces an earlier one."""
        if self._closed:
            return
        self._deadlines[sandbox_id] = deadline
        heapq.heappush(self._heap, (deadline, sandbox_id))
        if len(self._heap) > 2 * len(self._deadlines) + _SPARE_ENTRIES:
            self._heap = [(due, name) for name, due in self._deadlines.items()]
            heapq.heapify(self._heap)
        self._arm()

    def drop(self, sandbox_id: str) -> None:
        self._deadlines.pop(sandbox_id, None)

    def close(self) -> None:
        self._closed = True
        self._deadlines.clear()
        self._heap.clear()
        self._disarm()

    def __len__(self) -> int:
        return len(self._deadlines)

    def _arm(self) -> None:
        self._disarm()
        self._skip_stale()
        if self._heap:
            wait = (self._heap[0][0] - clock.now()) / clock.MICROSECONDS
            # In a context of its own: that of whoever moved a deadline last would put their request's id on lines of others.
            self._timer = asyncio.get_running_loop().call_later(
                min(max(wait, 0.0), _LONGEST_WAIT), self._wake, context=contextvars.Context()
            )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _skip_stale(self) -> None:
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _wake(self) -> None:
        self._timer = None
        now = clock.now()
        self._skip_stale()
        while self._heap and self._heap[0][0] <= now:
            _, sandbox_id = heapq.heappop(self._heap)
            del self._deadlines[sandbox_id]
            self._fire(sandbox_id)
            self._skip_stale()
        self._arm()
