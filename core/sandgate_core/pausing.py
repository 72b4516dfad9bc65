"""How a sandbox is paused and comes back (C39 to C49).

Both are changes under the sandbox's lock, by way of a passing state that says in the store what is under way: ``pausing``
with what is to be kept, ``resuming`` with what was. Where one of them fails, the sandbox is again what it was before; where
nobody can say what it is (a backend that hangs, a crash of the core in between), the pause is finished (:meth:`settle`),
because that is the one direction that is always open: a sandbox without memory can be paused, not un-paused.

Streams of callers are left alone: after a pause with memory they go on where they were, and the agent does not count the
pause into time limits of commands (T11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import structlog

from sandgate_core import clock
from sandgate_core.agents import Agents
from sandgate_core.bring_up import BringUp
from sandgate_core.capacity import of_the_machines
from sandgate_core.ending import Ending
from sandgate_core.expiry import Expiry
from sandgate_core.live import Live, LiveTable
from sandgate_core.records import PauseMode
from sandgate_core.states import State
from sandgate_errors import (
    CapabilityMissing,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    SandboxNotFound,
    SandboxUnreachable,
    Unavailable,
)
from sandgate_plugin_api import Backend, Capability, Placement

__all__ = ["Pausing"]

#: Seconds a backend may take for a pause or a resume: a large memory may have to be written or read.
_PATIENCE = 60.0
#: Seconds for an agent's answer. Before a pause: one that is slower hangs. After a resume: its memory may have to come
#: back first.
_HEALTH_PATIENCE = 5.0
_AWAKE_PATIENCE = 15.0
#: Seconds until a client may ask again for a pause of a sandbox whose agent did not answer.
_RETRY_AFTER = 5.0
#: Microseconds until a pause that could not be finished is tried again.
_RETRY = 5 * clock.MICROSECONDS
#: A client that knows it offers to start the sandbox from its files instead (rest.md 1.3).
_UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"
_PASSING = frozenset({State.PAUSING, State.RESUMING})
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class Pausing:
    """Pauses and resumes sandboxes whose lock the caller holds."""

    def __init__(
        self, *, table: LiveTable, backends: Mapping[str, Backend], agents: Agents, ending: Ending, expiry: Expiry
    ) -> None:
        self._bring_up = BringUp(agents)
        self._table = table
        self._backends = backends
        self._agents = agents
        self._ending = ending
        self._expiry = expiry

    async def pause(self, live: Live, *, mode: PauseMode, note: str, healthy: bool = False) -> None:
        """From running to paused. ``healthy``: only if the agent answers, else Unavailable.

        Raises CapabilityMissing, Unavailable, DeadlineExceeded, SandboxNotFound (it had died by itself).
        """
        self._check_offered(live, mode)
        answers = await self._answers(live, asked=healthy or mode is PauseMode.FULL)
        if healthy and not answers:
            raise Unavailable(
                "the sandbox's agent does not answer, and it was to be paused only if it does", retry_after=_RETRY_AFTER
            )
        await self._table.move(live, State.PAUSING, note=note, pause_mode=mode)
        self._expiry.drop(live.record.id)
        with self._never_between(live):
            try:
                handle = await self._stopped(live)
            except (SandboxNotFound, DeadlineExceeded):
                raise
            except Exception:
                await self._run_on(live)
                raise
            await self._rest(live, handle, answers=answers, note=note)
        _log.info("sandbox paused", sandbox=live.record.id, mode=mode.value, reason=note)

    async def resume(self, live: Live, *, life: int, memory: bool, note: str, **changes: Any) -> None:
        """From paused to running, with ``life`` microseconds from readiness (C42, C49).

        ``memory`` False: on its files alone, whatever else was kept. ``changes`` of the record come with it.
        Raises FailedPrecondition (its memory cannot be brought back), SandboxNotFound, DeadlineExceeded or the
        backend's reason; the sandbox is paused then, or gone.
        """
        before = live.record.pause_mode
        mode = before if memory else PauseMode.FILESYSTEM
        if mode is not before:
            self._check_offered(live, PauseMode.FILESYSTEM)
        await self._table.move(live, State.RESUMING, note=note, pause_mode=mode)
        with self._never_between(live):
            try:
                placement = await self._start(live, give_up_memory=mode is not before)
                started = clock.now()
                times = {"started_at": started, "end_at": started + life}
                kept = {"handle": dict(placement.handle), "pause_mode": None, "agent_unresponsive": False}
                await self._table.move(live, State.RUNNING, note="ready", **kept, **times, **changes)
            except (SandboxNotFound, DeadlineExceeded):
                raise
            except Exception as error:
                await self.settle(live)
                _explain(error)
        live.agent = placement.agent
        self._expiry.set(live.record.id, started + life)
        _log.info("sandbox resumed", sandbox=live.record.id, memory=mode is PauseMode.FULL, reason=note)

    async def settle(self, live: Live) -> bool:
        """Finish the pause of a sandbox that is between states. False: not now; it is tried again."""
        if live.record.state not in _PASSING:
            return True
        try:
            with self._never_between(live):
                handle = await self._stopped(live)
                await self._rest(live, handle, answers=not live.record.agent_unresponsive, note="a pause was finished")
        except SandboxNotFound:
            return True
        except Exception:
            _log.exception("a pause could not be finished", sandbox=live.record.id, backend=live.record.backend)
            return False
        return True

    @contextmanager
    def _never_between(self, live: Live) -> Iterator[None]:
        """Whatever leaves a sandbox between two states makes the expiry come back to it, and that settles it."""
        try:
            yield
        finally:
            if live.record.state in _PASSING:
                self._expiry.set(live.record.id, clock.now() + _RETRY)

    async def _stopped(self, live: Live) -> Mapping[str, object]:
        """The backend's pause; its handle."""
        record = live.record
        memory = record.pause_mode is not PauseMode.FILESYSTEM
        try:
            return await _bounded(live, self._backends[record.backend].pause(record.handle, memory=memory))
        except NotFound:
            await self._bury(live)

    async def _rest(self, live: Live, handle: Mapping[str, object], *, answers: bool, note: str) -> None:
        """The record of a sandbox that its backend has paused."""
        await self._table.move(live, State.PAUSED, note=note, handle=dict(handle), agent_unresponsive=not answers)
        self._expiry.drop(live.record.id)
        if live.record.pause_mode is PauseMode.FILESYSTEM and live.agent is not None:
            await self._agents.forget(live.agent.target)
            live.agent = None

    async def _start(self, live: Live, *, give_up_memory: bool) -> Placement:
        """The backend's resume, and what the agent must know."""
        record = live.record
        backend = self._backends[record.backend]
        try:
            handle = record.handle
            if give_up_memory:
                handle = await _bounded(live, backend.pause(handle, memory=False))
            with of_the_machines():
                placement = await _bounded(live, backend.resume(handle))
        except NotFound:
            await self._bury(live)
        if record.pause_mode is PauseMode.FILESYSTEM:
            await self._bring_up.run(placement.agent, record, patience=_PATIENCE)
        elif not await self._agents.answers(placement.agent, patience=_AWAKE_PATIENCE):
            raise SandboxUnreachable("the sandbox's agent does not answer after the resume")
        return placement

    async def _answers(self, live: Live, *, asked: bool) -> bool:
        """Whether the agent answers before a pause; one that is not asked counts as if it did."""
        if not asked:
            return True
        return live.agent is not None and await self._agents.answers(live.agent, patience=_HEALTH_PATIENCE)

    async def _run_on(self, live: Live) -> None:
        """A pause came to nothing and the sandbox runs as before."""
        await self._table.move(live, State.RUNNING, note="the pause failed", pause_mode=None)
        if live.record.end_at is not None:
            self._expiry.set(live.record.id, live.record.end_at)

    async def _bury(self, live: Live) -> NoReturn:
        await self._ending.end(live, final=State.FAILED, note="it was found gone")
        raise SandboxNotFound.of(live.record.id)

    def _check_offered(self, live: Live, mode: PauseMode) -> None:
        backend = self._backends[live.record.backend]
        needed = Capability.PAUSE if mode is PauseMode.FULL else Capability.PAUSE_FILESYSTEM
        if needed not in backend.capabilities:
            raise CapabilityMissing.of(backend.name, needed.value)


async def _bounded(live: Live, work: Awaitable[_T]) -> _T:
    """What a backend is asked to do, within its time. Nobody knows what became of a sandbox that took longer."""
    try:
        async with asyncio.timeout(_PATIENCE) as bound:
            return await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise DeadlineExceeded(f"sandbox {live.record.id} did not change within {_PATIENCE:g} seconds") from None


def _explain(error: Exception) -> NoReturn:
    """What a client hears of a resume that failed: the one reason it can do something about has a name of its own."""
    if isinstance(error, DataLoss | SandboxUnreachable):
        raise FailedPrecondition(
            f"{error.message}; the sandbox stays paused, and can be started anew from its files",
            error_code=_UNRESPONSIVE,
        ) from error
    raise error
