"""The core as a whole: the store, the sandboxes and the gRPC server on top of them.

Opened in the order of dependence and closed in the reverse one. The server answers only when the start is complete: what
the store and the backends hold has been put in order, so no call sees a state that is about to be corrected.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from sandgate_api.core.v1 import (
    audit_pb2_grpc,
    edges_pb2_grpc,
    keys_pb2_grpc,
    logs_pb2_grpc,
    peers_pb2_grpc,
    sandboxes_pb2_grpc,
    teams_pb2_grpc,
)
from sandgate_core.agents import MAX_MESSAGE_BYTES, Agents
from sandgate_core.audit import Audit
from sandgate_core.callers import DEFAULT_OWNER, Callers
from sandgate_core.chores import Pause, running
from sandgate_core.command_log_table import CommandLogTable
from sandgate_core.command_logs import CommandLogs
from sandgate_core.edges import Edges
from sandgate_core.interception import Interceptor
from sandgate_core.keys import Keys
from sandgate_core.lease import Lease
from sandgate_core.observed import observed
from sandgate_core.policy import Policy, opened_policy
from sandgate_core.roster import Peer
from sandgate_core.sandboxes import Sandboxes
from sandgate_core.services import (
    AuditService,
    EdgeService,
    KeyService,
    LogService,
    PeerService,
    Relay,
    SandboxService,
    TeamService,
)
from sandgate_core.settings import Settings
from sandgate_core.sharing import Sharing, shared
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_core.teams import Teams
from sandgate_core.telemetry import Telemetry
from sandgate_core.tokens import Tokens
from sandgate_errors import FailedPrecondition
from sandgate_plugin_api import Backend, to_its_end
from sandgate_tracing import Tracing

__all__ = ["Core", "run_core"]

#: Seconds for calls that are under way when the core stops. Streams of the relay do not end by themselves; their callers
#: attach again, which is what they do after a crash too.
_DRAIN = 2.0
#: Seconds between two looks at whether the core may act.
_HEALTH_STEP = 0.5
_FINGERPRINT = "seed-fingerprint"
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default two servers may share one TCP port without noticing, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
    # Clients on other machines ask on a silent connection whether it still lives; by default that is taken for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Core:
    """A core that serves."""

    #: Whether ``first_key`` was added at this start.
    first_key_created: bool
    #: gRPC targets, as configured but with the ports that were chosen.
    targets: list[str]
    #: Set when another core has this one's name, so that this one must end; None where that cannot be.
    lost: asyncio.Event | None


@dataclass(frozen=True)
class _Records:
    """What is known beside the sandboxes."""

    keys: Keys
    teams: Teams
    audit: Audit
    telemetry: Telemetry
    edges: Edges
    tracing: Tracing | None
    logs: CommandLogs


@asynccontextmanager
async def run_core(settings: Settings, backends: Mapping[str, Backend]) -> AsyncIterator[Core]:
    """Serves while the block runs. ``backends`` are opened, and stay the caller's to close.

    Raises FailedPrecondition with one line for the operator.
    """
    store = await Store.open(url=settings.database, state_dir=settings.state_dir)
    tokens = Tokens(settings.seed_bytes)
    try:
        async with (
            shared(store, seconds=settings.lease, token=tokens.between_cores) as sharing,
            _run(settings, backends, store=store, tokens=tokens, sharing=sharing) as core,
        ):
            yield core
    finally:
        await store.close()


@asynccontextmanager
async def _run(
    settings: Settings, backends: Mapping[str, Backend], *, store: Store, tokens: Tokens, sharing: Sharing | None
) -> AsyncIterator[Core]:
    await _check_seed(store, tokens, others=[] if sharing is None else sharing.others)
    changed = None if sharing is None else sharing.peers.refresh
    teams = Teams(store, changed=changed)
    await teams.load()
    keys = Keys(store, teams, changed=changed)
    first_key = None if settings.first_key is None else settings.first_key.get_secret_value()
    created = await keys.ensure_first(first_key, given=settings.first_key_given, owner=DEFAULT_OWNER)
    await keys.load()
    audit = Audit(store, days=settings.audit_days)
    telemetry, edges = Telemetry(), Edges()
    tracing = Tracing.start("core") if settings.traces == "otlp" else None
    if settings.metrics_listen is not None or tracing is not None:
        backends = {name: observed(backend, telemetry=telemetry, tracing=tracing) for name, backend in backends.items()}
    async with (
        _ended(tracing),
        running(store.forgetting),
        keys.noting_use(),
        audit.writing(),
        _agents(tracing, settings) as agents,
        opened_policy(
            settings.plugins, backends=backends, default=settings.default_backend, state_dir=settings.state_dir
        ) as policy,
        _sandboxes(settings, store, teams, backends, agents, sharing, policy) as sandboxes,
        _command_logs(settings, store, agents, sandboxes) as logs,
        telemetry.served(settings.metrics_listen, sandboxes.questions.counts, edges),
        _served(
            settings,
            sandboxes,
            _Records(keys, teams, audit, telemetry, edges, tracing, logs),
            tokens=tokens,
            agents=agents,
            sharing=sharing,
        ) as targets,
        _taking_part(settings, sharing, targets, keys=keys, teams=teams, backends=backends),
    ):
        yield Core(first_key_created=created, targets=targets, lost=store.lost)


async def _check_seed(store: Store, tokens: Tokens, *, others: Sequence[Peer]) -> None:
    """Refuse to hand out tokens that differ from those of other cores, or that clients of protected sandboxes hold."""
    known = await store.agree(_FINGERPRINT, tokens.fingerprint)
    if known == tokens.fingerprint:
        return
    if others:
        raise FailedPrecondition(
            f"the seed is not that of the other cores on this database ({', '.join(peer.host for peer in others)}): "
            "give all of them the same SANDGATE_SEED"
        )
    protected = [record for record in await store.live() if record.secure and record.state is not State.KILLING]
    if protected:
        raise FailedPrecondition(
            f"the seed is not the one that {len(protected)} protected sandboxes were made with: "
            "restore the seed, or kill them with it first"
        )
    await store.remember(_FINGERPRINT, tokens.fingerprint)


@asynccontextmanager
async def _ended(tracing: Tracing | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


@asynccontextmanager
async def _agents(tracing: Tracing | None, settings: Settings) -> AsyncIterator[Agents]:
    agents = Agents(tracing, log_commands=settings.log_commands)
    try:
        yield agents
    finally:
        await agents.close()


@asynccontextmanager
async def _command_logs(
    settings: Settings, store: Store, agents: Agents, sandboxes: Sandboxes
) -> AsyncIterator[CommandLogs]:
    logs = CommandLogs(CommandLogTable(store), agents)
    async with (
        logs.forgetting(),
        nullcontext() if settings.log_commands == "none" else logs.following(sandboxes.locating.awake),
    ):
        yield logs


@asynccontextmanager
async def _sandboxes(
    settings: Settings,
    store: Store,
    teams: Teams,
    backends: Mapping[str, Backend],
    agents: Agents,
    sharing: Sharing | None,
    policy: Policy,
) -> AsyncIterator[Sandboxes]:
    sandboxes = Sandboxes(
        store=store,
        teams=teams,
        backends=backends,
        default_backend=settings.default_backend,
        agents=agents,
        max_timeout=settings.max_timeout,
        create_timeout=settings.create_timeout,
        sharing=sharing,
        policy=policy,
    )
    if sharing is not None:
        sharing.membership.takers = sandboxes.adoption
    started = False
    try:
        await sandboxes.start()
        started = True
        yield sandboxes
    finally:
        # A start that failed is not an order to end what it found, and under another core's name nothing is ours.
        ours = started and not (store.lost is not None and store.lost.is_set())
        await sandboxes.stop(kill=ours and settings.on_exit == "kill")


@asynccontextmanager
async def _taking_part(
    settings: Settings,
    sharing: Sharing | None,
    targets: Sequence[str],
    *,
    keys: Keys,
    teams: Teams,
    backends: Mapping[str, Backend],
) -> AsyncIterator[None]:
    """While the block runs, the other cores of the database call this one, and it takes over from those that die."""
    if sharing is None:
        yield
        return
    address = settings.address or targets[0]
    if _socket_of(address) is not None and any(peer.host != socket.gethostname() for peer in sharing.others):
        _log.warning("cores on other machines cannot reach this one: its address is a unix socket", address=address)
    movable = [name for name, backend in backends.items() if not backend.host_bound]
    await sharing.membership.serve(address, movable=movable, refresh=lambda: _refresh(keys, teams))
    try:
        yield
    finally:
        sharing.membership.rest()


async def _refresh(keys: Keys, teams: Teams) -> None:
    await teams.load()
    await keys.load()


@asynccontextmanager
async def _served(
    settings: Settings,
    sandboxes: Sandboxes,
    records: _Records,
    *,
    tokens: Tokens,
    agents: Agents,
    sharing: Sharing | None,
) -> AsyncIterator[list[str]]:
    callers = Callers(records.keys, internal_token=settings.internal_token.get_secret_value(), tokens=tokens)
    server = grpc.aio.server(
        interceptors=[Interceptor(callers, records.audit, records.telemetry, sandboxes.routing, records.tracing)],
        options=_OPTIONS,
    )
    service = SandboxService(
        sandboxes,
        tokens=tokens,
        envd_version=settings.envd_version,
        relay=lambda: "" if sharing is None else sharing.membership.address,
    )
    sandboxes_pb2_grpc.add_SandboxServiceServicer_to_server(service, server)
    keys_pb2_grpc.add_KeyServiceServicer_to_server(KeyService(records.keys), server)
    teams_pb2_grpc.add_TeamServiceServicer_to_server(TeamService(records.teams), server)
    audit_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(records.audit), server)
    logs_pb2_grpc.add_LogServiceServicer_to_server(LogService(sandboxes, records.logs), server)
    edges_pb2_grpc.add_EdgeServiceServicer_to_server(EdgeService(records.edges), server)
    peers_pb2_grpc.add_PeerServiceServicer_to_server(PeerService(lambda: _refresh(records.keys, records.teams)), server)
    server.add_generic_rpc_handlers((Relay(sandboxes, agents, records.tracing),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    targets = [_listen(server, target) for target in settings.targets]
    try:
        # An order to stop that cut it off would leave a server that can neither run nor be stopped.
        await to_its_end(server.start())
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        _log.info("the core serves", targets=targets, node=sandboxes.node)
        async with running(*([] if sharing is None else [partial(_show_health, checks, sharing.lease)])):
            yield targets
    finally:
        await checks.enter_graceful_shutdown()
        records.edges.close()
        service.end_streams()
        await server.stop(_DRAIN)
        _remove_sockets(targets)


async def _show_health(checks: health.aio.HealthServicer, lease: Lease, pause: Pause) -> None:
    """A core that may not act is not well, until it may."""
    serves = True
    while await pause(_HEALTH_STEP):
        if lease.held is not serves:
            serves = lease.held
            status = health_pb2.HealthCheckResponse.SERVING if serves else health_pb2.HealthCheckResponse.NOT_SERVING
            await checks.set("", status)


def _listen(server: grpc.aio.Server, target: str) -> str:
    """Bind ``target``; its name with the real port. Raises FailedPrecondition."""
    path = _socket_of(target)
    if path is not None:
        # The lock of the state directory is ours, so a socket that is there was left by a core that was killed.
        path.unlink(missing_ok=True)
    try:
        port = server.add_insecure_port(target)
    except RuntimeError as error:
        raise FailedPrecondition(f"the core cannot listen on {target}: in use, or not permitted") from error
    if path is not None:
        os.chmod(path, 0o600)
        return target
    return f"{target.rpartition(':')[0]}:{port}"


def _remove_sockets(targets: list[str]) -> None:
    for target in targets:
        if (path := _socket_of(target)) is not None:
            path.unlink(missing_ok=True)


def _socket_of(target: str) -> Path | None:
    return Path(target.removeprefix("unix:")) if target.startswith("unix:") else None
