"""What the gateway itself may use of the machine, the most that a sandbox can have; and how far a group is limited."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sandgate_plugin_api import Resources
from sandgate_plugin_process.hierarchies import Hierarchy, hierarchies

__all__ = ["cpu_limit", "machine", "memory_limit"]


def machine(folder: Path) -> Resources:
    """The CPUs and the memory that this process sees and its control groups grant, and the disk of ``folder``."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpus = float(len(os.sched_getaffinity(0)))
    for hierarchy in hierarchies():
        for group in _upwards(hierarchy):
            memory = min(memory, memory_limit(group))
            cpus = min(cpus, cpu_limit(group))
    return Resources(
        cpu_count=math.ceil(cpus),
        memory_mb=memory // 2**20,
        disk_size_mb=shutil.disk_usage(folder).total // 2**20,
    )


def _upwards(hierarchy: Hierarchy) -> Iterator[Path]:
    """The gateway's group and those above it, as far as they can be seen."""
    if hierarchy.version == 2 or hierarchy.controllers & {"memory", "cpu"}:
        group = hierarchy.own
        yield group
        while group != hierarchy.mount:
            group = group.parent
            yield group


def memory_limit(group: Path) -> int:
    """Bytes; more than any machine has where nothing limits a group."""
    limits = (_number(_text(group / name)) for name in ("memory.max", "memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None), default=2**62)


def cpu_limit(group: Path) -> float:
    """CPUs; infinite where nothing limits a group."""
    quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    words = [quota, period] if quota else _text(group / "cpu.max").split()
    figures = [_number(word) for word in words]
    if len(figures) != 2 or figures[0] is None or not figures[1] or figures[0] <= 0:
        return math.inf
    return figures[0] / figures[1]


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """None for ``max`` and for what is missing."""
    try:
        return int(text)
    except ValueError:
        return None
