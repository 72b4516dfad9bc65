"""What the sandbox uses of its machine (H3).

Read from the sandbox's own control group where it sees one with limits, as in a container; else from the machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Meter", "Usage"]

_GROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


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

    def __init__(self) -> None:
        # Only a group that is not the machine's root has limits; the root's numbers say nothing about a sandbox.
        self._grouped = (_GROUP / "memory.max").exists()
        self._last = self._busy()

    def measure(self) -> Usage:
        """Blocks for a handful of small reads."""
        count = len(os.sched_getaffinity(0))
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

    def _cpu(self, count: int) -> float:
        (before, start), (busy, now) = self._last, self._busy()
        self._last = busy, now
        available = (now - start) * count
        return round(min(100.0, max(0.0, 100 * (busy - before) / available)), 2) if available > 0 else 0.0

    def _busy(self) -> tuple[float, float]:
        """CPU seconds used so far, and the time."""
        if self._grouped:
            busy = _fields(_GROUP / "cpu.stat").get("usage_usec", 0) / 1e6
        else:
            with open(_PROC / "stat", encoding="ascii") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
            # All but idle and waiting for disks.
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return busy, time.monotonic()

    def _memory(self) -> tuple[int, int, int]:
        machine = _fields(_PROC / "meminfo")
        total = machine["MemTotal"] * 1024
        if self._grouped:
            limit = (_GROUP / "memory.max").read_text().strip()
            current = int((_GROUP / "memory.current").read_text())
            cache = _fields(_GROUP / "memory.stat").get("file", 0)
            return (min(total, int(limit)) if limit != "max" else total), max(0, current - cache), cache
        cache = (machine.get("Cached", 0) + machine.get("Buffers", 0)) * 1024
        return total, total - machine.get("MemAvailable", machine["MemFree"]) * 1024, cache


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    with open(path, encoding="ascii") as file:
        return {parts[0].rstrip(":"): int(parts[1]) for line in file if len(parts := line.split()) >= 2}
