"""``SandboxService``: the control plane, and ``Locate``, the data plane's one question."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_core import clock
from sandgate_core.admission import CreateSpec
from sandgate_core.callers import Caller, current
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.listing import LARGEST_PAGE, Query, shown_state
from sandgate_core.records import NetworkRules, PauseMode, SandboxRecord
from sandgate_core.repeats import check_key, digest_of
from sandgate_core.sandboxes import Sandboxes
from sandgate_core.services.measurements import add_measured_elsewhere, messages_of
from sandgate_core.services.templates import message_of_snapshot, message_of_template
from sandgate_core.states import State
from sandgate_core.store import Change
from sandgate_core.token_search import TokenSearch
from sandgate_core.tokens import Tokens
from sandgate_core.undelivered import if_undelivered
from sandgate_errors import InvalidArgument, SandboxNotFound, Unauthenticated, Unavailable
from sandgate_plugin_api import Activity, AgentAddress

__all__ = ["SandboxService"]

_STATES = {
    sandboxes_pb2.SANDBOX_STATE_RUNNING: State.RUNNING,
    sandboxes_pb2.SANDBOX_STATE_PAUSED: State.PAUSED,
}
_STATE_OF = {state: message for message, state in _STATES.items()}
_ACTIVITIES = {
    sandboxes_pb2.ACTIVITY_COMMAND: Activity.COMMAND,
    sandboxes_pb2.ACTIVITY_FILE: Activity.FILE,
}
_MODE_OF: dict[PauseMode | None, sandboxes_pb2.PauseMode.ValueType] = {
    None: sandboxes_pb2.PAUSE_MODE_UNSPECIFIED,
    PauseMode.FULL: sandboxes_pb2.PAUSE_MODE_FULL,
    PauseMode.FILESYSTEM: sandboxes_pb2.PAUSE_MODE_FILESYSTEM,
}


class SandboxService(sandboxes_pb2_grpc.SandboxServiceServicer):
    """protobuf <-> :class:`sandgate_core.sandboxes.Sandboxes`."""

    def __init__(
        self, sandboxes: Sandboxes, *, tokens: Tokens, envd_version: str, relay: Callable[[], str] = lambda: ""
    ) -> None:
        """``relay``: where other cores and their edges reach this core's relay."""
        self._sandboxes = sandboxes
        self._relay = relay
        self._tokens = tokens
        self._token_search = TokenSearch(tokens)
        self._envd_version = envd_version
        self._streams: set[asyncio.Task[None]] = set()

    def end_streams(self) -> None:
        """The core stops: these have no end of their own."""
        for stream in self._streams:
            stream.cancel()

    async def Create(self, request: sandboxes_pb2.CreateRequest, context: Any) -> sandboxes_pb2.CreateResponse:  # noqa: N802
        record = await self._sandboxes.create(_spec_of(request), current())
        if_undelivered(lambda: self._sandboxes.take_back(record))
        return sandboxes_pb2.CreateResponse(sandbox=self._message_of(record))

    async def Get(self, request: sandboxes_pb2.GetRequest, context: Any) -> sandboxes_pb2.GetResponse:  # noqa: N802
        message = self._message_of(await self._sandboxes.questions.get(request.id, current()))
        if request.address:
            message.address = await self._sandboxes.questions.address(message.id)
        return sandboxes_pb2.GetResponse(sandbox=message)

    async def List(self, request: sandboxes_pb2.ListRequest, context: Any) -> sandboxes_pb2.ListResponse:  # noqa: N802
        page = await self._sandboxes.questions.list(_query_of(request), current(), template=request.template or None)
        return sandboxes_pb2.ListResponse(
            sandboxes=map(self._message_of, page.records),
            next_page_token=page.next_token,
            total_running=page.total_running,
        )

    async def Kill(self, request: sandboxes_pb2.KillRequest, context: Any) -> sandboxes_pb2.KillResponse:  # noqa: N802
        await self._sandboxes.kill(request.id, current())
        return sandboxes_pb2.KillResponse()

    async def SetTimeout(  # noqa: N802
        self, request: sandboxes_pb2.SetTimeoutRequest, context: Any
    ) -> sandboxes_pb2.SetTimeoutResponse:
        if not request.HasField("timeout"):
            # An absent duration reads as zero, which would end the sandbox.
            raise InvalidArgument("timeout is missing")
        record = await self._sandboxes.set_timeout(
            request.id, current(), timeout=_microseconds(request.timeout), extend_only=request.extend_only
        )
        return sandboxes_pb2.SetTimeoutResponse(end_at=self._message_of(record).end_at)

    async def Connect(self, request: sandboxes_pb2.ConnectRequest, context: Any) -> sandboxes_pb2.ConnectResponse:  # noqa: N802
        record, resumed = await self._sandboxes.connect(
            request.id, current(), timeout=_microseconds(request.timeout), memory=_kept(request)
        )
        return sandboxes_pb2.ConnectResponse(sandbox=self._message_of(record), resumed=resumed)

    async def Pause(self, request: sandboxes_pb2.PauseRequest, context: Any) -> sandboxes_pb2.PauseResponse:  # noqa: N802
        record = await self._sandboxes.pause(
            request.id, current(), memory=_kept(request), healthy=request.require_healthy_agent
        )
        return sandboxes_pb2.PauseResponse(sandbox=self._message_of(record))

    async def Resume(self, request: sandboxes_pb2.ResumeRequest, context: Any) -> sandboxes_pb2.ResumeResponse:  # noqa: N802
        at_end = _on_timeout(request.on_timeout)
        record = await self._sandboxes.resume(
            request.id,
            current(),
            timeout=_microseconds(request.timeout),
            memory=_kept(request),
            pause_on_timeout=None if request.on_timeout == sandboxes_pb2.ON_TIMEOUT_UNSPECIFIED else at_end,
        )
        return sandboxes_pb2.ResumeResponse(sandbox=self._message_of(record))

    async def GetMetrics(  # noqa: N802
        self, request: sandboxes_pb2.GetMetricsRequest, context: Any
    ) -> sandboxes_pb2.GetMetricsResponse:
        if not 1 <= len(request.ids) <= LARGEST_PAGE:
            raise InvalidArgument(f"name 1 to {LARGEST_PAGE} sandboxes")
        answer = sandboxes_pb2.GetMetricsResponse()
        unknown: list[str] = []
        for sandbox_id in dict.fromkeys(request.ids):
            try:
                series = self._sandboxes.questions.metrics(sandbox_id, current())
            except SandboxNotFound:
                unknown.append(sandbox_id)
                continue
            answer.sandboxes.add(id=sandbox_id, samples=messages_of(series, request))
        if not current().forwarded:
            await add_measured_elsewhere(answer, request, unknown, self._sandboxes)
        return answer

    async def GetEvents(self, request: sandboxes_pb2.GetEventsRequest, context: Any) -> sandboxes_pb2.GetEventsResponse:  # noqa: N802
        changes = await self._sandboxes.questions.events(request.id, current())
        return sandboxes_pb2.GetEventsResponse(events=map(_message_of_change, changes))

    async def Locate(self, request: sandboxes_pb2.LocateRequest, context: Any) -> sandboxes_pb2.LocateResponse:  # noqa: N802
        caller = current()
        caller.must_be_internal()
        record, agent = await self._sandboxes.locating.locate(
            request.id, caller, agent_lost=request.agent_lost, wake=request.wake
        )
        location = self._location(record, agent)
        if agent is not None and caller.forwarded:
            # The agent's address is for this machine alone.
            token = self._tokens.relay_token_of(record.id)
            location.agent.CopyFrom(sandboxes_pb2.AgentAddress(target=self._relay(), token=token, relay=True))
        return location

    async def LocateStream(  # type: ignore[override]  # noqa: N802 - the stubs know no handler that writes to its context
        self, requests: AsyncIterator[sandboxes_pb2.LocateStreamRequest], context: Any
    ) -> None:
        caller = current()
        caller.must_be_internal()
        answering = asyncio.create_task(self._answer(requests, context, caller))
        self._streams.add(answering)
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
            self._streams.discard(answering)
        if answering.cancelled():
            raise Unavailable("the core is stopping")
        answering.result()

    async def _answer(
        self, requests: AsyncIterator[sandboxes_pb2.LocateStreamRequest], context: Any, caller: Caller
    ) -> None:
        async for request in requests:
            answer = sandboxes_pb2.LocateStreamResponse()
            for sandbox_id in request.ids:
                found = self._sandboxes.locating.at_hand(sandbox_id, caller)
                answer.answers.append(sandboxes_pb2.LocateResponse() if found is None else self._location(*found))
            try:
                await context.write(answer)
            except grpc.aio.InternalError:
                return  # the edge went away while this waited

    async def FindTemplate(  # noqa: N802
        self, request: sandboxes_pb2.FindTemplateRequest, context: Any
    ) -> sandboxes_pb2.FindTemplateResponse:
        found = await self._sandboxes.questions.template_id(request.name, current())
        return sandboxes_pb2.FindTemplateResponse(template_id=found)

    async def ListTemplates(  # noqa: N802
        self, request: sandboxes_pb2.ListTemplatesRequest, context: Any
    ) -> sandboxes_pb2.ListTemplatesResponse:
        listed, spawns = await self._sandboxes.templates.listed(), await self._sandboxes.questions.spawns(current())
        return sandboxes_pb2.ListTemplatesResponse(
            templates=(message_of_template(item, spawns, envd_version=self._envd_version) for item in listed)
        )

    async def CreateSnapshot(  # noqa: N802
        self, request: sandboxes_pb2.CreateSnapshotRequest, context: Any
    ) -> sandboxes_pb2.CreateSnapshotResponse:
        memory = request.memory if request.HasField("memory") else None
        made = await self._sandboxes.snapshot(request.id, current(), name=request.name, memory=memory)
        return sandboxes_pb2.CreateSnapshotResponse(snapshot=message_of_snapshot(made))

    async def ListSnapshots(  # noqa: N802
        self, request: sandboxes_pb2.ListSnapshotsRequest, context: Any
    ) -> sandboxes_pb2.ListSnapshotsResponse:
        if request.page_size < 0:
            raise InvalidArgument("page_size must not be negative")
        page = await self._sandboxes.snapshots.page(
            current(),
            sandbox_id=parse_sandbox_id(request.sandbox_id) if request.sandbox_id else "",
            wanted=request.name,
            page_size=min(request.page_size or LARGEST_PAGE, LARGEST_PAGE),
            page_token=request.page_token,
        )
        return sandboxes_pb2.ListSnapshotsResponse(
            snapshots=map(message_of_snapshot, page.records), next_page_token=page.next_token
        )

    async def DeleteSnapshot(  # noqa: N802
        self, request: sandboxes_pb2.DeleteSnapshotRequest, context: Any
    ) -> sandboxes_pb2.DeleteSnapshotResponse:
        await self._sandboxes.delete_snapshot(request.id, current())
        return sandboxes_pb2.DeleteSnapshotResponse()

    async def Fork(self, request: sandboxes_pb2.ForkRequest, context: Any) -> sandboxes_pb2.ForkResponse:  # noqa: N802
        self._sandboxes.fork(request.id, current(), count=request.count, timeout=_microseconds(request.timeout))

    async def UpdateNetwork(  # noqa: N802
        self, request: sandboxes_pb2.UpdateNetworkRequest, context: Any
    ) -> sandboxes_pb2.UpdateNetworkResponse:
        record = await self._sandboxes.update_network(
            request.id,
            current(),
            allow=tuple(request.allow_out),
            deny=tuple(request.deny_out),
            internet=request.allow_internet_access if request.HasField("allow_internet_access") else True,
        )
        return sandboxes_pb2.UpdateNetworkResponse(sandbox=self._message_of(record))

    async def NoteActivity(  # noqa: N802
        self, request: sandboxes_pb2.NoteActivityRequest, context: Any
    ) -> sandboxes_pb2.NoteActivityResponse:
        current().must_be_internal()
        if request.activity not in _ACTIVITIES:
            raise InvalidArgument(f"activity {request.activity} is not known")
        self._sandboxes.note_activity(request.id, _ACTIVITIES[request.activity])
        return sandboxes_pb2.NoteActivityResponse()

    async def FindByTokenHash(  # noqa: N802
        self, request: sandboxes_pb2.FindByTokenHashRequest, context: Any
    ) -> sandboxes_pb2.FindByTokenHashResponse:
        current().must_be_internal()
        texts = {"before": request.before, "after": request.after, "sha256": request.sha256}
        try:
            found = await self._token_search.find(self._sandboxes.questions.secured(), **texts)
        except Unauthenticated:
            found = await self._token_search.find(await self._sandboxes.elsewhere.protected(), **texts)
        return sandboxes_pb2.FindByTokenHashResponse(id=found)

    def _location(self, record: SandboxRecord, agent: AgentAddress | None) -> sandboxes_pb2.LocateResponse:
        return sandboxes_pb2.LocateResponse(
            # Asked before every request of the data plane: no more than that needs, and nothing that a client can make large.
            sandbox=sandboxes_pb2.Sandbox(
                id=record.id,
                state=_STATE_OF[shown_state(record.state)],
                access_token=self._access_token_of(record),
                traffic_access_token=self._traffic_token_of(record),
                network=None
                if record.network is None
                else sandboxes_pb2.NetworkRules(mask_request_host=record.network.mask_request_host),
            ),
            agent=None if agent is None else sandboxes_pb2.AgentAddress(target=agent.target, token=agent.token),
        )

    def _message_of(self, record: SandboxRecord) -> sandboxes_pb2.Sandbox:
        return sandboxes_pb2.Sandbox(
            id=record.id,
            template_id=record.template_id,
            alias=record.alias,
            backend=record.backend,
            # What a repeated create answers with may have ended.
            state=_STATE_OF[shown_state(record.state)]
            if record.state.shown
            else sandboxes_pb2.SANDBOX_STATE_UNSPECIFIED,
            started_at=_timestamp(record.started_at or record.created_at),
            end_at=_timestamp(record.end_at or record.created_at),
            on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE if record.pause_on_timeout else sandboxes_pb2.ON_TIMEOUT_KILL,
            auto_resume=record.auto_resume,
            metadata=record.metadata,
            resources=sandboxes_pb2.Resources(
                cpu_count=record.resources.cpu_count,
                memory_mb=record.resources.memory_mb,
                disk_size_mb=record.resources.disk_size_mb,
            ),
            allow_internet_access=record.allow_internet_access,
            network=None if record.network is None else _message_of_rules(record.network),
            envd_version=self._envd_version,
            access_token=self._access_token_of(record),
            pause_mode=_MODE_OF[record.pause_mode],
            agent_unresponsive_at_pause=record.agent_unresponsive,
            traffic_access_token=self._traffic_token_of(record),
        )

    def _traffic_token_of(self, record: SandboxRecord) -> str:
        if record.network is None or record.network.allow_public_traffic is not False:
            return ""
        return self._tokens.traffic_token_of(record.id, version=record.token_version)

    def _access_token_of(self, record: SandboxRecord) -> str:
        return self._tokens.token_of(record.id, version=record.token_version) if record.secure else ""


def _spec_of(request: sandboxes_pb2.CreateRequest) -> CreateSpec:
    return CreateSpec(
        template=request.template_id,
        timeout=_microseconds(request.timeout),
        metadata=dict(request.metadata),
        envs=dict(request.envs),
        secure=request.secure,
        allow_internet_access=request.allow_internet_access if request.HasField("allow_internet_access") else True,
        pause_on_timeout=_on_timeout(request.on_timeout),
        pause_memory=request.pause_memory if request.HasField("pause_memory") else True,
        auto_resume=request.auto_resume,
        network=_rules_of(request.network),
        idempotency_key=check_key(request.idempotency_key) if request.idempotency_key else None,
        digest=digest_of(request.SerializeToString(deterministic=True)) if request.idempotency_key else None,
    )


def _on_timeout(value: int) -> bool:
    """Whether a sandbox pauses at its end."""
    if value not in sandboxes_pb2.OnTimeout.values():
        raise InvalidArgument(f"on_timeout {value} is not known")
    return value == sandboxes_pb2.ON_TIMEOUT_PAUSE


def _kept(
    request: sandboxes_pb2.PauseRequest | sandboxes_pb2.ConnectRequest | sandboxes_pb2.ResumeRequest,
) -> bool:
    """Whether the memory is kept; it is unless the caller says otherwise."""
    return request.memory if request.HasField("memory") else True


def _message_of_change(change: Change) -> sandboxes_pb2.SandboxEvent:
    return sandboxes_pb2.SandboxEvent(
        time=_timestamp(change.at), from_state=change.came_from or "", to_state=change.to, note=change.note
    )


def _rules_of(message: sandboxes_pb2.NetworkRules) -> NetworkRules | None:
    """None where nothing is asked for: no message, an empty one, or what holds anyway."""
    rules = NetworkRules(
        allow_out=tuple(message.allow_out),
        deny_out=tuple(message.deny_out),
        allow_public_traffic=message.allow_public_traffic if message.HasField("allow_public_traffic") else None,
        mask_request_host=message.mask_request_host,
    )
    return None if rules in {NetworkRules(), NetworkRules(allow_public_traffic=True)} else rules


def _message_of_rules(rules: NetworkRules) -> sandboxes_pb2.NetworkRules:
    return sandboxes_pb2.NetworkRules(
        allow_out=rules.allow_out,
        deny_out=rules.deny_out,
        allow_public_traffic=rules.allow_public_traffic,
        mask_request_host=rules.mask_request_host,
    )


def _query_of(request: sandboxes_pb2.ListRequest) -> Query:
    if request.order not in sandboxes_pb2.Order.values():
        raise InvalidArgument(f"order {request.order} is not known")
    unknown = [state for state in request.states if state not in _STATES]
    if unknown:
        raise InvalidArgument(f"state {unknown[0]} is not known")
    return Query(
        metadata=dict(request.metadata),
        states=frozenset(_STATES[state] for state in request.states),
        started_after=_instant(request.started_after) if request.HasField("started_after") else None,
        ascending=request.order == sandboxes_pb2.ORDER_ASC,
        page_size=_page_size(request),
        page_token=request.page_token,
    )


def _page_size(request: sandboxes_pb2.ListRequest) -> int | None:
    if request.page_size < 0:
        raise InvalidArgument("page_size must not be negative")
    if request.all:
        if request.page_size or request.page_token:
            raise InvalidArgument("a list of all has no pages")
        return None
    return min(request.page_size or LARGEST_PAGE, LARGEST_PAGE)


def _microseconds(duration: Duration) -> int:
    return int(duration.seconds) * clock.MICROSECONDS + int(duration.nanos) // 1_000


def _instant(timestamp: Timestamp) -> int:
    return int(timestamp.seconds) * clock.MICROSECONDS + int(timestamp.nanos) // 1_000


def _timestamp(microseconds: int) -> Timestamp:
    seconds, rest = divmod(microseconds, clock.MICROSECONDS)
    return Timestamp(seconds=seconds, nanos=rest * 1_000)
