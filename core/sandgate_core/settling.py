"""A sandbox at rest, running or paused, before somebody changes it.

Whoever changes a sandbox holds its lock, so nobody else is in the middle of something. But a change that broke off, by a
failure of its backend or of the store, may have left it between two states, which is put right first.
"""

from __future__ import annotations

from sandgate_core.live import Live
from sandgate_core.pausing import Pausing
from sandgate_core.snapshots import Snapshots
from sandgate_errors import SandboxNotFound, Unavailable

__all__ = ["Settling"]


class Settling:
    """Puts right what is between two states."""

    def __init__(self, *, pausing: Pausing, snapshots: Snapshots) -> None:
        self._pausing = pausing
        self._snapshots = snapshots

    async def settle(self, live: Live) -> bool:
        """False: not now; it is tried again."""
        if not await self._pausing.settle(live):
            return False
        await self._snapshots.settle(live)
        return True

    async def at_rest(self, live: Live) -> None:
        """A sandbox whose lock is held is running or paused when this returns. Raises SandboxNotFound, Unavailable."""
        if not await self.settle(live):
            raise Unavailable(f"sandbox {live.record.id} is being paused", retry_after=5)
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
