"""Calls of the core's sandbox service: from arguments to requests and back, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC

from google.protobuf.duration_pb2 import Duration

from sandgate.client.limits import request_limit
from sandgate.client.records import SandboxInfo, SandboxState
from sandgate.client.steps import Ask, Method, Steps
from sandgate_api.core.v1 import sandboxes_pb2 as pb
from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound

__all__ = [
    "DEFAULT_TIMEOUT",
    "Wanted",
    "connect",
    "create",
    "get_info",
    "is_paused",
    "kill",
    "listed",
    "pause",
    "resume",
    "set_timeout",
]

#: Seconds of life of a sandbox, where the caller names no other time.
DEFAULT_TIMEOUT = 300
#: Seconds that a create may take; the core's own limit for the backend is 60 unless it was configured.
_CREATE_LIMIT = 120.0
#: Seconds that a pause or a resume may take: it may write or read all of a sandbox's memory.
_PAUSE_LIMIT = 120.0

_SERVICE = "/sandgate_api.core.v1.SandboxService/"
_CREATE = Method(_SERVICE + "Create", pb.CreateResponse)
_GET = Method(_SERVICE + "Get", pb.GetResponse)
_LIST = Method(_SERVICE + "List", pb.ListResponse)
_KILL = Method(_SERVICE + "Kill", pb.KillResponse)
_SET_TIMEOUT = Method(_SERVICE + "SetTimeout", pb.SetTimeoutResponse)
_CONNECT = Method(_SERVICE + "Connect", pb.ConnectResponse)
_PAUSE = Method(_SERVICE + "Pause", pb.PauseResponse)

_STATES = {
    pb.SANDBOX_STATE_RUNNING: SandboxState.RUNNING,
    pb.SANDBOX_STATE_PAUSED: SandboxState.PAUSED,
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A sandbox to make."""

    template: str
    timeout: float
    metadata: Mapping[str, str]
    envs: Mapping[str, str]
    allow_internet_access: bool

    def request(self) -> pb.CreateRequest:
        try:
            return pb.CreateRequest(
                template_id=self.template,
                timeout=_duration(self.timeout),
                metadata=self.metadata,
                envs=self.envs,
                # The edge's users of this sandbox need its token too, and an open sandbox is nobody's wish.
                secure=True,
                allow_internet_access=self.allow_internet_access,
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the sandbox's description cannot be sent: {error}") from None


def create(wanted: Wanted, timeout: float | None) -> Steps[str]:
    """Make a sandbox; its id, once it takes commands."""
    limit = _CREATE_LIMIT if timeout is None else request_limit(timeout)
    reply = yield Ask(method=_CREATE, request=wanted.request(), metadata=(), timeout=limit)
    created: str = reply.sandbox.id
    return created


def connect(sandbox_id: str, life: float, timeout: float | None) -> Steps[None]:
    """Wake the sandbox if it is paused, and let it live for at least ``life`` seconds from now."""
    yield from resume(sandbox_id, life, memory=True, timeout=timeout)


def pause(sandbox_id: str, *, memory: bool, timeout: float | None) -> Steps[bool]:
    """Whether it ran; False when it was paused already."""
    request = pb.PauseRequest(id=sandbox_id, memory=memory)
    limit = _PAUSE_LIMIT if timeout is None else request_limit(timeout)
    try:
        yield Ask(method=_PAUSE, request=request, metadata=(), timeout=limit)
    except FailedPrecondition:
        if (yield from is_paused(sandbox_id, limit)):
            return False
        raise
    return True


def resume(sandbox_id: str, life: float, *, memory: bool, timeout: float | None) -> Steps[bool]:
    """Whether it was paused; a running one only lives for at least ``life`` seconds from now."""
    request = pb.ConnectRequest(id=sandbox_id, timeout=_duration(life), memory=memory)
    limit = _PAUSE_LIMIT if timeout is None else request_limit(timeout)
    reply = yield Ask(method=_CONNECT, request=request, metadata=(), timeout=limit)
    resumed: bool = reply.resumed
    return resumed


def get_info(sandbox_id: str, timeout: float | None) -> Steps[SandboxInfo]:
    reply = yield Ask(method=_GET, request=pb.GetRequest(id=sandbox_id), metadata=(), timeout=request_limit(timeout))
    return _info(reply.sandbox)


def is_paused(sandbox_id: str, timeout: float | None) -> Steps[bool]:
    """Asked of the core, which wakes nothing for it."""
    return (yield from get_info(sandbox_id, timeout)).state is SandboxState.PAUSED


def listed(metadata: Mapping[str, str], timeout: float | None) -> Steps[list[SandboxInfo]]:
    """All sandboxes of the caller whose metadata hold these pairs, newest first."""
    request = pb.ListRequest(metadata=metadata)
    found: list[SandboxInfo] = []
    while True:
        reply = yield Ask(method=_LIST, request=request, metadata=(), timeout=request_limit(timeout))
        found += map(_info, reply.sandboxes)
        if not reply.next_page_token:
            return found
        request = pb.ListRequest(metadata=metadata, page_token=reply.next_page_token)


def kill(sandbox_id: str, timeout: float | None) -> Steps[bool]:
    """Whether there was such a sandbox."""
    request = pb.KillRequest(id=sandbox_id)
    try:
        yield Ask(method=_KILL, request=request, metadata=(), timeout=request_limit(timeout))
    except NotFound:
        return False
    return True


def set_timeout(sandbox_id: str, life: float, timeout: float | None) -> Steps[None]:
    request = pb.SetTimeoutRequest(id=sandbox_id, timeout=_duration(life))
    yield Ask(method=_SET_TIMEOUT, request=request, metadata=(), timeout=request_limit(timeout))


def _duration(seconds: float) -> Duration:
    """Raises InvalidArgument for what the core could not read as a length of time."""
    if not 0 <= seconds <= 100 * 366 * 86_400:
        raise InvalidArgument(f"a sandbox lives for a number of seconds, not {seconds}")
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _info(sandbox: pb.Sandbox) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=sandbox.id,
        template_id=sandbox.template_id,
        backend=sandbox.backend,
        state=_STATES.get(sandbox.state, SandboxState.UNKNOWN),
        started_at=sandbox.started_at.ToDatetime(UTC),
        end_at=sandbox.end_at.ToDatetime(UTC),
        metadata=dict(sandbox.metadata),
        cpu_count=sandbox.resources.cpu_count,
        memory_mb=sandbox.resources.memory_mb,
    )
