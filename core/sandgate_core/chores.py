"""Chores: what the core does every few seconds as long as it runs, and ends in order.

A chore that writes to the store is not cancelled in the middle of a statement, which may cost the driver its connection:
it is asked to end and looks at that between two rounds. Only one that does not end in time is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

__all__ = ["Chore", "Pause", "running"]

#: Waits so many seconds; False when it is time to end.
Pause: TypeAlias = Callable[[float], Coroutine[Any, Any, bool]]
Chore: TypeAlias = Callable[[Pause], Coroutine[Any, Any, None]]

#: Seconds that a round may take to its end when the core stops.
_PATIENCE = 10.0


@asynccontextmanager
async def running(*chores: Chore) -> AsyncIterator[None]:
    """The chores run while the block does."""
    stop = asyncio.Event()

    async def pause(seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            return True
        return False

    tasks = {asyncio.create_task(chore(pause)) for chore in chores}
    try:
        yield
    finally:
        stop.set()
        _, late = await asyncio.wait(tasks, timeout=_PATIENCE) if tasks else (tasks, tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
