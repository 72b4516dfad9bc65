"""How a sandbox is made: from an admitted request to a running record, or to nothing.

Write before act: the record stands in the store, with a handle under which the backend finds what it made, before the
backend acts. Then the backend, then the agent's Init, then the record becomes ``running``; its life counts from there
(C7). Whatever goes wrong on the way, the caller going away included, all of it is freed (C12).

The work runs apart from the caller's task, because a cancellation in the middle of a write would leave the store and the
memory apart. The caller's cancellation reaches the one part that may take long, the backend and its agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from sandgate_core import clock
from sandgate_core.admission import Admitted
from sandgate_core.agents import Agents
from sandgate_core.bring_up import BringUp
from sandgate_core.capacity import of_the_machines
from sandgate_core.checked_backend import described
from sandgate_core.egress import egress_of
from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.identifiers import new_sandbox_id
from sandgate_core.live import Live, LiveTable
from sandgate_core.quotas import Quotas
from sandgate_core.records import SandboxRecord, Setup
from sandgate_core.retraction import Retraction
from sandgate_core.states import State
from sandgate_errors import Canceled, DeadlineExceeded, Internal, SandboxUnreachable, SandgateError, Unavailable
from sandgate_plugin_api import Placement, SandboxRequest

__all__ = ["Creation"]

#: Seconds a backend has to give up after its time is over; one that does not is left behind, and freed by its handle.
_GRACE = 5.0
#: Seconds of a create's time, and of what is left of it the most, that the template's commands may not take: so what they
#: said can be told when it is over.
_TO_TELL = 3.0
_TO_TELL_PART = 0.25
_log = structlog.get_logger(__name__)


class _Attempt:
    """One create that is under way, and the way to call it off."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.abandoned = False
        self.placing: asyncio.Task[None] | None = None
        self.placement: Placement | None = None

    @property
    def remaining(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    def abandon(self) -> None:
        self.abandoned = True
        if self.placing is not None:
            self.placing.cancel()


class Creation:
    """Makes sandboxes."""

    def __init__(
        self,
        *,
        table: LiveTable,
        ending: Ending,
        expiry: Expiry,
        agents: Agents,
        errands: Errands,
        quotas: Quotas,
        retraction: Retraction,
        patience: float,
    ) -> None:
        self._table = table
        self._expiry = expiry
        self._ending = ending
        self._bring_up = BringUp(agents)
        self._errands = errands
        self._quotas = quotas
        self._retraction = retraction
        self._patience = patience
        self._attempts: set[_Attempt] = set()

    async def create(self, admitted: Admitted, *, owner: str, asked_at: float) -> SandboxRecord:
        """A running sandbox, as it was when it became so; it may be killed before the caller looks.

        ``asked_at``, of the loop's clock: from when on its time counts.

        Cancelled: leaves nothing, even when it was ready just then. But one with an idempotency key goes on: its caller
        comes back for it.
        """
        attempt = _Attempt(asked_at + self._patience)
        making = self._errands.start(self._run(attempt, admitted, owner=owner))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if admitted.spec.idempotency_key is not None:
                raise
            self._errands.post(self._take_back(attempt, making), "an abandoned sandbox could not be ended")
            raise

    def abandon_all(self) -> None:
        """Call off what is under way, when the core stops."""
        for attempt in self._attempts:
            attempt.abandon()

    async def _take_back(self, attempt: _Attempt, making: asyncio.Task[SandboxRecord]) -> None:
        attempt.abandon()
        await asyncio.wait({making})
        if making.cancelled() or making.exception() is not None:
            return
        live = self._table.get(making.result().id)
        if live is None:
            return
        async with live.lock:
            if live.record.state.shown:
                await self._ending.end(live, final=State.KILLED, note="the caller of create went away")

    async def _run(self, attempt: _Attempt, admitted: Admitted, *, owner: str) -> SandboxRecord:
        self._attempts.add(attempt)
        try:
            record, request = _plan(admitted, owner=owner)
            live = await self._recorded(record)
            async with live.lock:
                await self._make(attempt, live, admitted=admitted, request=request)
                return live.record
        finally:
            self._attempts.discard(attempt)

    async def _recorded(self, record: SandboxRecord) -> Live:
        try:
            with self._quotas.place(record.owner, record.resources) as admit:
                return await self._table.add(record, note="create", admit=admit)
        except SandgateError:
            raise
        except Exception:
            # The store may have written it, and could not say so.
            self._retraction.begin(record.id)
            raise

    async def _make(self, attempt: _Attempt, live: Live, *, admitted: Admitted, request: SandboxRequest) -> None:
        try:
            placement = await self._placed(attempt, live, admitted=admitted, request=request)
            live.agent = placement.agent
            started = clock.now()
            end = started + live.record.timeout
            handle = dict(placement.handle)
            await self._table.move(live, State.RUNNING, note="ready", handle=handle, started_at=started, end_at=end)
        except BaseException:
            if attempt.placement is not None:
                live.record = replace(live.record, handle=dict(attempt.placement.handle))
            await self._ending.free(live, final=State.FAILED, note="create failed")
            raise
        self._expiry.set(live.record.id, end)
        _log.info("sandbox created", sandbox=live.record.id, backend=live.record.backend, owner=live.record.owner)

    async def _placed(self, attempt: _Attempt, live: Live, *, admitted: Admitted, request: SandboxRequest) -> Placement:
        if attempt.abandoned:
            raise Canceled("the caller went away")
        patience = min(self._patience, admitted.start_timeout or self._patience)
        attempt.deadline = min(attempt.deadline, asyncio.get_running_loop().time() + patience)
        placing = attempt.placing = self._errands.start(self._place(attempt, live, admitted=admitted, request=request))
        await asyncio.wait({placing}, timeout=attempt.remaining)
        if not placing.done():
            placing.cancel()
            await asyncio.wait({placing}, timeout=_GRACE)
            if not placing.done():
                self._errands.post(_free_late(placing, live, admitted), "what was made too late could not be freed")
            late = f"the sandbox was not ready within {patience:g} seconds"
            if attempt.placement is None:
                late = f"{described(admitted.backend)} did not make the sandbox within {patience:g} seconds"
                _log.error("a backend takes too long", sandbox=live.record.id, fault=late)
            raise DeadlineExceeded(
                late,
                error_code="sandbox_placement_timeout",
                should_retry=False,
            )
        if attempt.abandoned:
            raise Canceled("the caller went away")
        if placing.cancelled():
            fault = f"{described(admitted.backend)} cancelled its own create"
            _log.error("a backend is faulty", sandbox=live.record.id, fault=fault)
            raise Internal(fault, should_retry=False)
        placing.result()
        assert attempt.placement is not None  # noqa: S101 - set by _place before it returns
        return attempt.placement

    async def _place(self, attempt: _Attempt, live: Live, *, admitted: Admitted, request: SandboxRequest) -> None:
        # Noted before the agent is called: should that fail, it is this handle that must be destroyed.
        with of_the_machines(), _nothing_begun():
            attempt.placement = await admitted.backend.create(request, live.record.handle)
        patience = attempt.remaining - min(_TO_TELL, _TO_TELL_PART * attempt.remaining)
        await self._bring_up.run(attempt.placement.agent, live.record, patience=patience)


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """A backend that is unavailable has started nothing, so a client may ask again that could not otherwise."""
    try:
        yield
    except SandboxUnreachable:
        raise  # that one was started
    except Unavailable as error:
        if error.should_retry is None:
            error.should_retry = True
        raise


async def _free_late(placing: asyncio.Task[None], live: Live, admitted: Admitted) -> None:
    """A backend that did not give up in time may still make something after its sandbox was freed."""
    await asyncio.wait({placing})
    _log.error(
        "a backend went on after its create was cancelled", backend=admitted.backend.name, sandbox=live.record.id
    )
    await admitted.backend.destroy(live.record.handle)


def _plan(admitted: Admitted, *, owner: str) -> tuple[SandboxRecord, SandboxRequest]:
    spec, template = admitted.spec, admitted.template
    egress = egress_of(spec.network, internet=spec.allow_internet_access)
    request = SandboxRequest(
        sandbox_id=new_sandbox_id(),
        template=template,
        allow_internet_access=egress.internet,
        egress=egress,
        snapshot=admitted.snapshot,
        metadata=dict(spec.metadata),
        name=admitted.name,
    )
    record = SandboxRecord(
        id=request.sandbox_id,
        owner=owner,
        backend=admitted.backend.name,
        template_id=admitted.template_id,
        alias=admitted.alias,
        state=State.CREATING,
        created_at=clock.now(),
        timeout=spec.timeout,
        pause_on_timeout=spec.pause_on_timeout,
        pause_memory=spec.pause_memory,
        auto_resume=spec.auto_resume,
        metadata=dict(spec.metadata),
        envs={**template.envs, **spec.envs},
        resources=template.resources,
        allow_internet_access=spec.allow_internet_access,
        network=spec.network,
        setup=Setup(
            template=template.id,
            default_user=template.default_user,
            workdir=template.workdir,
            start_command=template.start_command,
            ready_command=template.ready_command,
        ),
        secure=spec.secure,
        idempotency_key=spec.idempotency_key,
        request_digest=spec.digest,
        handle=dict(admitted.backend.reserve(request)),
    )
    return record, request
