"""The edge's caller of the core: lifecycle on behalf of an API key, and ``Locate`` for the data plane.

Messages stay protobuf here: REST and RPC modules turn them into what their clients read. Every method raises errors of
``sandgate_errors``. Specified by ``sandgate_api/core/v1/sandboxes.proto`` and the metadata table of docs/architecture.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from sandgate_api.core.v1 import (
    edges_pb2,
    edges_pb2_grpc,
    keys_pb2,
    keys_pb2_grpc,
    logs_pb2,
    logs_pb2_grpc,
    sandboxes_pb2,
    sandboxes_pb2_grpc,
    teams_pb2,
    teams_pb2_grpc,
)
from sandgate_edge.locations import Locations, Stream
from sandgate_errors import Internal, SandgateError, Unauthenticated, Unavailable
from sandgate_errors.grpc import from_status
from sandgate_tracing import Tracing

__all__ = ["MAX_METADATA_BYTES", "Admin", "CoreClient", "Located"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Metadata = tuple[tuple[str, str | bytes], ...]

# A core that is being restarted is back within about a second; clients should not notice, and not wait for ever either.
_READY_SECONDS = 10.0
# More than the core takes for anything (a create is bounded at about 70 s), so it only ends calls to a core that hangs.
_CALL_SECONDS = 120.0
# A core that needs longer to say that it is well is not.
_HEALTH_SECONDS = 3.0
# The core takes any message that a request body of 16 MiB can become.
_MAX_MESSAGE_BYTES = 32 * 1024 * 1024
_MAX_KEY_LENGTH = 256
# Errors travel in metadata, and a text that names a path of 4,096 bytes takes three times that. gRPC's own limit is soft
# from 8 KiB on: it would drop such an answer now and then.
MAX_METADATA_BYTES = 64 * 1024
_OPTIONS = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", -1),
    # The default back-off grows to two minutes: a core that is up again would be taken for dead.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where a running sandbox is, as of one ``Locate``; holds for one request."""

    sandbox: sandboxes_pb2.Sandbox
    """``access_token`` is empty when the sandbox is not secured."""
    agent_target: str
    """Empty when the sandbox is asleep and traffic may wake it."""
    agent_token: str
    relayed: bool = False
    """It is another core's: the target is that core's relay, and the token one for the relay."""

    @property
    def awake(self) -> bool:
        return bool(self.agent_target)


@dataclass(frozen=True, kw_only=True)
class Admin:
    """Who manages keys: what the core takes or refuses as its internal token, and for which request."""

    token: str = field(repr=False)
    request_id: str

    @property
    def metadata(self) -> Metadata:
        return (("internal-token", self.token), ("request-id", self.request_id))


class CoreClient:
    """One per edge process."""

    def __init__(self, target: str, internal_token: str, *, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._sandboxes: sandboxes_pb2_grpc.SandboxServiceAsyncStub = sandboxes_pb2_grpc.SandboxServiceStub(
            self._channel
        )
        self._keys: keys_pb2_grpc.KeyServiceAsyncStub = keys_pb2_grpc.KeyServiceStub(self._channel)
        self._teams: teams_pb2_grpc.TeamServiceAsyncStub = teams_pb2_grpc.TeamServiceStub(self._channel)
        self._logs: logs_pb2_grpc.LogServiceAsyncStub = logs_pb2_grpc.LogServiceStub(self._channel)
        self._edges: edges_pb2_grpc.EdgeServiceAsyncStub = edges_pb2_grpc.EdgeServiceStub(self._channel)
        self._internal_token = internal_token
        self._locations = Locations(self._begin_locations)

    async def close(self) -> None:
        await self._locations.close()
        await self._channel.close()

    async def serves(self) -> bool:
        """Whether the core answers and says that it serves; soon, whatever the answer is."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        try:
            # Without waiting for a core that restarts: that one is not ready.
            reply = await check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def report(self, request: edges_pb2.ReportRequest) -> None:
        """Tells the core this edge's numbers; returns when it wants them anew, however long that is."""
        await self._ready()
        try:
            await self._edges.Report(request, metadata=(("internal-token", self._internal_token),))
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from error

    async def create(
        self, request: sandboxes_pb2.CreateRequest, *, api_key: str, request_id: str
    ) -> sandboxes_pb2.Sandbox:
        reply = await self._call(self._sandboxes.Create, request, _on_behalf(api_key, request_id))
        return reply.sandbox

    async def get(
        self, sandbox_id: str, *, api_key: str, request_id: str, address: bool = False
    ) -> sandboxes_pb2.Sandbox:
        """``address``: with what only its backend knows."""
        request = sandboxes_pb2.GetRequest(id=sandbox_id, address=address)
        reply = await self._read(self._sandboxes.Get, request, _on_behalf(api_key, request_id))
        return reply.sandbox

    async def list(
        self, request: sandboxes_pb2.ListRequest, *, api_key: str, request_id: str
    ) -> sandboxes_pb2.ListResponse:
        return await self._read(self._sandboxes.List, request, _on_behalf(api_key, request_id))

    async def find_template(self, name: str, *, api_key: str, request_id: str) -> str:
        """The id of the template that ``name`` stands for. Raises NotFound."""
        request = sandboxes_pb2.FindTemplateRequest(name=name)
        reply = await self._read(self._sandboxes.FindTemplate, request, _on_behalf(api_key, request_id))
        return reply.template_id

    async def kill(self, sandbox_id: str, *, api_key: str, request_id: str) -> None:
        request = sandboxes_pb2.KillRequest(id=sandbox_id)
        await self._call(self._sandboxes.Kill, request, _on_behalf(api_key, request_id))

    async def set_timeout(
        self, sandbox_id: str, *, timeout: float, extend_only: bool, api_key: str, request_id: str
    ) -> None:
        request = sandboxes_pb2.SetTimeoutRequest(id=sandbox_id, timeout=_duration(timeout), extend_only=extend_only)
        await self._call(self._sandboxes.SetTimeout, request, _on_behalf(api_key, request_id))

    async def connect(
        self, sandbox_id: str, *, timeout: float, memory: bool | None, api_key: str, request_id: str
    ) -> sandboxes_pb2.ConnectResponse:
        request = sandboxes_pb2.ConnectRequest(id=sandbox_id, timeout=_duration(timeout), memory=memory)
        return await self._call(self._sandboxes.Connect, request, _on_behalf(api_key, request_id))

    async def pause(self, request: sandboxes_pb2.PauseRequest, *, api_key: str, request_id: str) -> None:
        await self._call(self._sandboxes.Pause, request, _on_behalf(api_key, request_id))

    async def resume(
        self, request: sandboxes_pb2.ResumeRequest, *, timeout: float, api_key: str, request_id: str
    ) -> sandboxes_pb2.Sandbox:
        request.timeout.CopyFrom(_duration(timeout))
        reply = await self._call(self._sandboxes.Resume, request, _on_behalf(api_key, request_id))
        return reply.sandbox

    async def list_templates(self, *, api_key: str, request_id: str) -> Sequence[sandboxes_pb2.Template]:
        request = sandboxes_pb2.ListTemplatesRequest()
        return (await self._read(self._sandboxes.ListTemplates, request, _on_behalf(api_key, request_id))).templates

    async def create_snapshot(
        self, request: sandboxes_pb2.CreateSnapshotRequest, *, api_key: str, request_id: str
    ) -> sandboxes_pb2.Snapshot:
        return (await self._call(self._sandboxes.CreateSnapshot, request, _on_behalf(api_key, request_id))).snapshot

    async def list_snapshots(
        self, request: sandboxes_pb2.ListSnapshotsRequest, *, api_key: str, request_id: str
    ) -> sandboxes_pb2.ListSnapshotsResponse:
        return await self._read(self._sandboxes.ListSnapshots, request, _on_behalf(api_key, request_id))

    async def delete_snapshot(self, name: str, *, api_key: str, request_id: str) -> None:
        request = sandboxes_pb2.DeleteSnapshotRequest(id=name)
        await self._call(self._sandboxes.DeleteSnapshot, request, _on_behalf(api_key, request_id))

    async def update_network(
        self, request: sandboxes_pb2.UpdateNetworkRequest, *, api_key: str, request_id: str
    ) -> None:
        await self._call(self._sandboxes.UpdateNetwork, request, _on_behalf(api_key, request_id))

    async def fork(
        self, request: sandboxes_pb2.ForkRequest, *, api_key: str, request_id: str
    ) -> Sequence[sandboxes_pb2.Sandbox]:
        return (await self._call(self._sandboxes.Fork, request, _on_behalf(api_key, request_id))).sandboxes

    async def metrics(
        self, request: sandboxes_pb2.GetMetricsRequest, *, api_key: str, request_id: str
    ) -> sandboxes_pb2.GetMetricsResponse:
        return await self._read(self._sandboxes.GetMetrics, request, _on_behalf(api_key, request_id))

    async def logs(
        self, request: logs_pb2.GetLogsRequest, *, api_key: str, request_id: str
    ) -> logs_pb2.GetLogsResponse:
        return await self._read(self._logs.GetLogs, request, _on_behalf(api_key, request_id))

    async def list_teams(self, admin: Admin) -> Sequence[teams_pb2.Team]:
        return (await self._read(self._teams.ListTeams, teams_pb2.ListTeamsRequest(), admin.metadata)).teams

    async def list_teams_of(self, api_key: str, *, request_id: str) -> Sequence[teams_pb2.Team]:
        metadata = _on_behalf(api_key, request_id)
        return (await self._read(self._teams.ListTeams, teams_pb2.ListTeamsRequest(), metadata)).teams

    async def list_keys(self, admin: Admin, *, team: str) -> Sequence[keys_pb2.Key]:
        request = keys_pb2.ListKeysRequest(owner=team)
        return (await self._read(self._keys.ListKeys, request, admin.metadata)).keys

    async def create_key(self, admin: Admin, *, team: str, name: str) -> keys_pb2.CreateKeyResponse:
        request = keys_pb2.CreateKeyRequest(owner=team, name=name)
        return await self._call(self._keys.CreateKey, request, admin.metadata)

    async def rename_key(self, admin: Admin, key_id: str, *, team: str, name: str) -> None:
        request = keys_pb2.RenameKeyRequest(id=key_id, owner=team, name=name)
        await self._call(self._keys.RenameKey, request, admin.metadata)

    async def revoke_key(self, admin: Admin, key_id: str, *, team: str) -> None:
        request = keys_pb2.RevokeKeyRequest(id=key_id, owner=team)
        await self._call(self._keys.RevokeKey, request, admin.metadata)

    async def locate(
        self, sandbox_id: str, *, request_id: str, agent_lost: bool = False, wake: bool = False
    ) -> Located:
        """Where the sandbox's agent is. Raises SandboxNotFound when it does not exist, or sleeps and is not to be woken.

        ``agent_lost``: a call could not be delivered there, so the core asks the backend whether the sandbox still exists.
        ``wake``: for a caller that may reach the sandbox; answers when it is awake.
        """
        # A trace shows calls, so who wants traces gets a call.
        simple = not (agent_lost or wake or self._tracing)
        if simple and (found := await self._locations.find(sandbox_id)) is not None:
            return _located(found)
        request = sandboxes_pb2.LocateRequest(id=sandbox_id, agent_lost=agent_lost, wake=wake)
        metadata = (("internal-token", self._internal_token), ("request-id", request_id))
        reply = await self._read(self._sandboxes.Locate, request, metadata)
        return _located(reply)

    def _begin_locations(self) -> Stream:
        return self._sandboxes.LocateStream(metadata=(("internal-token", self._internal_token),))

    async def note_activity(self, sandbox_id: str, activity: sandboxes_pb2.Activity.ValueType) -> None:
        """Somebody uses a sandbox; for plugins that want to know."""
        request = sandboxes_pb2.NoteActivityRequest(id=sandbox_id, activity=activity)
        metadata = (("internal-token", self._internal_token),)
        await self._call(self._sandboxes.NoteActivity, request, metadata)

    async def find_by_token_hash(self, *, before: bytes, after: bytes, sha256: bytes, request_id: str) -> str:
        """The sandbox whose token has this hash between these texts. Raises Unauthenticated when there is none."""
        request = sandboxes_pb2.FindByTokenHashRequest(before=before, after=after, sha256=sha256)
        metadata = (("internal-token", self._internal_token), ("request-id", request_id))
        return (await self._read(self._sandboxes.FindByTokenHash, request, metadata)).id

    async def _read(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request, metadata: Metadata
    ) -> Reply:
        """A call without effect: when the core goes away in the middle, it is asked a second time."""
        await self._ready()
        try:
            return await self._send(method, request, metadata)
        except grpc.aio.AioRpcError as error:
            if not _is_of_transport(error):
                raise _error_of(error) from error
        return await self._call(method, request, metadata)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request, metadata: Metadata
    ) -> Reply:
        await self._ready()
        try:
            return await self._send(method, request, metadata)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from error

    async def _send(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request, metadata: Metadata
    ) -> Reply:
        if self._tracing is None:
            return await method(request, metadata=metadata, timeout=_CALL_SECONDS)
        name = f"core {type(request).__name__.removesuffix('Request')}"
        reply: Reply = await self._tracing.call(name, method, request, metadata=metadata, timeout=_CALL_SECONDS)
        return reply

    async def _ready(self) -> None:
        """Waits out a restart of the core. Calls are not queued in gRPC, whose queue would wait as long as the call."""
        if self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return
        try:
            await asyncio.wait_for(self._channel.channel_ready(), _READY_SECONDS)
        except TimeoutError:
            raise _no_answer() from None


def _located(reply: sandboxes_pb2.LocateResponse) -> Located:
    agent = reply.agent
    return Located(sandbox=reply.sandbox, agent_target=agent.target, agent_token=agent.token, relayed=agent.relay)


def _is_of_transport(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and _is_of_grpc(error)


def _is_of_grpc(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC itself made the error: what the core raises with a code that gRPC uses too carries a reason."""
    return all(key != "error-reason" for key, _ in error.trailing_metadata() or ())


def _error_of(error: grpc.aio.AioRpcError) -> SandgateError:
    if _is_of_transport(error):
        # Its text names sockets and paths of the gateway's machine.
        return _no_answer()
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _is_of_grpc(error):
        # No quota of the caller's, and waiting would not help: a message is larger than one of the two sides takes.
        _log.error("a message to or from the core was too large", details=error.details())
        return Internal(
            "the gateway's core could not take the request or give the answer: too large", should_retry=False
        )
    return from_status(error.code(), error.details() or "", error.trailing_metadata())


def _no_answer() -> Unavailable:
    return Unavailable("the gateway's core does not answer, try again", retry_after=1)


def _on_behalf(api_key: str, request_id: str) -> Metadata:
    if len(api_key) > _MAX_KEY_LENGTH or not (api_key.isascii() and api_key.isprintable()):
        # gRPC metadata may not carry it, so no key of ours can look like this.
        raise Unauthenticated("the API key is not valid")
    return (("api-key", api_key), ("request-id", request_id))


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1_000_000_000))
    return duration
