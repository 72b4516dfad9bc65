"""Measurements of one sandbox, packed and bounded.

A sample takes 60 bytes. When a series has too many, its older half is thinned to every second one, again and again: the
last hour stays at full resolution, what is older gets coarser, and nothing of the sandbox's life is dropped (C25).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from sandgate_core.store import Piece

__all__ = ["LONGEST_SERIES", "Sample", "Series", "percent"]

#: Samples kept of one sandbox: at one in five seconds, half of them are the last hour.
LONGEST_SERIES = 1440
_PACKED = struct.Struct("<qIdQQQQQ")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement. ``at`` in microseconds since 1970, ``cpu_used_pct`` of all CPUs together, the rest in bytes."""

    at: int
    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_used: int
    disk_total: int

    def pack(self) -> bytes:
        return _PACKED.pack(
            self.at, self.cpu_count, self.cpu_used_pct, self.mem_total, self.mem_used, self.mem_cache, self.disk_used,
            self.disk_total,
        )  # fmt: skip

    @classmethod
    def unpack(cls, packed: bytes) -> Sample:
        at, count, pct, mem_total, mem_used, mem_cache, disk_used, disk_total = _PACKED.unpack(packed)
        return cls(
            at=at, cpu_count=count, cpu_used_pct=pct, mem_total=mem_total, mem_used=mem_used, mem_cache=mem_cache,
            disk_used=disk_used, disk_total=disk_total,
        )  # fmt: skip


def percent(told: float) -> float:
    """What was told as a percentage, as one: no JSON can carry "not a number"."""
    return min(100.0, max(0.0, told)) if math.isfinite(told) else 0.0


class Series:
    """The samples of one sandbox, oldest first."""

    def __init__(self) -> None:
        self._packed = bytearray()
        #: Bytes at the beginning that the store has.
        self._stored = 0
        #: Whether the store has any; then it must be told when these change.
        self.in_store = False

    def __len__(self) -> int:
        return len(self._packed) // _PACKED.size

    def add(self, sample: Sample) -> None:
        while self._packed and self._at(len(self) - 1) >= sample.at:
            # The clock was set back: a series that is out of order could not be cut by time.
            del self._packed[-_PACKED.size :]
            self._stored = 0
        self._packed += sample.pack()
        if len(self) > LONGEST_SERIES:
            self._thin()

    def load(self, packed: bytes) -> None:
        """Take in a piece that the store had, later than all before. One that does not fit is left out."""
        if len(packed) % _PACKED.size:
            _log.warning("a piece of measurements is damaged")
            return
        self._packed += packed
        self._stored, self.in_store = len(self._packed), True
        while len(self) > LONGEST_SERIES:
            self._thin()

    def between(self, since: int | None, until: int | None) -> Iterator[Sample]:
        """The samples from ``since`` to ``until``, both inclusive."""
        for number in range(len(self)):
            at = self._at(number)
            if (since is None or at >= since) and (until is None or at <= until):
                yield self._sample(number)

    @property
    def latest(self) -> Sample | None:
        return self._sample(len(self) - 1) if self._packed else None

    def unwritten(self, sandbox_id: str) -> tuple[Piece | None, bool]:
        """What the store lacks, and whether it replaces what the store has. Counts as written from now on."""
        instead = self.in_store and self._stored == 0
        fresh = bytes(self._packed[self._stored :])
        self._stored = len(self._packed)
        if not fresh:
            return None, False
        self.in_store = True
        return Piece(sandbox_id=sandbox_id, at=_PACKED.unpack_from(fresh)[0], samples=fresh), instead

    def _thin(self) -> None:
        half = len(self) // 2
        kept = b"".join(self._raw(number) for number in range(0, half, 2))
        self._packed[: half * _PACKED.size] = kept
        self._stored = 0

    def _raw(self, number: int) -> bytes:
        return bytes(self._packed[number * _PACKED.size : (number + 1) * _PACKED.size])

    def _at(self, number: int) -> int:
        at: int = _PACKED.unpack_from(self._packed, number * _PACKED.size)[0]
        return at

    def _sample(self, number: int) -> Sample:
        return Sample.unpack(self._raw(number))
