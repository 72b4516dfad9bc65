"""Whether an event loop is held up, told apart from a machine that is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Pulse"]

_INTERVAL = 0.02


class Pulse:
    """The longest time between two beats of the loop, and of a thread beside it, which a busy machine holds up as well."""

    def __init__(self) -> None:
        self.loop = 0.0
        self.thread = 0.0
        self._over = threading.Event()

    @classmethod
    @asynccontextmanager
    async def taken(cls) -> AsyncIterator[Pulse]:
        """For the block."""
        pulse = cls()
        beside = threading.Thread(target=pulse._beat, name="pulse", daemon=True)
        beating = asyncio.create_task(pulse._beat_in_loop())
        beside.start()
        try:
            yield pulse
            # A block that ends in a call that held everything up has not been noticed yet.
            await asyncio.sleep(_INTERVAL)
        finally:
            pulse._over.set()
            beating.cancel()
            await asyncio.wait({beating})
            await asyncio.to_thread(beside.join)

    async def _beat_in_loop(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_INTERVAL)
            now = time.monotonic()
            self.loop, last = max(self.loop, now - last), now

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_INTERVAL):
            now = time.monotonic()
            self.thread, last = max(self.thread, now - last), now
