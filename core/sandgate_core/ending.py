"""How a sandbox ends: everything it held is freed, however often that takes.

A sandbox that is being ended is gone for callers first (state ``killing``; a half-made one was never shown) and is
destroyed then, so nobody is sent to an agent that is going away (R14). Where the backend fails, the record stays in its
state and the attempt is repeated; after a crash of the core the next start goes on (:mod:`sandgate_core.recovery`).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping

import structlog

from sandgate_core.agents import Agents
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.live import Live, LiveTable
from sandgate_core.states import State
from sandgate_errors import Unavailable
from sandgate_plugin_api import Backend

__all__ = ["Ending"]

#: Seconds. What a backend frees may be large (a tree of files), so this only guards against one that never returns.
_DESTROY_PATIENCE = 60.0
_FIRST_RETRY = 1.0
_LONGEST_RETRY = 60.0
_log = structlog.get_logger(__name__)


class Ending:
    """Frees sandboxes."""

    def __init__(
        self,
        *,
        table: LiveTable,
        backends: Mapping[str, Backend],
        agents: Agents,
        errands: Errands,
        expiry: Expiry,
    ) -> None:
        self._table = table
        self._expiry = expiry
        self._backends = backends
        self._agents = agents
        self._errands = errands
        self._closed = False

    async def end(self, live: Live, *, final: State, note: str) -> bool:
        """A sandbox whose lock is held is gone for callers, then freed as :meth:`free` says."""
        if live.record.state is not State.KILLING:
            await self._table.move(live, State.KILLING, note=note)
        self._expiry.drop(live.record.id)
        return await self.free(live, final=final, note=note)

    async def free(self, live: Live, *, final: State, note: str, wait: float = _FIRST_RETRY) -> bool:
        """Destroy a sandbox whose lock is held and bring its record to ``final``.

        False: it could not be done now. The reason is in the log and the attempt is repeated after ``wait`` seconds.
        """
        record = live.record
        try:
            async with asyncio.timeout(_DESTROY_PATIENCE):
                await self._backends[record.backend].destroy(record.handle)
            if live.agent is not None:
                await self._agents.forget(live.agent.target)
            await self._table.move(live, final, note=note)
        except Exception as error:
            if live.taken:
                return False  # the other core frees it
            # An engine that is down says so at every attempt for every sandbox: where that was in the code is no news.
            fault = not isinstance(error, Unavailable)
            _log.error(
                "a sandbox could not be freed",
                sandbox=record.id,
                backend=record.backend,
                retry_in=wait,
                error=None if fault else str(error),
                exc_info=fault,
            )
            await self._release_key(live)
            self._try_again(live, final=final, note=note, wait=wait)
            return False
        _log.info("sandbox ended", sandbox=record.id, state=final.value, reason=note)
        return True

    async def _release_key(self, live: Live) -> None:
        """What was being made will never be: whoever repeats its create need not wait until the last of it is gone."""
        if live.record.state is not State.CREATING or live.record.idempotency_key is None:
            return
        try:
            await self._table.amend(live, idempotency_key=None)
        except Exception as error:
            _log.warning("a key for repeats was not released yet", sandbox=live.record.id, reason=type(error).__name__)

    def close(self) -> None:
        """No further attempts: the next start of the core goes on."""
        self._closed = True
        for live in self._table:
            if live.retry is not None:
                live.retry.cancel()

    def _try_again(self, live: Live, *, final: State, note: str, wait: float) -> None:
        if self._closed:
            return
        if live.retry is not None:
            live.retry.cancel()
        again = min(2 * wait, _LONGEST_RETRY)

        def attempt() -> None:
            live.retry = None
            self._errands.post(self._retry(live, final=final, note=note, wait=again), "a sandbox could not be freed")

        # The request that ended the sandbox is answered by then: its id does not belong on what comes of the retries.
        live.retry = asyncio.get_running_loop().call_later(wait, attempt, context=contextvars.Context())

    async def _retry(self, live: Live, *, final: State, note: str, wait: float) -> None:
        async with live.lock:
            if not live.record.state.ended and not live.taken:
                await self.free(live, final=final, note=note, wait=wait)
