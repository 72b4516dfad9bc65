"""Tasks that outlive the request that started them.

A change that has begun must end in a defined state even when the caller goes away in the middle of it: the store and the
memory must agree, and what a backend began to destroy must be gone. Such work runs here, in tasks whose owner is the
core itself, and ends with it in bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

__all__ = ["Errands"]

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class Errands:
    """The server-lifetime set of tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin ``work``; whoever asked for it looks at the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The outcome of ``work``, which runs to its end even when the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    def post(self, work: Coroutine[Any, Any, object], what: str) -> None:
        """Begin ``work`` that nobody waits for; its failure goes to the log."""
        self.start(work).add_done_callback(lambda task: _report(task, what))

    async def close(self, *, patience: float) -> None:
        """Wait for what is under way, up to ``patience`` seconds, then cancel the rest and wait once more."""
        await self._settle(patience)
        for task in self._tasks:
            task.cancel()
        await self._settle(patience)
        if self._tasks:
            _log.error("work did not end when the core stopped", tasks=len(self._tasks))

    async def _settle(self, patience: float) -> None:
        # Work may start further work, so waiting for one generation is not enough.
        try:
            async with asyncio.timeout(patience):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        except TimeoutError:
            pass

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled never asks; without this asyncio would complain


def _report(task: asyncio.Task[Any], what: str) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error(what, exc_info=error)
