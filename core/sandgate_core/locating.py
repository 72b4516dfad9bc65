"""Where the agent of a sandbox is, for whoever has a request for it: the one question of the data plane.

It is asked for every request, so what is at hand is answered from memory. A sandbox that asked for it is woken on the way
(R15), and one that may have died by itself is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import structlog

from sandgate_core import clock
from sandgate_core.callers import Caller
from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.lifetimes import Lifetimes
from sandgate_core.live import Live, LiveTable
from sandgate_core.pausing import Pausing
from sandgate_core.records import PauseMode, SandboxRecord
from sandgate_core.settling import Settling
from sandgate_core.states import State
from sandgate_errors import SandboxNotFound, SandboxUnreachable, SandgateError
from sandgate_plugin_api import AgentAddress, Backend

__all__ = ["Locating"]

#: Seconds a backend may take to say whether a sandbox still exists.
_PATIENCE = 10.0
#: Microseconds of life after traffic has woken a sandbox, at least (C48).
_SHORTEST_WOKEN_LIFE = 300 * clock.MICROSECONDS
_log = structlog.get_logger(__name__)


class Locating:
    """Finds agents."""

    def __init__(
        self,
        *,
        table: LiveTable,
        backends: Mapping[str, Backend],
        errands: Errands,
        ending: Ending,
        pausing: Pausing,
        settling: Settling,
        lifetimes: Lifetimes,
        may_act: Callable[[], None],
        must_go_on: Callable[[], None],
    ) -> None:
        """``may_act`` raises when another core may act in this one's place, ``must_go_on`` when this one is stopping."""
        self._table = table
        self._backends = backends
        self._errands = errands
        self._ending = ending
        self._pausing = pausing
        self._settling = settling
        self._lifetimes = lifetimes
        self._may_act = may_act
        self._must_go_on = must_go_on

    async def locate(
        self, sandbox_id: str, caller: Caller, *, agent_lost: bool = False, wake: bool = False
    ) -> tuple[SandboxRecord, AgentAddress | None]:
        """Where the agent of a sandbox that is awake answers. Raises SandboxNotFound for any other (R4).

        ``agent_lost``: a call to the agent could not be delivered. The backend is asked whether the sandbox still
        exists, and its record ends if not; else one that died by itself would be shown as running to its deadline.

        ``wake``: resume one that is paused and may be woken by traffic; without it such a one has no agent (R15).
        """
        live = self._table.shown(sandbox_id, caller)
        # Whoever holds the lock is changing the sandbox: what comes of that is the answer.
        if (agent_lost or live.agent is None) and not live.lock.locked():
            await self._errands.finish(self._look_again(live))
            live = self._table.shown(sandbox_id, caller)
        if _may_be_woken(live.record):
            if not wake:
                return live.record, None
            await self._errands.finish(self._wake(live))
        if not live.record.state.awake:
            raise SandboxNotFound.of(live.record.id)
        if live.agent is None:
            raise SandboxUnreachable("the sandbox is there, but its agent does not answer")
        return live.record, live.agent

    def awake(self) -> Iterator[tuple[str, AgentAddress]]:
        """The sandboxes whose agents answer."""
        return ((live.record.id, live.agent) for live in self._table if live.agent and live.record.state.awake)

    def at_hand(self, sandbox_id: str, caller: Caller) -> tuple[SandboxRecord, AgentAddress] | None:
        """What :meth:`locate` would say, if that needs neither a backend nor an explanation."""
        try:
            self._may_act()
            live = self._table.shown(sandbox_id, caller)
        except SandgateError:
            return None
        if live.agent is None or not live.record.state.awake:
            return None
        return live.record, live.agent

    async def _wake(self, live: Live) -> None:
        async with live.lock:
            await self._settling.at_rest(live)
            # Another request may have woken it, or another pause may have kept less.
            if _may_be_woken(live.record):
                self._must_go_on()
                life = min(max(live.record.timeout, _SHORTEST_WOKEN_LIFE), self._lifetimes.longest(live.record.owner))
                await self._pausing.resume(live, life=life, memory=True, note="traffic")

    async def _look_again(self, live: Live) -> None:
        async with live.lock:
            record = live.record
            if record.state is not State.RUNNING:
                return
            try:
                async with asyncio.timeout(_PATIENCE):
                    placement = await self._backends[record.backend].locate(record.handle)
            except TimeoutError:
                raise SandboxUnreachable("the sandbox's backend does not answer") from None
            if placement is None:
                _log.warning("a sandbox is gone", sandbox=record.id, backend=record.backend)
                await self._ending.end(live, final=State.FAILED, note="it was found gone")
            else:
                live.agent = placement.agent


def _may_be_woken(record: SandboxRecord) -> bool:
    """Whether traffic resumes it: it asked for that, and what traffic was for is still there (R15)."""
    asleep = record.state in {State.PAUSING, State.PAUSED, State.RESUMING}
    return asleep and record.auto_resume and record.pause_mode is PauseMode.FULL
