"""The sandboxes of this deployment: what callers may do with them, and when.

This is the core's authority. Which states there are and how they follow one another stands in
:mod:`sandgate_core.states`. Three rules hold here:

* Readers (get, list, locate) answer from memory, take no lock and touch no disk.
* Whoever changes a sandbox holds its lock, so a kill waits for a create or another operation that is under way (C36,
  C37), and two kills end it once (C35).
* A change that has begun runs to its end whatever becomes of its caller (:mod:`sandgate_core.errands`).

A sandbox of another owner does not exist, for every question (S12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from sandgate_core import clock
from sandgate_core.admission import Admission, CreateSpec
from sandgate_core.agents import Agents
from sandgate_core.callers import DEFAULT_OWNER, Caller
from sandgate_core.creation import Creation
from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.listing import Page, Query, page_of
from sandgate_core.live import Live, LiveTable
from sandgate_core.records import SandboxRecord
from sandgate_core.recovery import Recovery
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_errors import Conflict, InvalidArgument, SandboxNotFound, SandboxUnreachable, Unavailable
from sandgate_plugin_api import AgentAddress, Backend

__all__ = ["Sandboxes"]

#: Seconds a stop waits for what is under way; then as long again for what it had to call off.
_STOP_PATIENCE = 10.0
#: Microseconds until a deadline is acted on again that could not be (the store failed).
_EXPIRY_RETRY = 2 * clock.MICROSECONDS
#: Seconds a backend may take to say whether a sandbox still exists.
_LOCATE_PATIENCE = 10.0
_log = structlog.get_logger(__name__)


class Sandboxes:
    """All sandboxes and the operations on them. Made by the core, :meth:`start` once, :meth:`stop` once."""

    def __init__(
        self,
        *,
        store: Store,
        backends: Mapping[str, Backend],
        default_backend: str,
        agents: Agents,
        max_timeout: float,
        create_timeout: float,
    ) -> None:
        self._backends = backends
        self._max_life = clock.to_microseconds(max_timeout)
        self._errands = Errands()
        self._table = LiveTable(store)
        self._expiry = Expiry(self._expired)
        self._ending = Ending(table=self._table, backends=backends, agents=agents, errands=self._errands)
        self._admission = Admission(backends, default_backend=default_backend, max_timeout=self._max_life)
        self._creation = Creation(
            table=self._table,
            ending=self._ending,
            expiry=self._expiry,
            agents=agents,
            errands=self._errands,
            patience=create_timeout,
        )
        self._stopping = False

    async def start(self) -> None:
        """Take up what the store and the backends hold. Raises FailedPrecondition."""
        await self._table.load()
        recovery = Recovery(table=self._table, backends=self._backends, ending=self._ending, errands=self._errands)
        await recovery.run()
        for record in self._table.records():
            if record.state is State.RUNNING and record.end_at is not None:
                self._expiry.set(record.id, record.end_at)

    async def stop(self, *, kill: bool) -> None:
        """End what is under way, and with ``kill`` every sandbox; bounded."""
        self._stopping = True
        self._expiry.close()
        self._creation.abandon_all()
        if kill:
            for live in self._table:
                self._errands.post(self._kill(live, note="the gateway stopped"), "a sandbox could not be ended")
        else:
            self._ending.close()
        await self._errands.close(patience=_STOP_PATIENCE)
        self._ending.close()

    # Questions

    def get(self, sandbox_id: str, caller: Caller) -> SandboxRecord:
        return self._shown(sandbox_id, caller).record

    async def list(self, query: Query, caller: Caller, *, template: str | None = None) -> Page:
        """One page. ``template`` is an id or a name."""
        names = query.templates if template is None else await self._admission.names_of(template)
        mine = (record for record in self._table.records() if caller.sees(record.owner))
        return page_of(mine, Query(**{**query.__dict__, "templates": names}))

    def secured(self) -> tuple[SandboxRecord, ...]:
        """Those that a token protects and that callers may see."""
        return tuple(record for record in self._table.records() if record.secure and record.state.shown)

    async def locate(
        self, sandbox_id: str, caller: Caller, *, agent_lost: bool = False
    ) -> tuple[SandboxRecord, AgentAddress]:
        """Where the agent of a sandbox that is awake answers. Raises SandboxNotFound for any other (R4).

        ``agent_lost``: a call to the agent could not be delivered. The backend is asked whether the sandbox still
        exists, and its record ends if not; else one that died by itself would be shown as running to its deadline.
        """
        live = self._shown(sandbox_id, caller)
        # Whoever holds the lock is changing the sandbox: what comes of that is the answer.
        if (agent_lost or live.agent is None) and not live.lock.locked():
            await self._errands.finish(self._look_again(live))
            live = self._shown(sandbox_id, caller)
        if live.record.state not in {State.RUNNING, State.SNAPSHOTTING}:
            raise SandboxNotFound.of(live.record.id)
        if live.agent is None:
            raise SandboxUnreachable("the sandbox is there, but its agent does not answer")
        return live.record, live.agent

    # Operations

    async def create(self, spec: CreateSpec, caller: Caller) -> SandboxRecord:
        if self._stopping:
            raise Unavailable("the gateway is stopping", should_retry=True)
        admitted = await self._admission.admit(spec)
        return await self._creation.create(admitted, owner=caller.owner or DEFAULT_OWNER)

    def take_back(self, record: SandboxRecord) -> None:
        """The answer of a create could not be delivered: nobody knows the sandbox, so it must not live (C12)."""
        live = self._table.get(record.id)
        if live is not None:
            self._errands.post(
                self._kill(live, note="the answer of create was not delivered"), "an unknown sandbox lives"
            )

    async def kill(self, sandbox_id: str, caller: Caller) -> None:
        """Returns when nothing of the sandbox is left. Raises SandboxNotFound for an unknown or ended one."""
        live = self._find(sandbox_id, caller)
        await self._errands.finish(self._kill(live, note="killed by request"))

    async def set_timeout(self, sandbox_id: str, caller: Caller, *, timeout: int, extend_only: bool) -> SandboxRecord:
        """With the new end: now + ``timeout`` microseconds, within the longest life (C28 to C32)."""
        live = self._shown(sandbox_id, caller)
        self._must_be_awake(live.record)
        return await self._errands.finish(self._set_timeout(live, timeout=timeout, extend_only=extend_only))

    async def connect(self, sandbox_id: str, caller: Caller, *, timeout: int) -> SandboxRecord:
        """The sandbox, its end no earlier than now + ``timeout`` microseconds (C42, C43)."""
        if timeout < clock.MICROSECONDS:
            raise InvalidArgument("timeout must be at least one second")
        if timeout > self._max_life:
            raise InvalidArgument(f"timeout must be at most {self._max_life // clock.MICROSECONDS} seconds")
        live = self._find(sandbox_id, caller)
        if live.record.state is State.KILLING:
            raise Conflict(f"sandbox {live.record.id} is being killed")
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
        return await self._errands.finish(self._set_timeout(live, timeout=timeout, extend_only=True))

    def _find(self, sandbox_id: str, caller: Caller) -> Live:
        """A sandbox that has not ended, in any state. Raises InvalidArgument, SandboxNotFound."""
        name = parse_sandbox_id(sandbox_id)
        live = self._table.get(name)
        if live is None or not caller.sees(live.record.owner):
            raise SandboxNotFound.of(name)
        return live

    def _shown(self, sandbox_id: str, caller: Caller) -> Live:
        live = self._find(sandbox_id, caller)
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
        return live

    @staticmethod
    def _must_be_awake(record: SandboxRecord) -> None:
        """Only a sandbox that is awake has an end to move (C31)."""
        if record.state in {State.PAUSING, State.RESUMING}:
            raise Conflict(f"sandbox {record.id} is {record.state.value}")
        if record.state not in {State.RUNNING, State.SNAPSHOTTING}:
            raise SandboxNotFound.of(record.id)

    async def _set_timeout(self, live: Live, *, timeout: int, extend_only: bool) -> SandboxRecord:
        async with live.lock:
            record = live.record
            self._must_be_awake(record)
            now = clock.now()
            latest = (record.started_at or now) + self._max_life
            if timeout > 0 and latest <= now:
                raise InvalidArgument("the longest life of the sandbox is used up")
            end = min(now + max(timeout, 0), latest)
            if extend_only:
                end = max(end, record.end_at or 0)
            if end != record.end_at:
                await self._table.amend(live, end_at=end)
                self._expiry.set(record.id, end)
            return live.record

    async def _kill(self, live: Live, *, note: str) -> None:
        async with live.lock:
            if live.record.state.ended:
                raise SandboxNotFound.of(live.record.id)
            if not await self._end(live, final=State.KILLED, note=note):
                raise Unavailable("the sandbox cannot be ended at the moment; the gateway keeps trying")

    async def _end(self, live: Live, *, final: State, note: str) -> bool:
        """Gone for callers first, then freed."""
        if live.record.state is not State.KILLING:
            await self._table.move(live, State.KILLING, note=note)
        self._expiry.drop(live.record.id)
        return await self._ending.free(live, final=final, note=note)

    def _expired(self, sandbox_id: str) -> None:
        live = self._table.get(sandbox_id)
        if live is not None:
            self._errands.post(self._expire(live), "a sandbox could not be ended at its deadline")

    async def _expire(self, live: Live) -> None:
        async with live.lock:
            record = live.record
            # The deadline may have been moved, and the sandbox ended, while this waited for the lock.
            if record.state is not State.RUNNING or record.end_at is None or record.end_at > clock.now():
                return
            try:
                await self._end(live, final=State.KILLED, note="its time was up")
            except Exception:
                self._expiry.set(record.id, clock.now() + _EXPIRY_RETRY)
                raise

    async def _look_again(self, live: Live) -> None:
        async with live.lock:
            record = live.record
            if record.state is not State.RUNNING:
                return
            try:
                async with asyncio.timeout(_LOCATE_PATIENCE):
                    placement = await self._backends[record.backend].locate(record.handle)
            except TimeoutError:
                raise SandboxUnreachable("the sandbox's backend does not answer") from None
            if placement is None:
                _log.warning("a sandbox is gone", sandbox=record.id, backend=record.backend)
                await self._end(live, final=State.FAILED, note="it was found gone")
            else:
                live.agent = placement.agent
