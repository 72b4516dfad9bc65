"""What the sandbox uses of its machine (H3).

Read from the control groups of the sandbox, of version 1 or 2: those that its backend names, else those that are mounted in it
as in a container; else from the machine. Only what a mount shows is believed: the sandbox's root can make any file.

Without pathlib, which with all that it loads would be a twentieth of an agent's start.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Meter", "Usage"]

_MOUNTED_AT = "/sys/fs/cgroup"
#: What version 1 says where there is no limit, less a page or so.
_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes; ``cpu_used_pct`` is of all CPUs together."""

    time_ns: int
    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_used: int
    disk_total: int


class Meter:
    """CPU use is counted between two calls, the first from when the meter was made."""

    def __init__(self, measured: Mapping[str, str] | None = None) -> None:
        """``measured``: controller to the folder of the group that counts for the sandbox. None or empty: look for them."""
        groups = measured or dict(_mounted())
        self._memory_group = groups.get("memory")
        self._cpu_group = groups.get("cpu")
        # Version 1 counts apart from limiting.
        self._count_group = groups.get("cpuacct", groups.get("cpu"))
        if self._count_group is not None and not _counts(self._count_group):
            self._count_group = None
        self._last = self._busy()

    def measure(self) -> Usage:
        """Blocks for a handful of small reads."""
        count = self._cpus()
        total, used, cache = self._memory()
        disk = os.statvfs("/")
        return Usage(
            time_ns=time.time_ns(),
            cpu_count=count,
            cpu_used_pct=self._cpu(count),
            mem_total=total,
            mem_used=used,
            mem_cache=cache,
            disk_used=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_total=disk.f_blocks * disk.f_frsize,
        )

    def _cpus(self) -> int:
        count = len(os.sched_getaffinity(0))
        quota = None if self._cpu_group is None else _quota(self._cpu_group)
        return count if quota is None else max(1, min(count, math.ceil(quota)))

    def _cpu(self, count: int) -> float:
        (before, start), (busy, now) = self._last, self._busy()
        self._last = busy, now
        available = (now - start) * count
        return round(min(100.0, max(0.0, 100 * (busy - before) / available)), 2) if available > 0 else 0.0

    def _busy(self) -> tuple[float, float]:
        """CPU seconds used so far, and the time."""
        if self._count_group is not None:
            busy = _seconds(self._count_group)
        else:
            with open("/proc/stat", encoding="ascii") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
            # All but idle and waiting for disks.
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return busy, time.monotonic()

    def _memory(self) -> tuple[int, int, int]:
        machine = _fields("/proc/meminfo")
        total = machine["MemTotal"] * 1024
        if self._memory_group is not None:
            limit, current, cache = _memory(self._memory_group)
            return min(total, limit), max(0, current - cache), cache
        cache = (machine.get("Cached", 0) + machine.get("Buffers", 0)) * 1024
        return total, total - machine.get("MemAvailable", machine["MemFree"]) * 1024, cache


def _mounted() -> Iterator[tuple[str, str]]:
    """Controller to folder, of the groups that a container sees as its own. The machine's root says nothing about it."""
    for line in _text("/proc/self/mountinfo").splitlines():
        place, _, rest = line.partition(" - ")
        kind, mount = rest.split(" ", 1)[0], place.split(" ")[4]
        if kind == "cgroup2" and mount == _MOUNTED_AT and os.path.exists(f"{mount}/memory.max"):
            yield from (("memory", mount), ("cpu", mount))
        elif kind == "cgroup" and not os.path.exists(f"{mount}/release_agent"):
            for name, file in (("memory", "memory.stat"), ("cpu", "cpu.cfs_quota_us"), ("cpuacct", "cpuacct.usage")):
                if os.path.exists(f"{mount}/{file}"):
                    yield name, mount


def _counts(group: str) -> bool:
    return any(os.path.exists(f"{group}/{name}") for name in ("cpuacct.usage", "cgroup.controllers"))


def _seconds(group: str) -> float:
    if os.path.exists(f"{group}/cpuacct.usage"):
        return int(_text(f"{group}/cpuacct.usage")) / 1e9
    return _fields(f"{group}/cpu.stat").get("usage_usec", 0) / 1e6


def _quota(group: str) -> float | None:
    """CPUs; None: as many as there are."""
    if os.path.exists(f"{group}/cpu.max"):
        quota, period = _text(f"{group}/cpu.max").split()
    else:
        quota, period = (_text(f"{group}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return None if quota in {"max", "-1"} else int(quota) / int(period)


def _memory(group: str) -> tuple[int, int, int]:
    """Limit, all that is used, and what of it is cache."""
    stat = _fields(f"{group}/memory.stat")
    if os.path.exists(f"{group}/memory.max"):
        limit = _text(f"{group}/memory.max").strip()
        return _NO_LIMIT if limit == "max" else int(limit), int(_text(f"{group}/memory.current")), stat["file"]
    limit, current = (_text(f"{group}/memory.{name}_in_bytes") for name in ("limit", "usage"))
    return int(limit), int(current), stat.get("total_cache", stat.get("cache", 0))


def _fields(path: str) -> dict[str, int]:
    """Lines of a name and a number."""
    return {parts[0].rstrip(":"): int(parts[1]) for line in _text(path).splitlines() if len(parts := line.split()) >= 2}


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
