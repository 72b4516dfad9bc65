"""Rows of the store that every core of it holds in memory, so that a call is checked against them without a question.

Keys (:mod:`sandgate_core.keys`) and teams (:mod:`sandgate_core.teams`). They are written through: the store first, then the
memory. Where several cores share the store, a core that changes something begins from what the store says, and tells the
others before it answers; they read all anew (``docs/architecture.md``, "Several cores on one database").
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sandgate_core.store import Store

__all__ = ["Mirrored"]


class Mirrored(abc.ABC):
    """What is held, and how it is changed; a subclass says what is read."""

    def __init__(self, store: Store, *, changed: Callable[[], Awaitable[None]] | None = None) -> None:
        """``changed`` tells the other cores; None where there are none."""
        self._store = store
        self._changed = changed
        #: Held over a change and over reading all: two changes must not both begin from the same state, and what is read
        #: must not undo what was changed meanwhile.
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Go by what the store says."""
        async with self._lock:
            await self._read()

    @abc.abstractmethod
    async def _read(self) -> None:
        """Put what the store says in the place of what is held. Called with the lock."""

    @property
    def _is_shared(self) -> bool:
        """Whether other cores change the same rows."""
        return self._changed is not None

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Around a change: begins from what the store says, and ends when the other cores go by it."""
        async with self._lock:
            if self._is_shared:
                await self._read()
            yield
        if self._changed is not None:
            await self._changed()
