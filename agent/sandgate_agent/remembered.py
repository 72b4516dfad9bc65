"""Processes that have ended, for as long as somebody may attach late: their end (A9) and the rest of their output (X12).

Between the table (:mod:`sandgate_agent.processes`), which puts them here, and whoever attaches. All this is memory of the
sandbox: the ends are small, and are bounded in number and time; their output is bounded in bytes, and goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from sandgate_agent.ends import End
from sandgate_agent.process import Process
from sandgate_agent.retention import Past, Retention

__all__ = ["Ended", "Remembered"]

#: How long attaching to an ended process still tells its end (A9), and for how many of them.
_RETENTION_SECONDS = 30.0
_MOST_RETAINED = 4096
#: Output of ended processes is kept for replay up to here, the latest first.
_MOST_RETAINED_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is still known of a process that has ended."""

    pid: int
    tag: str | None
    incarnation: int
    end: End
    retained: Retention
    #: The number that its next piece of output would have had.
    next_seq: int
    #: When it is forgotten, by the loop's clock.
    until: float

    @classmethod
    def of(cls, process: Process, end: End, *, until: float) -> Ended:
        output = process.output
        return cls(
            pid=process.pid,
            tag=process.command.tag,
            incarnation=process.incarnation,
            end=end,
            retained=output.retained,
            next_seq=output.next_seq,
            until=until,
        )

    def past(self, from_seq: int | None) -> Past:
        return self.retained.since(from_seq, self.next_seq)


class Remembered:
    """Ended processes by pid, oldest first."""

    def __init__(self) -> None:
        self._ends: OrderedDict[int, Ended] = OrderedDict()
        self._size = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, process: Process, end: End) -> None:
        self._remove(process.pid)
        ended = Ended.of(process, end, until=self._loop.time() + _RETENTION_SECONDS)
        self._ends[process.pid] = ended
        self._size += ended.retained.weight
        if len(self._ends) > _MOST_RETAINED:
            self._remove(next(iter(self._ends)))
        self._shrink()
        if self._timer is None:
            self._timer = self._loop.call_at(ended.until, self._tick)

    def drop(self, *, pid: int, tag: str | None) -> None:
        """A newer process has taken the pid or tag: the old end must not be told for it (A10, P33)."""
        self._remove(pid)
        if tag is not None:
            for ended in [ended for ended in self._ends.values() if ended.tag == tag]:
                self._remove(ended.pid)

    def find(self, *, pid: int | None, tag: str | None) -> Ended | None:
        self._expire()
        for ended in reversed(self._ends.values()):
            if pid == ended.pid or (tag is not None and tag == ended.tag):
                return ended
        return None

    def _remove(self, pid: int) -> None:
        if (ended := self._ends.pop(pid, None)) is not None:
            self._size -= ended.retained.weight

    def _shrink(self) -> None:
        """Forget output, oldest first, until the rest fits; the ends stay known."""
        for ended in self._ends.values():
            if self._size <= _MOST_RETAINED_BYTES:
                return
            self._size -= ended.retained.weight
            ended.retained.clear()

    def _expire(self) -> None:
        now = self._loop.time()
        while self._ends and (oldest := next(iter(self._ends.values()))).until <= now:
            self._remove(oldest.pid)

    def _tick(self) -> None:
        """Output is given back in time, whether somebody asks or not."""
        self._timer = None
        self._expire()
        if self._ends:
            self._timer = self._loop.call_at(next(iter(self._ends.values())).until, self._tick)
