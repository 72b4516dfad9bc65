"""``/metrics``: what the machine has and how much of it is used."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from sandgate_testing.execd_stand_in.http import Exchange, Route, answer_json, route

__all__ = ["routes"]

#: Seconds over which the use of processors is taken.
_SPAN = 0.2


def routes() -> list[Route]:
    return [route("GET", "/metrics", _measure)]


async def _measure(exchange: Exchange) -> None:
    busy, total = _ticks()
    await asyncio.sleep(_SPAN)
    busy_later, total_later = _ticks()
    memory = _memory()
    await answer_json(
        exchange.writer,
        {
            "cpu_count": float(os.cpu_count() or 1),
            "cpu_used_pct": 100 * (busy_later - busy) / max(total_later - total, 1),
            "mem_total_mib": memory["MemTotal"] / 1024,
            "mem_used_mib": (memory["MemTotal"] - memory["MemAvailable"]) / 1024,
            "timestamp": time.time_ns() // 10**6,
        },
    )


def _ticks() -> tuple[int, int]:
    """Of all processors since the start: busy ones, and all."""
    user, nice, system, idle, waiting, *others = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


def _memory() -> dict[str, int]:
    """In KiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) for name, value, *_ in lines}
