"""Containers made ahead for one template: a create takes one that is up instead of waiting for the engine.

What is kept here is nobody's: no record of the core names it. So it ends with the backend object, and what a crash has
left of it ends at the next start (``DockerBackend.open``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandgate_plugin_docker.boxes import Box
from sandgate_plugin_docker.templates import Model

__all__ = ["Spare", "WarmPool"]

_log = logging.getLogger(__name__)

# A refill costs as much CPU as the first commands of the sandbox that made it needed: those come first.
REFILL_DELAY_SECONDS = 0.3
# After a failure, doubling: an image that is not to be had stays so for a while, and creates still try by themselves.
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A container that is up and nobody's."""

    #: Its name on the engine.
    container: str
    box: Box
    #: The image it was made of: its template's may be another by now.
    image: str


class WarmPool:
    """Keeps ``size`` containers of one template until :meth:`close` discards them."""

    def __init__(
        self,
        size: int,
        *,
        make: Callable[[], Awaitable[Spare]],
        discard: Callable[[Spare], Awaitable[None]],
    ) -> None:
        self._size = size
        self._make = make
        self._discard = discard
        self._ready: deque[Spare] = deque()
        #: Of an image that the template has no more.
        self._stale: list[Spare] = []
        self._wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    def open(self, name: str) -> None:
        """Start filling; the task lives as long as the pool, whoever takes from it."""
        self._wanted.set()
        self._filler = asyncio.create_task(self._fill(), name=f"warm sandboxes of {name}")

    def take(self, model: Model) -> Spare | None:
        """The oldest one of the template as it is now; None when none is ready. Another will be made."""
        self._wanted.set()
        while self._ready:
            spare = self._ready.popleft()
            if spare.image == model.image.id:
                return spare
            self._stale.append(spare)
        return None

    async def close(self) -> None:
        """Stop filling and discard what is there. What fails to go is left to the next start."""
        if self._filler is not None:
            self._filler.cancel()
            # Not awaited itself: its cancellation would look like one of this call.
            await asyncio.wait({self._filler})
        self._stale.extend(self._ready)
        self._ready.clear()
        await asyncio.gather(*(self._give_up(spare) for spare in self._stale))

    async def _give_up(self, spare: Spare) -> None:
        try:
            await self._discard(spare)
        except Exception as error:
            _log.warning("a warm sandbox was left behind: %s", error)

    async def _fill(self) -> None:
        retry = FIRST_RETRY_SECONDS
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._stale:
                await self._give_up(self._stale[-1])
                self._stale.pop()
            while len(self._ready) < self._size:
                try:
                    self._ready.append(await self._make())
                    retry = FIRST_RETRY_SECONDS
                except Exception as error:
                    _log.warning("no warm sandbox could be made, next try in %g s: %s", retry, error)
                    await asyncio.sleep(retry)
                    retry = min(2 * retry, LAST_RETRY_SECONDS)
            await asyncio.sleep(REFILL_DELAY_SECONDS)
