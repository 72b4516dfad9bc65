"""A core's right to act for its sandboxes, where other cores may take them over: it ends by itself unless it is renewed.

Whoever takes a sandbox over goes by the lease in the store. Its holder goes by this one, which began earlier (before the
renewal was asked for) and is as long, so it ends first. The clock runs on while the machine sleeps. A virtual machine that
is stopped with its clock is beyond it; the compare-and-set of the store is not.
"""

from __future__ import annotations

import time

from sandgate_errors import Unavailable

__all__ = ["Lease"]


class Lease:
    """Not held until :meth:`renewed` says so."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = 0.0

    @staticmethod
    def clock() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def renewed(self, *, asked_at: float) -> None:
        self._end = asked_at + self.seconds

    def given_back(self) -> None:
        self._end = 0.0

    @property
    def held(self) -> bool:
        return self.clock() < self._end

    def check(self) -> None:
        """Raises Unavailable when another core may act in this one's place."""
        if not self.held:
            raise Unavailable(
                "this core has lost touch with its database, and may not act until it has it back",
                retry_after=1,
                should_retry=True,
            )
