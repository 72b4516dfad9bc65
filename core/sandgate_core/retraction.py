"""Records of which nobody knows whether they were written: a create's first write was cut off, its answer lost.

The caller is told that it failed, and nothing was done for it yet. Were the record there after all, it would count against
its team, and keep its idempotency key, until the core's next start. So it is taken out again, as soon as the store answers.
"""

from __future__ import annotations

import asyncio

import structlog

from sandgate_core.errands import Errands
from sandgate_core.store import Store

__all__ = ["Retraction"]

#: Seconds until an attempt, and from one to the next: a write that the store has not ended yet could not be found.
_PAUSE = 1.0
_log = structlog.get_logger(__name__)


class Retraction:
    """Takes records out again, all in one task."""

    def __init__(self, store: Store, errands: Errands) -> None:
        self._store = store
        self._errands = errands
        self._doubtful: set[str] = set()

    def begin(self, sandbox_id: str) -> None:
        """Does not wait."""
        idle = not self._doubtful
        self._doubtful.add(sandbox_id)
        if idle:
            self._errands.post(self._run(), "records that may have been written could not be taken out")

    async def _run(self) -> None:
        while self._doubtful:
            await asyncio.sleep(_PAUSE)
            doubtful = tuple(self._doubtful)
            try:
                await self._store.retract(doubtful)
            except Exception as error:
                _log.warning("records may be in the store that should not", reason=type(error).__name__)
            else:
                self._doubtful.difference_update(doubtful)
