"""How much memory the processes of a gateway hold, from the kernel's own books."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["forget_peaks", "peak", "private"]


def private(pids: Iterable[int]) -> int:
    """Bytes that no other process shares: what one more sandbox really costs."""
    return sum(
        _field(pid, "smaps_rollup", "Private_Dirty:") + _field(pid, "smaps_rollup", "Private_Clean:") for pid in pids
    )


def peak(pids: Iterable[int]) -> int:
    """Most bytes ever resident, summed over processes, since :func:`forget_peaks`."""
    return sum(_field(pid, "status", "VmHWM:") for pid in pids)


def forget_peaks(pids: Iterable[int]) -> None:
    for pid in pids:
        # 5: "reset the peak resident set size".
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field(pid: int, file: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
