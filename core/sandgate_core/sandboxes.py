"""The sandboxes of this deployment: what callers may do with them, and when.

This is the core's authority. Which states there are and how they follow one another stands in
:mod:`sandgate_core.states`. Three rules hold here:

* Readers (get, list, locate) answer from memory, take no lock and touch no disk.
* Whoever changes a sandbox holds its lock, so a kill waits for a create or another operation that is under way (C36,
  C37), two kills end it once (C35), and a pause and a connect that meet come one after the other (C59).
* A change that has begun runs to its end whatever becomes of its caller (:mod:`sandgate_core.errands`).

A sandbox of another owner does not exist, for every question (S12).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn

import structlog

from sandgate_core import clock
from sandgate_core.admission import Admission, CreateSpec
from sandgate_core.adoption import Adoption
from sandgate_core.agents import Agents
from sandgate_core.callers import DEFAULT_OWNER, Caller
from sandgate_core.chores import running
from sandgate_core.creation import Creation
from sandgate_core.egress import check_rules
from sandgate_core.elsewhere import Elsewhere
from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.listing import Page, Query, page_of
from sandgate_core.live import JoinedPause, Live, LiveTable
from sandgate_core.metrics import Metrics
from sandgate_core.network_changes import NetworkChanges
from sandgate_core.pausing import Pausing
from sandgate_core.policy import Policy, Wish
from sandgate_core.quotas import Quotas
from sandgate_core.records import PauseMode, SandboxRecord
from sandgate_core.recovery import Recovery
from sandgate_core.repeats import Repeats, in_progress
from sandgate_core.routing import Routing
from sandgate_core.samples import Series
from sandgate_core.sharing import Sharing
from sandgate_core.snapshot_table import SnapshotRecord, SnapshotTable
from sandgate_core.snapshots import Snapshots
from sandgate_core.states import State
from sandgate_core.store import Change, Store
from sandgate_core.teams import Teams
from sandgate_core.templates import Templates
from sandgate_errors import (
    AlreadyExists,
    CapabilityMissing,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    SandboxNotFound,
    SandboxUnreachable,
    SandgateError,
    Unavailable,
    Unimplemented,
)
from sandgate_plugin_api import Activity, AgentAddress, Backend, Capability

__all__ = ["Sandboxes"]

#: Seconds a stop waits for what is under way; then as long again for what it had to call off.
_STOP_PATIENCE = 10.0
#: Microseconds until a deadline is acted on again that could not be (the store failed).
_EXPIRY_RETRY = 2 * clock.MICROSECONDS
#: Seconds a backend may take to say whether a sandbox still exists.
_LOCATE_PATIENCE = 10.0
#: Microseconds of life after traffic has woken a sandbox, at least (C48).
_SHORTEST_WOKEN_LIFE = 300 * clock.MICROSECONDS
#: In which a sandbox serves requests of the data plane.
_AWAKE = frozenset({State.RUNNING, State.SNAPSHOTTING})
#: Copies that one fork may ask for.
_MOST_FORKS = 100
_log = structlog.get_logger(__name__)


class Sandboxes:
    """All sandboxes and the operations on them. Made by the core, :meth:`start` once, :meth:`stop` once."""

    def __init__(
        self,
        *,
        store: Store,
        teams: Teams,
        backends: Mapping[str, Backend],
        default_backend: str,
        agents: Agents,
        max_timeout: float,
        create_timeout: float,
        sharing: Sharing | None = None,
        policy: Policy | None = None,
    ) -> None:
        """``sharing``: with the other cores of the store; None where there are none."""
        self._store = store
        self._backends = backends
        self._max_life = clock.to_microseconds(max_timeout)
        self._errands = Errands()
        self._table = LiveTable(store) if sharing is None else LiveTable(store, may_act=sharing.lease.check)
        self._expiry = Expiry(self._expired)
        self._ending = Ending(table=self._table, backends=backends, agents=agents, errands=self._errands)
        self._pausing = Pausing(
            table=self._table, backends=backends, agents=agents, ending=self._ending, expiry=self._expiry
        )
        self._repeats = Repeats(store)
        self._metrics = Metrics(table=self._table, backends=backends, agents=agents, store=store)
        self._quotas = Quotas(teams, self._table, store)
        rows = SnapshotTable(store)
        self.templates = Templates(backends, rows, default=default_backend)
        self.snapshots = Snapshots(
            table=self._table, rows=rows, templates=self.templates, backends=backends, ending=self._ending
        )
        self._network = NetworkChanges(table=self._table, backends=backends, ending=self._ending)
        self._admission = Admission(self.templates)
        # For plugins that choose a backend: what that one has, and no other.
        self._admissions = {
            name: Admission(Templates({name: backend}, rows, default=name)) for name, backend in backends.items()
        }
        self._policy = policy or Policy()
        self._table.changed = self._policy.changed
        self._create_timeout = create_timeout
        self._creation = Creation(
            table=self._table,
            ending=self._ending,
            expiry=self._expiry,
            agents=agents,
            errands=self._errands,
            quotas=self._quotas,
            patience=create_timeout,
        )
        self._recovery = Recovery(
            table=self._table,
            backends=backends,
            ending=self._ending,
            pausing=self._pausing,
            errands=self._errands,
            theirs=None if sharing is None else sharing.roster.theirs,
        )
        self.adoption = Adoption(
            table=self._table,
            recovery=self._recovery,
            expiry=self._expiry,
            agents=agents,
            errands=self._errands,
            metrics=self._metrics,
            taken_up=self._taken_up,
        )
        self.elsewhere = Elsewhere(store)
        self.routing = Routing(self._table, backends=backends, sharing=sharing, node=store.node)
        self._chores = AsyncExitStack()
        self._stopping = False

    @property
    def node(self) -> str:
        """The node id of this core."""
        return self._store.node

    async def start(self) -> None:
        """Take up what the store and the backends hold. Raises FailedPrecondition."""
        await self._table.load()
        await self._recovery.run()
        for live in self._table:
            self._taken_up(live)
        await self._metrics.start()
        await self._chores.enter_async_context(running(self.snapshots.tidying))
        await self._chores.enter_async_context(self._policy.telling(self._record_here, self._extend))

    def _taken_up(self, live: Live) -> None:
        """A sandbox that this core finds, and looks after from now on."""
        record = live.record
        if record.state is State.RUNNING and record.end_at is not None:
            self._expiry.set(record.id, record.end_at)
        if record.egress_pending:
            self._errands.post(self._settle_network(live), "network rules could not be put in place")

    async def stop(self, *, kill: bool) -> None:
        """End what is under way, and with ``kill`` every sandbox; bounded."""
        self._stopping = True
        self._expiry.close()
        self._creation.abandon_all()
        await self._chores.aclose()
        await self._metrics.close()
        if kill:
            for live in self._table:
                self._errands.post(self._kill(live, note="the gateway stopped"), "a sandbox could not be ended")
        else:
            self._ending.close()
        await self._errands.close(patience=_STOP_PATIENCE)
        self._ending.close()

    # Questions

    async def get(self, sandbox_id: str, caller: Caller) -> SandboxRecord:
        name = parse_sandbox_id(sandbox_id)
        live = self._table.get(name)
        record = await self.elsewhere.find(name) if live is None else live.record
        if record is None or not caller.sees(record.owner) or not record.state.shown:
            raise SandboxNotFound.of(name)
        return record

    async def address(self, sandbox_id: str) -> str:
        """The IP address that a running sandbox of this core has for itself; empty: none, or its backend does not say."""
        live = self._table.get(sandbox_id)
        if live is None or live.record.state not in _AWAKE:
            return ""
        try:
            async with asyncio.timeout(_LOCATE_PATIENCE):
                return await self._backends[live.record.backend].address(live.record.handle) or ""
        except (SandgateError, TimeoutError) as error:
            _log.warning("a backend does not say where a sandbox is", sandbox=sandbox_id, reason=str(error))
            return ""

    async def list(self, query: Query, caller: Caller, *, template: str | None = None) -> Page:
        """One page. ``template`` is an id or a name."""
        query, template, where = await self._policy.query(query, owner=caller.owner, template=template)
        names = query.templates if template is None else await self.templates.names_of(template, owner=caller.owner)
        query = replace(query, templates=names)
        # What a plugin leaves out, no limit may have counted.
        of_others = query if where is None else replace(query, page_size=None, page_token="")
        others, running = await self.elsewhere.for_page(of_others, owner=caller.owner)
        mine = (record for record in self._table.records() if caller.sees(record.owner))
        # By id: one that changes hands just now may be here and there.
        found = {record.id: record for record in (*others, *mine) if where is None or where(record)}
        return page_of(found.values(), query, running_besides=running)

    def counts(self) -> Counter[tuple[str, str]]:
        """This core's that have not ended, by backend and state."""
        return Counter((record.backend, record.state.value) for record in self._table.records())

    def secured(self) -> tuple[SandboxRecord, ...]:
        """This core's that a token protects and that callers may see."""
        return tuple(record for record in self._table.records() if record.secure and record.state.shown)

    def metrics(self, sandbox_id: str, caller: Caller) -> Series:
        """What a sandbox of this core used; nothing while it is paused."""
        return self._metrics.series(self._shown(sandbox_id, caller).record.id)

    async def events(self, sandbox_id: str, caller: Caller) -> Sequence[Change]:
        """What happened to a sandbox, ended ones included for as long as their record is kept."""
        name = parse_sandbox_id(sandbox_id)
        live = self._table.get(name)
        record = await self._store.find(name) if live is None else live.record
        # One that is being ended has a history before and after that; one that is being made is known to nobody yet.
        if record is None or not caller.sees(record.owner) or record.state is State.CREATING:
            raise SandboxNotFound.of(name)
        return await self._store.history(name)

    async def template_id(self, name: str, caller: Caller) -> str:
        """The id of the template or snapshot that ``name`` stands for. Raises NotFound."""
        return (await self.templates.find(name, owner=caller.owner, patience=self._create_timeout)).id

    async def spawns(self, caller: Caller) -> dict[tuple[str, str], tuple[int, int]]:
        """How often each template was used, as :meth:`Store.spawns` counts."""
        return await self._store.spawns(caller.owner)

    async def locate(
        self, sandbox_id: str, caller: Caller, *, agent_lost: bool = False, wake: bool = False
    ) -> tuple[SandboxRecord, AgentAddress | None]:
        """Where the agent of a sandbox that is awake answers. Raises SandboxNotFound for any other (R4).

        ``agent_lost``: a call to the agent could not be delivered. The backend is asked whether the sandbox still
        exists, and its record ends if not; else one that died by itself would be shown as running to its deadline.

        ``wake``: resume one that is paused and may be woken by traffic; without it such a one has no agent (R15).
        """
        live = self._shown(sandbox_id, caller)
        # Whoever holds the lock is changing the sandbox: what comes of that is the answer.
        if (agent_lost or live.agent is None) and not live.lock.locked():
            await self._errands.finish(self._look_again(live))
            live = self._shown(sandbox_id, caller)
        if _may_be_woken(live.record):
            if not wake:
                return live.record, None
            await self._errands.finish(self._wake(live))
        if live.record.state not in _AWAKE:
            raise SandboxNotFound.of(live.record.id)
        if live.agent is None:
            raise SandboxUnreachable("the sandbox is there, but its agent does not answer")
        return live.record, live.agent

    def awake(self) -> Iterator[tuple[str, AgentAddress]]:
        """The sandboxes whose agents answer."""
        return ((live.record.id, live.agent) for live in self._table if live.agent and live.record.state in _AWAKE)

    def at_hand(self, sandbox_id: str, caller: Caller) -> tuple[SandboxRecord, AgentAddress] | None:
        """What :meth:`locate` would say, if that needs neither a backend nor an explanation."""
        try:
            self.routing.check()
            live = self._shown(sandbox_id, caller)
        except SandgateError:
            return None
        if live.agent is None or live.record.state not in _AWAKE:
            return None
        return live.record, live.agent

    # Operations

    async def create(self, spec: CreateSpec, caller: Caller) -> SandboxRecord:
        """A new sandbox, or the one that an earlier create with the same idempotency key made."""
        self._must_go_on()
        owner = caller.owner or DEFAULT_OWNER
        if spec.idempotency_key is not None:
            earlier = await self._repeats.earlier(owner=owner, key=spec.idempotency_key, digest=spec.digest)
            if earlier is not None:
                return earlier
        wish = await self._policy.wish(
            spec, owner=owner, is_ready=partial(self.templates.is_ready, spec.template, owner=owner)
        )
        await self._quotas.count_create(owner)
        asked_at = asyncio.get_running_loop().time()
        try:
            return await wish.tried(partial(self._create_on, wish, owner=owner, asked_at=asked_at))
        except AlreadyExists as error:
            # The other attempt wrote its record between our look and our write.
            raise in_progress() from error

    def take_back(self, record: SandboxRecord) -> None:
        """The answer of a create could not be delivered: nobody knows the sandbox, so it must not live (C12)."""
        live = self._table.get(record.id)
        if live is not None and record.idempotency_key is None:
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
        timeout, extend_only = await self._policy.life(live.record, timeout=timeout, extend_only=extend_only)
        return await self._errands.finish(self._set_timeout(live, timeout=timeout, extend_only=extend_only))

    def note_activity(self, sandbox_id: str, activity: Activity) -> None:
        """Somebody uses a sandbox, if it is one of this core's; plugins are told."""
        if (record := self._record_here(sandbox_id)) is not None:
            self._policy.used(record, activity)

    async def connect(
        self, sandbox_id: str, caller: Caller, *, timeout: int, memory: bool = True
    ) -> tuple[SandboxRecord, bool]:
        """The sandbox awake, its end no earlier than now + ``timeout`` microseconds, and whether it was paused (C42)."""
        live = self._connectable(sandbox_id, caller, timeout=timeout)
        return await self._errands.finish(self._connect(live, timeout=timeout, memory=memory))

    async def pause(
        self, sandbox_id: str, caller: Caller, *, memory: bool = True, healthy: bool = False
    ) -> SandboxRecord:
        """Returns when the sandbox is paused. Several at the same time join one pause (C39).

        ``healthy``: only if its agent answers. Raises FailedPrecondition when it is paused already, Conflict when a pause
        is under way that keeps something else or asks for less.
        """
        self._must_go_on()
        live = self._shown(sandbox_id, caller)
        mode = PauseMode.FULL if memory else PauseMode.FILESYSTEM
        joined = live.pausing
        if joined is None:
            task = self._errands.start(self._pause(live, mode=mode, healthy=healthy))
            joined = live.pausing = JoinedPause(mode=mode, healthy=healthy, task=task)
            task.add_done_callback(lambda _: _leave_pause(live))
        elif joined.mode is not mode or (healthy and not joined.healthy):
            raise Conflict(f"sandbox {live.record.id} is being paused already, in another way")
        return await asyncio.shield(joined.task)

    async def resume(
        self,
        sandbox_id: str,
        caller: Caller,
        *,
        timeout: int,
        memory: bool = True,
        pause_on_timeout: bool | None = None,
    ) -> SandboxRecord:
        """The older form of :meth:`connect`: raises FailedPrecondition when the sandbox is not paused (C45)."""
        live = self._connectable(sandbox_id, caller, timeout=timeout)
        changes = {} if pause_on_timeout is None else {"pause_on_timeout": pause_on_timeout}
        return await self._errands.finish(self._resume(live, timeout=timeout, memory=memory, changes=changes))

    async def snapshot(self, sandbox_id: str, caller: Caller, *, name: str, memory: bool | None) -> SnapshotRecord:
        """A copy of a running sandbox's files, which goes on (C51).

        Raises FailedPrecondition when it is paused, Conflict while another one of it is being taken.
        """
        self._must_go_on()
        live = self._shown(sandbox_id, caller)
        return await self._errands.finish(self._snapshot(live, name=name, memory=memory))

    async def delete_snapshot(self, name: str, caller: Caller) -> None:
        """By id or name; gone for callers when this returns (C53)."""
        await self.snapshots.delete(name, caller)
        self._tidy()

    def fork(self, sandbox_id: str, caller: Caller, *, count: int, timeout: int) -> NoReturn:
        """Raises what a fork is refused with, in the order of C50: the request, the sandbox, its state, its backend."""
        if not 1 <= count <= _MOST_FORKS:
            raise InvalidArgument(f"count must be 1 to {_MOST_FORKS}")
        record = self._connectable(sandbox_id, caller, timeout=timeout).record
        if record.state not in _AWAKE:
            raise FailedPrecondition(f"sandbox {record.id} is {record.state.value}")
        backend = self._backends[record.backend]
        if Capability.FORK not in backend.capabilities:
            raise CapabilityMissing.of(backend.name, Capability.FORK.value)
        raise Unimplemented("this version of the gateway does not offer to fork sandboxes")

    async def update_network(
        self, sandbox_id: str, caller: Caller, *, allow: tuple[str, ...], deny: tuple[str, ...], internet: bool
    ) -> SandboxRecord:
        """Replaces all rules about connections from inside; holds for new ones when it returns (C55)."""
        check_rules(allow=allow, deny=deny, internet=internet)
        self._must_go_on()
        live = self._shown(sandbox_id, caller)
        return await self._errands.finish(self._update_network(live, allow=allow, deny=deny, internet=internet))

    def _connectable(self, sandbox_id: str, caller: Caller, *, timeout: int) -> Live:
        """Raises what a connect is refused with: first for its timeout, then for the sandbox (C43)."""
        if timeout < clock.MICROSECONDS:
            raise InvalidArgument("timeout must be at least one second")
        longest = self._max_life if caller.owner is None else self._longest_life(caller.owner)
        if timeout > longest:
            raise InvalidArgument(f"timeout must be at most {longest // clock.MICROSECONDS} seconds")
        self._must_go_on()
        live = self._find(sandbox_id, caller)
        if live.record.state is State.KILLING:
            raise Conflict(f"sandbox {live.record.id} is being killed")
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
        return live

    def _longest_life(self, owner: str) -> int:
        return self._quotas.longest_life(owner, most=self._max_life)

    def _must_go_on(self) -> None:
        if self._stopping:
            raise Unavailable("the gateway is stopping", should_retry=True)

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
        if record.state not in _AWAKE:
            raise SandboxNotFound.of(record.id)

    async def _create_on(self, wish: Wish, backend: str | None, *, owner: str, asked_at: float) -> SandboxRecord:
        admission = self._admission if backend is None else self._admissions[backend]
        admitted = await admission.admit(
            wish.spec, owner=owner, longest_life=self._longest_life(owner), patience=self._create_timeout
        )
        return await self._creation.create(wish.admitted(admitted), owner=owner, asked_at=asked_at)

    def _record_here(self, sandbox_id: str) -> SandboxRecord | None:
        live = self._table.get(sandbox_id)
        return None if live is None else live.record

    async def _extend(self, sandbox_id: str, life: int) -> None:
        """Let a sandbox that is used live for ``life`` microseconds from now at least."""
        live = self._table.get(sandbox_id)
        if live is None:
            return
        async with live.lock:
            if live.record.state is State.RUNNING:
                await self._move_end(live, timeout=life, extend_only=True)

    async def _set_timeout(self, live: Live, *, timeout: int, extend_only: bool) -> SandboxRecord:
        async with live.lock:
            self._must_be_awake(live.record)
            await self._move_end(live, timeout=timeout, extend_only=extend_only)
            return live.record

    async def _move_end(self, live: Live, *, timeout: int, extend_only: bool) -> None:
        record, now = live.record, clock.now()
        latest = (record.started_at or now) + self._longest_life(record.owner)
        if timeout > 0 and latest <= now:
            raise InvalidArgument("the longest life of the sandbox is used up")
        end = min(now + max(timeout, 0), latest)
        if extend_only:
            end = max(end, record.end_at or 0)
        if end != record.end_at:
            await self._table.amend(live, end_at=end)
            self._expiry.set(record.id, end)

    async def _connect(self, live: Live, *, timeout: int, memory: bool) -> tuple[SandboxRecord, bool]:
        async with live.lock:
            await self._at_rest(live)
            paused = live.record.state is State.PAUSED
            if paused:
                await self._pausing.resume(live, life=timeout, memory=memory, note="connect")
            else:
                await self._move_end(live, timeout=timeout, extend_only=True)
            return live.record, paused

    async def _resume(self, live: Live, *, timeout: int, memory: bool, changes: dict[str, bool]) -> SandboxRecord:
        async with live.lock:
            await self._at_rest(live)
            if live.record.state is not State.PAUSED:
                raise FailedPrecondition(f"sandbox {live.record.id} is running already")
            await self._pausing.resume(live, life=timeout, memory=memory, note="resume", **changes)
            return live.record

    async def _pause(self, live: Live, *, mode: PauseMode, healthy: bool) -> SandboxRecord:
        async with live.lock:
            await self._at_rest(live)
            if live.record.state is State.PAUSED:
                raise FailedPrecondition(f"sandbox {live.record.id} is paused already")
            await self._pausing.pause(live, mode=mode, note="paused by request", healthy=healthy)
            return live.record

    async def _snapshot(self, live: Live, *, name: str, memory: bool | None) -> SnapshotRecord:
        with self.snapshots.only(live):
            parsed = await self.snapshots.check(live, name=name, memory=memory)
            try:
                async with live.lock:
                    await self._at_rest(live)
                    return await self.snapshots.take(live, name=parsed)
            finally:
                # A copy that this one replaces, or what is left of one that failed.
                self._tidy()

    def _tidy(self) -> None:
        self._errands.post(self.snapshots.tidy(), "snapshots could not be removed")

    async def _update_network(
        self, live: Live, *, allow: tuple[str, ...], deny: tuple[str, ...], internet: bool
    ) -> SandboxRecord:
        async with live.lock:
            await self._at_rest(live)
            await self._network.replace(live, allow=allow, deny=deny, internet=internet)
            return live.record

    async def _settle_network(self, live: Live) -> None:
        async with live.lock:
            await self._network.settle(live)

    async def _wake(self, live: Live) -> None:
        async with live.lock:
            await self._at_rest(live)
            # Another request may have woken it, or another pause may have kept less.
            if _may_be_woken(live.record):
                self._must_go_on()
                life = min(max(live.record.timeout, _SHORTEST_WOKEN_LIFE), self._longest_life(live.record.owner))
                await self._pausing.resume(live, life=life, memory=True, note="traffic")

    async def _at_rest(self, live: Live) -> None:
        """A sandbox whose lock is held is running or paused when this returns. Raises SandboxNotFound, Unavailable."""
        if not await self._pausing.settle(live):
            raise Unavailable(f"sandbox {live.record.id} is being paused", retry_after=5)
        await self.snapshots.settle(live)
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)

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
            self._errands.post(self._expire(live), "a sandbox could not be ended or paused at its deadline")

    async def _expire(self, live: Live) -> None:
        async with live.lock:
            # Not a deadline but a pause that was left between two states.
            if not await self._pausing.settle(live):
                return
            await self.snapshots.settle(live)
            record = live.record
            # The deadline may have been moved, and the sandbox ended, while this waited for the lock.
            if record.state is not State.RUNNING or record.end_at is None or record.end_at > clock.now():
                return
            try:
                if record.pause_on_timeout:
                    mode = PauseMode.FULL if record.pause_memory else PauseMode.FILESYSTEM
                    await self._pausing.pause(live, mode=mode, note="its time was up")
                else:
                    await self._end(live, final=State.KILLED, note="its time was up")
            except SandboxNotFound:
                return  # it had died by itself
            except Unavailable as error:
                # Also where another core may have taken it over: then that one acts.
                _log.warning("a deadline could not be kept yet", sandbox=record.id, reason=error.message)
                if not live.taken:
                    self._expiry.set(record.id, clock.now() + _EXPIRY_RETRY)
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


def _may_be_woken(record: SandboxRecord) -> bool:
    """Whether traffic resumes it: it asked for that, and what traffic was for is still there (R15)."""
    asleep = record.state in {State.PAUSING, State.PAUSED, State.RESUMING}
    return asleep and record.auto_resume and record.pause_mode is PauseMode.FULL


def _leave_pause(live: Live) -> None:
    live.pausing = None
