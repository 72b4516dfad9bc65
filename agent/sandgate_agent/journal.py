"""What commands write, in lines, for the logs of the gateway (``Agent.FollowLogs``); nothing of it where Init did not ask.

Beside :mod:`sandgate_agent.output`, which passes bytes on unchanged: a line here is text, bounded in length, in number
and in rate. Whoever writes more than a log can take is not slowed down; its lines are left out, and a remark says so.
Lines stay after they were taken, as far as there is room, because who takes them may be cut off before it has kept them.
"""

from __future__ import annotations

import asyncio
import enum
import os
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from sandgate_agent.retention import Stream

__all__ = ["Journal", "Line", "LogCommands", "Recorder"]

#: Bytes of one line; the rest of a longer one is the next line.
LONGEST_LINE = 4096
#: Bytes of lines that are kept, counted with their overhead.
ROOM = 1024 * 1024
#: What a line costs besides its text.
_OVERHEAD = 64
#: Bytes that all commands together may add: so many at once, and so many in each second.
BURST = 1024 * 1024
RATE = 64 * 1024
#: Bytes of lines handed out at once.
_BATCH = 256 * 1024
#: Seconds between two hand-outs: a line that comes alone goes at once, many go together.
_PAUSE = 0.05
LEFT_OUT = "more is written than the log takes: lines are left out here"


class LogCommands(enum.Enum):
    """Of which commands lines are kept."""

    NONE = enum.auto()
    #: Those that have a tag.
    TAGGED = enum.auto()
    ALL = enum.auto()


class Line(NamedTuple):
    """``at`` in nanoseconds since 1970; ``stream`` is None for a remark of our own."""

    number: int
    at: int
    pid: int
    tag: str
    stream: Stream | None
    text: str


class Journal:
    """The lines of all commands, numbered from 1."""

    def __init__(self) -> None:
        #: Drawn for this agent alone.
        self.id = int.from_bytes(os.urandom(7), "big") or 1
        self.keeps = LogCommands.NONE
        self._lines: deque[Line] = deque()
        self._size = 0
        self._next = 1
        self._budget = float(BURST)
        self._budget_at = time.monotonic()
        self._news = asyncio.Event()

    def recorder(self, *, pid: int, tag: str | None) -> Recorder | None:
        """For a command that starts now; None when its lines are not kept."""
        if self.keeps is LogCommands.NONE or (self.keeps is LogCommands.TAGGED and not tag):
            return None
        return Recorder(self, pid=pid, tag=tag or "")

    def has_room(self) -> bool:
        """Whether one more line may be added now."""
        now = time.monotonic()
        self._budget = min(BURST, self._budget + (now - self._budget_at) * RATE)
        self._budget_at = now
        return self._budget > 0

    def add(self, *, pid: int, tag: str, stream: Stream | None, text: str) -> None:
        cost = len(text) + _OVERHEAD
        self._budget -= cost
        self._size += cost
        self._lines.append(Line(self._next, time.time_ns(), pid, tag, stream, text))
        self._next += 1
        while self._size > ROOM:
            self._size -= len(self._lines.popleft().text) + _OVERHEAD
        self._news.set()

    async def follow(self, after: int) -> AsyncGenerator[list[Line], None]:
        """Lines with greater numbers, as they come, until the caller stops."""
        while True:
            batch = self._after(after)
            if batch:
                after = batch[-1].number
                yield batch
                await asyncio.sleep(_PAUSE)
            else:
                self._news = self._news if not self._news.is_set() else asyncio.Event()
                await self._news.wait()

    def _after(self, number: int) -> list[Line]:
        if not self._lines or self._lines[-1].number <= number:
            return []
        batch: list[Line] = []
        size = 0
        for position in range(max(0, number + 1 - self._lines[0].number), len(self._lines)):
            line = self._lines[position]
            batch.append(line)
            size += len(line.text) + _OVERHEAD
            if size >= _BATCH:
                break
        return batch


class Recorder:
    """Makes lines of one command's bytes."""

    def __init__(self, journal: Journal, *, pid: int, tag: str) -> None:
        self._journal = journal
        self._pid = pid
        self._tag = tag
        self._begun: dict[Stream, bytes] = {}
        #: Streams whose present line is left out.
        self._skipping: set[Stream] = set()

    def write(self, stream: Stream, data: bytes) -> None:
        if not self._journal.has_room():
            self._leave_out(stream)
            return
        if stream in self._skipping:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return
            self._skipping.discard(stream)
        *whole, rest = (self._begun.pop(stream, b"") + data).split(b"\n")
        for line in whole:
            if not self._journal.has_room():
                self._leave_out(stream)
                return
            self._add(stream, line)
        while len(rest) > LONGEST_LINE:
            self._add(stream, rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        if rest:
            self._begun[stream] = rest

    def end(self) -> None:
        """The command is over: what it began is a line as well."""
        for stream, line in self._begun.items():
            self._add(stream, line)
        self._begun.clear()

    def _add(self, stream: Stream, line: bytes) -> None:
        for begin in range(0, max(1, len(line)), LONGEST_LINE):
            text = line[begin : begin + LONGEST_LINE].decode(errors="replace").rstrip("\r")
            self._journal.add(pid=self._pid, tag=self._tag, stream=stream, text=text)

    def _leave_out(self, stream: Stream) -> None:
        if stream not in self._skipping:
            # Once, beyond the budget: a log that is silent about its gaps would be taken for whole.
            self._journal.add(pid=self._pid, tag=self._tag, stream=None, text=LEFT_OUT)
            self._skipping.add(stream)
            self._begun.pop(stream, None)
