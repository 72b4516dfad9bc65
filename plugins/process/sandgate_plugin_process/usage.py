"""What boxes use, read from outside in the control groups that count them.

The same figures as the agent in a box gives of itself (H3), which measures where there are no such groups. Asked every few
seconds for each sandbox (C25): a call to its agent would wake a process, ten of its threads and the way there; this is five
small files.

All that blocks happens in one thread of its own, one box after the other: a disk that hangs holds up the next measurement and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sandgate_errors import NotFound, Unavailable
from sandgate_plugin_api import Usage
from sandgate_plugin_process.boxes import Record
from sandgate_plugin_process.machine import cpu_limit, memory_limit

__all__ = ["Gauge", "Meter"]

#: How files of a control group read that is removed.
_GONE = frozenset({errno.ENOENT, errno.ENODEV})


class Gauge:
    """Measures one box. Blocks for as long as the box's disk takes to say how full it is."""

    def __init__(self, record: Record, *, root: Path, memory: Path, count: Path) -> None:
        """``root``: a folder on the file system of the sandbox. ``count``: the group that counts CPU time."""
        assert record.main is not None  # noqa: S101 - as `of` has seen
        self._main = record.main
        self._root = root
        # Both are written before anything of the box runs, and never again.
        self._memory_limit = memory_limit(memory)
        self._cpus = cpu_limit(Path(record.groups["cpu"])) if "cpu" in record.groups else math.inf
        self._used = memory / ("memory.current" if _is_second(memory) else "memory.usage_in_bytes")
        self._cache = memory / "memory.stat", b"file" if _is_second(memory) else b"total_cache"
        self._count = count / ("cpu.stat" if _is_second(count) else "cpuacct.usage")
        #: CPU seconds used, and when: at first, none when the box was started.
        self._last = 0.0, self._main.start / os.sysconf("SC_CLK_TCK")

    @classmethod
    def of(cls, record: Record, *, root: Path) -> Gauge | None:
        """None: no groups count all that there is to say. Raises NotFound for a box that does not run."""
        if record.main is None:
            raise NotFound("the sandbox does not run")
        memory, cpu = record.groups.get("memory"), record.groups.get("cpuacct", record.groups.get("cpu"))
        if memory is None or cpu is None:
            return None
        count = Path(cpu)
        if not (_is_second(count) or (count / "cpuacct.usage").exists()):
            return None
        return cls(record, root=root, memory=Path(memory), count=count)

    def begin(self) -> None:
        """Count CPU use from now on: the box stood still until now."""
        self._last = self._busy()

    def read(self) -> Usage:
        """Raises NotFound when the box has ended, Unavailable."""
        if not self._main.is_alive():
            raise NotFound("the sandbox has ended")
        try:
            count, (busy, now) = self._cpu_count(), self._busy()
            used, cache = int(self._used.read_bytes()), _named(*self._cache)
            disk = os.statvfs(self._root)
        except OSError as error:
            if error.errno in _GONE:
                raise NotFound("the sandbox has ended") from None
            raise Unavailable("the sandbox cannot be measured at the moment") from error
        (before, then), self._last = self._last, (busy, now)
        available = (now - then) * count
        return Usage(
            cpu_count=count,
            cpu_used_pct=round(min(100.0, max(0.0, 100 * (busy - before) / available)), 2) if available > 0 else 0.0,
            mem_total=min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), self._memory_limit),
            mem_used=max(0, used - cache),
            mem_cache=cache,
            disk_used=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_total=disk.f_blocks * disk.f_frsize,
        )

    def _cpu_count(self) -> int:
        count = len(os.sched_getaffinity(0))
        return count if self._cpus >= count else max(1, math.ceil(self._cpus))

    def _busy(self) -> tuple[float, float]:
        """By the clock that the kernel notes the start of processes by."""
        if self._count.name == "cpu.stat":
            seconds = _named(self._count, b"usage_usec") / 1e6
        else:
            seconds = int(self._count.read_bytes()) / 1e9
        return seconds, time.clock_gettime(time.CLOCK_BOOTTIME)


class Meter:
    """The gauges of all boxes that were asked for, and the thread that reads them.

    Questions that come together are answered together: waking the thread and coming back costs more than a reading.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="box-usage")
        #: Questions that nobody works on yet. Whoever gives up takes its own back, so a thread that hangs gathers none.
        self._asked: dict[asyncio.Future[Usage | None], tuple[str, Callable[[], Gauge | None]]] = {}
        #: Whether the thread has something to do, or is about to get it.
        self._busy = False
        self._closed = False

    async def measure(self, name: str, make: Callable[[], Gauge | None]) -> Usage | None:
        """What the box of this name uses; ``make`` finds its gauge, where it has any.

        Raises NotFound when it has ended, Unavailable, and what ``make`` raises.
        """
        if self._closed:
            raise Unavailable("the backend is closed")
        loop = asyncio.get_running_loop()
        question: asyncio.Future[Usage | None] = loop.create_future()
        self._asked[question] = name, make
        if not self._busy:
            self._busy = True
            # Not at once: others may be about to ask.
            loop.call_soon(self._begin)
        try:
            return await question
        finally:
            self._asked.pop(question, None)

    def _begin(self) -> None:
        asked, self._asked = self._asked, {}
        self._busy = bool(asked) and not self._closed
        if self._busy:
            reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read_all, list(asked.values()))
            reading.add_done_callback(partial(self._answer, list(asked)))

    def _answer(
        self, questions: list[asyncio.Future[Usage | None]], reading: asyncio.Future[list[Usage | Exception | None]]
    ) -> None:
        self._begin()
        if reading.cancelled():
            return
        for question, answer in zip(questions, reading.result(), strict=True):
            if question.done():
                continue
            if isinstance(answer, Exception):
                question.set_exception(answer)
            else:
                question.set_result(answer)

    def _read_all(self, asked: list[tuple[str, Callable[[], Gauge | None]]]) -> list[Usage | Exception | None]:
        answers: list[Usage | Exception | None] = []
        for name, make in asked:
            try:
                answers.append(self._read(name, make))
            except Exception as error:
                answers.append(error)
        return answers

    def _read(self, name: str, make: Callable[[], Gauge | None]) -> Usage | None:
        gauge = self._gauges.get(name) or make()
        if gauge is None:
            return None
        self._gauges[name] = gauge
        try:
            return gauge.read()
        except NotFound:
            # Also where it ended, and was forgotten, while its gauge was made.
            self.forget(name)
            raise

    def begin(self, name: str) -> None:
        """The box stood still until now. Blocks for a moment."""
        if (gauge := self._gauges.get(name)) is not None:
            # What cannot be read now is told by whoever asks next.
            with contextlib.suppress(OSError):
                gauge.begin()

    def forget(self, name: str) -> None:
        """The box has ended."""
        self._gauges.pop(name, None)

    def close(self) -> None:
        """Whoever still waits hears of it."""
        self._closed = True
        for question in self._asked:
            if not question.done():
                question.set_exception(Unavailable("the backend is closed"))
        self._thread.shutdown(wait=False)


def _is_second(group: Path) -> bool:
    """Whether it is of version 2."""
    return (group / "cgroup.controllers").exists()


def _named(file: Path, name: bytes) -> int:
    """One number of a file with lines of a name and a number."""
    start = name + b" "
    return next((int(line[len(start) :]) for line in file.read_bytes().splitlines() if line.startswith(start)), 0)
