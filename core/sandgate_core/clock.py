"""Time as the core keeps it: whole microseconds since 1970, in the store, in memory and in comparisons.

Integers, because deadlines are compared with what the store gives back, and a float or a naive date loses on the way.
"""

from __future__ import annotations

import time

__all__ = ["MICROSECONDS", "now", "to_microseconds"]

#: Microseconds in a second.
MICROSECONDS = 1_000_000


def now() -> int:
    return time.time_ns() // 1_000


def to_microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)
