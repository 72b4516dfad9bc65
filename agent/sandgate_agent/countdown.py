"""A time limit that stands still while its sandbox does (behaviour.md T11, X2).

A paused agent does not run, but the clock does: a plain timer would be overdue at the first moment after the resume. So
the limit is counted in short steps, and a step that comes much too late counts as if it had been in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Countdown"]

_STEP_SECONDS = 1.0
#: Later than this is a pause and not a busy machine; what is less counts, or a busy machine would stretch every limit.
_PAUSE_SECONDS = 1.0


class Countdown:
    """Calls ``on_end`` once, after ``seconds`` in which the agent could run."""

    def __init__(self, seconds: float, on_end: Callable[[], None]) -> None:
        self._left = seconds
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        step = min(self._left, _STEP_SECONDS)
        self._left -= step
        self._due = self._loop.time() + step
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._due
        if late < _PAUSE_SECONDS:
            self._left -= late
        if self._left > 0:
            self._wait()
        else:
            self._timer = None
            self._on_end()
