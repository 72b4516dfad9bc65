"""The sandboxes of this deployment: what callers may do with them, and when.

This is the core's authority. Which states there are and how they follow one another stands in
:mod:`sandgate_core.states`. Here are the operations, and how all that they need is put together; what callers may ask is
in :mod:`sandgate_core.questions`, the way to the agents in :mod:`sandgate_core.locating`, and the ends of lives in
:mod:`sandgate_core.lifetimes`. Three rules hold:

* Readers (get, list, locate) answer from memory, take no lock and touch no disk.
* Whoever changes a sandbox holds its lock, so a kill waits for a create or another operation that is under way (C36,
  C37), two kills end it once (C35), and a pause and a connect that meet come one after the other (C59).
* A change that has begun runs to its end whatever becomes of its caller (:mod:`sandgate_core.errands`).

A sandbox of another owner does not exist, for every question (S12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import NoReturn

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
from sandgate_core.lifetimes import Lifetimes, must_be_awake
from sandgate_core.live import JoinedPause, Live, LiveTable
from sandgate_core.locating import Locating
from sandgate_core.metrics import Metrics
from sandgate_core.network_changes import NetworkChanges
from sandgate_core.pausing import Pausing
from sandgate_core.policy import Policy, Wish
from sandgate_core.questions import Questions
from sandgate_core.quotas import Quotas
from sandgate_core.records import PauseMode, SandboxRecord
from sandgate_core.recovery import Recovery
from sandgate_core.repeats import Repeats, in_progress
from sandgate_core.retraction import Retraction
from sandgate_core.routing import Routing
from sandgate_core.settling import Settling
from sandgate_core.sharing import Sharing
from sandgate_core.snapshot_table import SnapshotRecord, SnapshotTable
from sandgate_core.snapshots import Snapshots
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_core.teams import Teams
from sandgate_core.templates import Templates
from sandgate_errors import (
    AlreadyExists,
    CapabilityMissing,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    SandboxNotFound,
    Unavailable,
    Unimplemented,
)
from sandgate_plugin_api import Activity, Backend, Capability

__all__ = ["Sandboxes"]

#: Seconds a stop waits for what is under way; then as long again for what it had to call off.
_STOP_PATIENCE = 10.0
#: Seconds until a client should ask again: a gateway that is started again, and for a sandbox that could not be ended.
_BACK = 2.0
_TRIED_AGAIN = 5.0
#: Copies that one fork may ask for.
_MOST_FORKS = 100


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
        self._errands = Errands()
        self._table = LiveTable(store) if sharing is None else LiveTable(store, may_act=sharing.lease.check)
        self._expiry = Expiry(self._expired)
        self._ending = Ending(
            table=self._table, backends=backends, agents=agents, errands=self._errands, expiry=self._expiry
        )
        self._pausing = Pausing(
            table=self._table, backends=backends, agents=agents, ending=self._ending, expiry=self._expiry
        )
        self._repeats = Repeats(store, backends=backends, sharing=sharing)
        metrics = self._metrics = Metrics(table=self._table, backends=backends, agents=agents, store=store)
        self._quotas = Quotas(teams, self._table, store)
        rows = SnapshotTable(store)
        self.templates = Templates(backends, rows, default=default_backend)
        self.snapshots = Snapshots(
            table=self._table, rows=rows, templates=self.templates, backends=backends, ending=self._ending
        )
        self._settling = Settling(pausing=self._pausing, snapshots=self.snapshots)
        self._lifetimes = Lifetimes(
            table=self._table,
            expiry=self._expiry,
            errands=self._errands,
            ending=self._ending,
            pausing=self._pausing,
            settling=self._settling,
            quotas=self._quotas,
            longest=clock.to_microseconds(max_timeout),
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
            retraction=Retraction(store, self._errands),
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
            metrics=metrics,
            taken_up=self._taken_up,
        )
        self.elsewhere = Elsewhere(store)
        self.routing = Routing(
            self._table,
            backends=backends,
            templates=self.templates,
            errands=self._errands,
            sharing=sharing,
            node=store.node,
        )
        self.questions = Questions(
            table=self._table,
            store=store,
            backends=backends,
            elsewhere=self.elsewhere,
            templates=self.templates,
            metrics=metrics,
            policy=self._policy,
            template_patience=create_timeout,
        )
        self.locating = Locating(
            table=self._table,
            backends=backends,
            errands=self._errands,
            ending=self._ending,
            pausing=self._pausing,
            settling=self._settling,
            lifetimes=self._lifetimes,
            may_act=self.routing.check,
            must_go_on=self._must_go_on,
        )
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
        await self._chores.enter_async_context(self._policy.telling(self._record_here, self._lifetimes.extend))

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
        live = self._table.find(sandbox_id, caller)
        await self._errands.finish(self._kill(live, note="killed by request"))

    async def set_timeout(self, sandbox_id: str, caller: Caller, *, timeout: int, extend_only: bool) -> SandboxRecord:
        """With the new end: now + ``timeout`` microseconds, within the longest life (C28 to C32)."""
        live = self._table.shown(sandbox_id, caller)
        must_be_awake(live.record)
        timeout, extend_only = await self._policy.life(live.record, timeout=timeout, extend_only=extend_only)
        return await self._errands.finish(self._lifetimes.set_timeout(live, timeout=timeout, extend_only=extend_only))

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
        live = self._table.shown(sandbox_id, caller)
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
        live = self._table.shown(sandbox_id, caller)
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
        if not record.state.awake:
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
        live = self._table.shown(sandbox_id, caller)
        return await self._errands.finish(self._update_network(live, allow=allow, deny=deny, internet=internet))

    def _connectable(self, sandbox_id: str, caller: Caller, *, timeout: int) -> Live:
        """Raises what a connect is refused with: first for its timeout, then for the sandbox (C43)."""
        if timeout < clock.MICROSECONDS:
            raise InvalidArgument("timeout must be at least one second")
        longest = self._lifetimes.longest(caller.owner)
        if timeout > longest:
            raise InvalidArgument(f"timeout must be at most {longest // clock.MICROSECONDS} seconds")
        self._must_go_on()
        live = self._table.find(sandbox_id, caller)
        if live.record.state is State.KILLING:
            raise Conflict(f"sandbox {live.record.id} is being killed")
        if not live.record.state.shown:
            raise SandboxNotFound.of(live.record.id)
        return live

    def _expired(self, sandbox_id: str) -> None:
        self._lifetimes.expired(sandbox_id)

    def _must_go_on(self) -> None:
        if self._stopping:
            raise Unavailable("the gateway is stopping", retry_after=_BACK, should_retry=True)

    async def _create_on(self, wish: Wish, backend: str | None, *, owner: str, asked_at: float) -> SandboxRecord:
        admission = self._admission if backend is None else self._admissions[backend]
        admitted = await admission.admit(
            wish.spec, owner=owner, longest_life=self._lifetimes.longest(owner), patience=self._create_timeout
        )
        return await self._creation.create(wish.admitted(admitted), owner=owner, asked_at=asked_at)

    def _record_here(self, sandbox_id: str) -> SandboxRecord | None:
        live = self._table.get(sandbox_id)
        return None if live is None else live.record

    async def _connect(self, live: Live, *, timeout: int, memory: bool) -> tuple[SandboxRecord, bool]:
        async with live.lock:
            await self._settling.at_rest(live)
            paused = live.record.state is State.PAUSED
            if paused:
                await self._pausing.resume(live, life=timeout, memory=memory, note="connect")
            else:
                await self._lifetimes.move_end(live, timeout=timeout, extend_only=True)
            return live.record, paused

    async def _resume(self, live: Live, *, timeout: int, memory: bool, changes: dict[str, bool]) -> SandboxRecord:
        async with live.lock:
            await self._settling.at_rest(live)
            if live.record.state is not State.PAUSED:
                raise FailedPrecondition(f"sandbox {live.record.id} is running already")
            await self._pausing.resume(live, life=timeout, memory=memory, note="resume", **changes)
            return live.record

    async def _pause(self, live: Live, *, mode: PauseMode, healthy: bool) -> SandboxRecord:
        async with live.lock:
            await self._settling.at_rest(live)
            if live.record.state is State.PAUSED:
                raise FailedPrecondition(f"sandbox {live.record.id} is paused already")
            await self._pausing.pause(live, mode=mode, note="paused by request", healthy=healthy)
            return live.record

    async def _snapshot(self, live: Live, *, name: str, memory: bool | None) -> SnapshotRecord:
        with self.snapshots.only(live):
            parsed = await self.snapshots.check(live, name=name, memory=memory)
            try:
                async with live.lock:
                    await self._settling.at_rest(live)
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
            await self._settling.at_rest(live)
            await self._network.replace(live, allow=allow, deny=deny, internet=internet)
            return live.record

    async def _settle_network(self, live: Live) -> None:
        async with live.lock:
            await self._network.settle(live)

    async def _kill(self, live: Live, *, note: str) -> None:
        async with live.lock:
            if live.record.state.ended:
                raise SandboxNotFound.of(live.record.id)
            if not await self._ending.end(live, final=State.KILLED, note=note):
                raise Unavailable(
                    "the sandbox cannot be ended at the moment; the gateway keeps trying", retry_after=_TRIED_AGAIN
                )


def _leave_pause(live: Live) -> None:
    live.pausing = None
