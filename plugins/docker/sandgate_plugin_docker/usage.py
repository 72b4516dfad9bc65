"""What a container uses, from the engine's counters: its control group, which the agent in it may not see."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandgate_plugin_api import Usage

__all__ = ["Meter"]

#: Containers whose last sample is remembered; one that was forgotten is measured over the engine's own second.
_REMEMBERED = 4096


class Meter:
    """CPU use is counted between two questions."""

    def __init__(self, disk: Path | None) -> None:
        """``disk`` is where the engine keeps layers; None: nowhere on this machine."""
        self._disk = disk
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._limits: OrderedDict[str, float] = OrderedDict()

    def knows(self, name: str) -> bool:
        """Whether :meth:`learn` was told; no counter says how many CPUs a container may have."""
        return name in self._limits

    def learn(self, name: str, details: Mapping[str, Any]) -> None:
        """``details`` as the engine describes the container. Limits of CPUs stay as they are made."""
        nano = (details.get("HostConfig") or {}).get("NanoCpus") or 0
        self._limits[name] = int(nano) / 1e9 or math.inf
        _trim(self._limits)

    def measure(self, name: str, stats: Mapping[str, Any]) -> Usage | None:
        """None: the container does not run."""
        cpu, before = stats.get("cpu_stats") or {}, stats.get("precpu_stats") or {}
        memory = stats.get("memory_stats") or {}
        if not memory.get("usage"):
            return None
        now = _counters(cpu)
        earlier = self._last.pop(name, None) or _counters(before)
        self._last[name] = now
        _trim(self._last)
        details = memory.get("stats") or {}
        # Version 1 of control groups counts what is below as well, under another name.
        cache = int(details.get("total_inactive_file", details.get("inactive_file", 0)))
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        used, total = self._space()
        online = int(cpu.get("online_cpus") or 1)
        available = min(online, self._limits.get(name, math.inf))
        return Usage(
            cpu_count=math.ceil(available),
            cpu_used_pct=_share(earlier, now, of=available / online),
            mem_total=int(memory.get("limit") or host),
            mem_used=max(0, int(memory["usage"]) - cache),
            mem_cache=cache,
            disk_used=used,
            disk_total=total,
        )

    def _space(self) -> tuple[int, int]:
        """Of the disk that all layers share; nothing where it cannot be seen."""
        try:
            state = os.statvfs(self._disk) if self._disk is not None else None
        except OSError:
            state = None
        if state is None:
            return 0, 0
        return (state.f_blocks - state.f_bfree) * state.f_frsize, state.f_blocks * state.f_frsize

    def forget(self, name: str) -> None:
        self._last.pop(name, None)
        self._limits.pop(name, None)


def _trim(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > _REMEMBERED:
        remembered.popitem(last=False)


def _counters(cpu: Mapping[str, Any]) -> tuple[int, int]:
    """Nanoseconds: of the container, and of all CPUs together."""
    return int((cpu.get("cpu_usage") or {}).get("total_usage") or 0), int(cpu.get("system_cpu_usage") or 0)


def _share(earlier: tuple[int, int], now: tuple[int, int], *, of: float) -> float:
    """Percent of a part ``of`` all CPUs."""
    used, passed = now[0] - earlier[0], (now[1] - earlier[1]) * of
    return round(min(100.0, max(0.0, 100 * used / passed)), 2) if passed > 0 else 0.0
