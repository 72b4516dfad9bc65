"""A core over a backend whose sandboxes are small gRPC servers in the test's own process.

The backend is real in what the core can see: its sandboxes exist in a :class:`World` that outlives a core, are found
again by their handles, and speak gRPC on a unix socket of their own. What may be delayed or broken is set by each test.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
import structlog
from google.protobuf.duration_pb2 import Duration
from sqlalchemy.ext.asyncio import create_async_engine

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.core.v1 import (
    audit_pb2,
    audit_pb2_grpc,
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
from sandgate_core import clock
from sandgate_core.agents import Agents
from sandgate_core.sandboxes import Sandboxes
from sandgate_core.server import run_core
from sandgate_core.settings import Settings
from sandgate_core.store import Store
from sandgate_core.teams import Teams
from sandgate_errors import DataLoss, NotFound
from sandgate_errors.grpc import from_status
from sandgate_plugin_api import (
    AgentAddress,
    Backend,
    BackendContext,
    Capability,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
    to_its_end,
)
from sandgate_testing.postgres import PostgresServer
from sandgate_testing.requirements import need

INTERNAL = "internal-token-of-the-tests"
KEY = "e2b_" + "0123456789" * 4
SEED = "5e" * 32


class Agent(agent_pb2_grpc.AgentServicer, grpc.GenericRpcHandler):
    """The agent of one sandbox: takes Init, and shows on other methods what a relayed call looks like."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.inits: list[agent_pb2.InitRequest] = []
        self.calls: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()
        #: Whether it gives no answer to small questions.
        self.hangs = False
        self.initialized: Callable[[], Awaitable[None]] | None = None
        self.journal = secrets.randbits(32) + 1
        self.lines: list[agent_pb2.CommandLine] = []
        self.written = asyncio.Condition()
        #: What each caller of FollowLogs said that it knows.
        self.followed: list[tuple[int, int]] = []

    async def Init(self, request, context):
        if dict(context.invocation_metadata()).get("agent-token") != self.token:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        self.inits.append(request)
        if self.initialized is not None:
            await self.initialized()
        return agent_pb2.InitResponse(agent_version="test")

    async def Metrics(self, request, context):
        if self.hangs:
            await asyncio.Event().wait()
        return agent_pb2.MetricsResponse(cpu_count=2, cpu_used_pct=float("nan"), mem_total=10, mem_used=5)

    async def write(self, *texts, pid=7, tag="", stream=agent_pb2.CommandLine.STREAM_STDOUT, at=None):
        """Lines of a command."""
        for text in texts:
            line = agent_pb2.CommandLine(number=len(self.lines) + 1, pid=pid, tag=tag, stream=stream, text=text)
            line.time.FromMicroseconds(clock.now() if at is None else at)
            self.lines.append(line)
        async with self.written:
            self.written.notify_all()

    async def FollowLogs(self, request, context):
        self.followed.append((request.journal, request.after))
        after = request.after if request.journal == self.journal else 0
        while True:
            async with self.written:
                await self.written.wait_for(lambda: len(self.lines) > after)  # noqa: B023
            fresh = self.lines[after:]
            after += len(fresh)
            yield agent_pb2.FollowLogsResponse(journal=self.journal, lines=fresh)

    def service(self, details):
        """Methods of envd.v1.Test, as bytes: Echo, Fail, Hang, Count, Sink."""
        name = details.method.rpartition("/")[2]
        behaviour = getattr(self, f"_{name.lower()}", None)
        if not details.method.startswith("/sandgate_api.envd.v1.Test/") or behaviour is None:
            return None

        async def observed(requests, context):
            metadata = tuple((key, value) for key, value in context.invocation_metadata())
            self.calls.append({"metadata": metadata, "remaining": context.time_remaining()})
            async for answer in behaviour(requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(observed)

    async def _echo(self, requests, context):
        await context.send_initial_metadata((("initial", "one"), ("initial-bin", b"\x00\xff")))
        async for message in requests:
            yield message
        context.set_trailing_metadata((("trailing", "two"), ("trailing-bin", b"\xff\x00")))

    async def _fail(self, requests, context):
        yield b"before"
        await context.abort(grpc.StatusCode.DATA_LOSS, "what was kept is gone: ä", (("error-code", "slug"),))

    async def _unavailable(self, requests, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent's own words")
        yield b""

    async def _hang(self, requests, context):
        yield b"started"
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def _early(self, requests, context):
        """Answers and ends while the caller's side is still open."""
        yield b"enough"

    async def _flood(self, requests, context):
        for number in range(100_000):
            self.sent = number
            yield bytes(65536)


@dataclass
class Box:
    """One sandbox that exists."""

    agent: Agent
    server: grpc.aio.Server
    placement: Placement
    #: What a pause has kept: "", "memory" or "files".
    paused: str = ""


@dataclass
class World:
    """What exists outside the core and survives it."""

    folder: Path
    boxes: dict[str, Box] = field(default_factory=dict)
    destroyed: list[str] = field(default_factory=list)

    async def make(self, sandbox_id: str, agent: Agent | None = None) -> Box:
        agent = agent or Agent(secrets.token_hex(8))
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((agent,))
        agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
        target = f"unix:{self.folder / sandbox_id[:12]}.sock"
        server.add_insecure_port(target)
        try:
            # A start that is cut off leaves a server that can neither run nor be stopped.
            await to_its_end(server.start())
        except asyncio.CancelledError:
            await to_its_end(server.stop(0))
            raise
        address = AgentAddress(target=target, token=agent.token)
        box = self.boxes[sandbox_id] = Box(
            agent, server, Placement(handle={"id": sandbox_id, "whole": True}, agent=address)
        )
        return box

    async def lose(self, sandbox_id: str) -> None:
        """The sandbox dies by itself."""
        await to_its_end(self.boxes.pop(sandbox_id).server.stop(0))

    async def close(self) -> None:
        for sandbox_id in list(self.boxes):
            await self.lose(sandbox_id)


async def _nothing(_: str) -> None:
    pass


class LocalBackend(Backend):
    """Makes boxes in a world. ``creating`` and ``destroying`` run inside the operation and may wait or raise."""

    name = "local"
    capabilities: frozenset[Capability] = frozenset({Capability.NO_INTERNET})

    def __init__(self, world: World, context: BackendContext | None = None) -> None:
        self.world = world
        self.creating: Callable[[str], Awaitable[None]] = _nothing
        self.created: Callable[[str], Awaitable[None]] = _nothing
        self.destroying: Callable[[str], Awaitable[None]] = _nothing
        self.pausing: Callable[[str], Awaitable[None]] = _nothing
        self.resuming: Callable[[str], Awaitable[None]] = _nothing
        #: What was asked for, in order: "pause memory", "pause files", "resume".
        self.asked: list[str] = []
        self.requests: list[SandboxRequest] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def templates(self) -> Sequence[Template]:
        resources = Resources(cpu_count=2, memory_mb=512, disk_size_mb=1024)
        return [Template(id="base", aliases=("default-image",), resources=resources)]

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"id": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        self.requests.append(request)
        await self.creating(request.sandbox_id)
        box = await self.world.make(request.sandbox_id)
        await self.created(request.sandbox_id)
        return box.placement

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        box = self.world.boxes.get(str(handle["id"]))
        return None if box is None else box.placement

    async def survey(self) -> Sequence[Survivor]:
        return [Survivor(sandbox_id=name, handle=box.placement.handle) for name, box in self.world.boxes.items()]

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        box = self._box(handle)
        self.asked.append(f"pause {'memory' if memory else 'files'}")
        await self.pausing(str(handle["id"]))
        if memory:
            if box.paused == "files":
                raise DataLoss("the memory is gone")
            box.paused = "memory"
        else:
            await box.server.stop(0)
            box.paused = "files"
        return {**handle, "pauses": int(str(handle.get("pauses", 0))) + 1}

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        box = self._box(handle)
        self.asked.append("resume")
        await self.resuming(str(handle["id"]))
        if box.paused == "files":
            box = await self.world.make(str(handle["id"]))
        box.paused = ""
        return Placement(handle=handle, agent=box.placement.agent)

    def _box(self, handle: Mapping[str, object]) -> Box:
        box = self.world.boxes.get(str(handle["id"]))
        if box is None:
            raise NotFound("there is no such sandbox")
        return box

    async def destroy(self, handle: Mapping[str, object]) -> None:
        name = str(handle["id"])
        await self.destroying(name)
        self.world.destroyed.append(name)
        if name in self.world.boxes:
            await self.world.lose(name)


class Client:
    """Calls a core over gRPC as one caller; failures are the taxonomy's errors."""

    def __init__(self, target: str, *credentials: tuple[str, str]) -> None:
        self.channel = grpc.aio.insecure_channel(target)
        self.credentials = credentials
        self._sandboxes = sandboxes_pb2_grpc.SandboxServiceStub(self.channel)
        self._keys = keys_pb2_grpc.KeyServiceStub(self.channel)
        self._teams = teams_pb2_grpc.TeamServiceStub(self.channel)
        self._audit = audit_pb2_grpc.AuditServiceStub(self.channel)
        self._logs = logs_pb2_grpc.LogServiceStub(self.channel)
        self._edges = edges_pb2_grpc.EdgeServiceStub(self.channel)

    async def call(self, method: str, request: Any = None, **fields: Any) -> Any:
        stub = next(
            stub
            for stub in (self._keys, self._teams, self._audit, self._edges, self._logs, self._sandboxes)
            if hasattr(stub, method)
        )
        request = request or getattr(_messages_of(stub), f"{method}Request")(**fields)
        try:
            return await getattr(stub, method)(request, metadata=self.credentials)
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code(), error.details(), tuple(error.trailing_metadata())) from None

    async def create(self, *, timeout: float = 300, **fields: Any) -> sandboxes_pb2.Sandbox:
        fields.setdefault("template_id", "base")
        return (await self.call("Create", timeout=seconds(timeout), **fields)).sandbox

    async def ids(self, **fields: Any) -> list[str]:
        return [sandbox.id for sandbox in (await self.call("List", **fields)).sandboxes]


def _messages_of(stub: Any) -> Any:
    return {
        keys_pb2_grpc.KeyServiceStub: keys_pb2,
        teams_pb2_grpc.TeamServiceStub: teams_pb2,
        audit_pb2_grpc.AuditServiceStub: audit_pb2,
        edges_pb2_grpc.EdgeServiceStub: edges_pb2,
        logs_pb2_grpc.LogServiceStub: logs_pb2,
    }.get(type(stub), sandboxes_pb2)


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(number * 1_000_000))
    return duration


@dataclass
class Running:
    """A core that serves, and ways to call it."""

    target: str
    first_key_created: bool
    stack: AsyncExitStack

    def client(self, *credentials: tuple[str, str]) -> Client:
        client = Client(self.target, *credentials)
        self.stack.push_async_callback(client.channel.close)
        return client

    @property
    def owner(self) -> Client:
        return self.client(("api-key", KEY))

    @property
    def internal(self) -> Client:
        return self.client(("internal-token", INTERNAL))


@dataclass
class Deployment:
    """One state directory and one world; cores are started on it, one after another."""

    folder: Path
    world: World
    backend: LocalBackend
    #: URL; None: SQLite in the folder.
    database: str | None = None

    def settings(self, **changes: Any) -> Settings:
        defaults: dict[str, Any] = {
            "state_dir": self.folder,
            "runtime_dir": self.folder,
            "database": self.database,
            "default_backend": "local",
            "internal_token": INTERNAL,
            "seed": SEED,
            "first_key": KEY,
            "first_key_given": True,
            "envd_version": "0.6.13",
        }
        return Settings(**{**defaults, **changes})

    async def sql(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """What a statement finds in the database, whatever the core thinks of it."""
        engine = create_async_engine(
            f"sqlite+aiosqlite:///{self.folder / 'sandgate.db'}"
            if self.database is None
            else self.database.replace("postgresql:", "postgresql+asyncpg:")
        )
        try:
            async with engine.begin() as connection:
                result = await connection.execute(sa.text(statement), values)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            await engine.dispose()

    @asynccontextmanager
    async def core(self, **changes: Any) -> AsyncIterator[Running]:
        settings = self.settings(**changes)
        # The callers' channels close before the core does.
        async with run_core(settings, {"local": self.backend}) as core, AsyncExitStack() as stack:
            yield Running(core.targets[0], core.first_key_created, stack)


@pytest.fixture(autouse=True)
def plain_log() -> Iterator[None]:
    """As the core's process has it: rendered for a terminal, a traceback takes longer than some deadlines and leases here."""
    structlog.configure(processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])
    yield
    structlog.reset_defaults()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because a unix socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="sgc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests of a worker; it is started by the first that needs it."""
    need("postgres")
    with PostgresServer.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest) -> AsyncIterator[str | None]:
    """An empty database of each kind: its URL, or None for SQLite in the state directory."""
    if request.param == "sqlite":
        yield None
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = await server.new_database()
    yield url
    await server.drop(url)


@pytest.fixture
async def deployment(folder: Path, database: str | None) -> AsyncIterator[Deployment]:
    world = World(folder)
    yield Deployment(folder, world, LocalBackend(world), database)
    await world.close()


@pytest.fixture
async def hosts(folder: Path, postgres: PostgresServer) -> AsyncIterator[tuple[Deployment, Deployment]]:
    """Two state directories on one PostgreSQL database, and a world in which both find the same sandboxes."""
    url = await postgres.new_database()
    world = World(folder)
    for name in "ab":
        (folder / name).mkdir()
    yield (
        Deployment(folder / "a", world, LocalBackend(world), url),
        Deployment(folder / "b", world, LocalBackend(world), url),
    )
    await world.close()
    await postgres.drop(url)


@pytest.fixture
async def core(deployment: Deployment) -> AsyncIterator[Running]:
    async with deployment.core() as running:
        yield running


@pytest.fixture
async def sandboxes(deployment: Deployment) -> AsyncIterator[Sandboxes]:
    """The domain without a server in front, for what depends on the exact moment."""
    store = await Store.open(url=deployment.database, state_dir=deployment.folder)
    agents = Agents()
    sandboxes = Sandboxes(
        store=store,
        teams=Teams(store),
        backends={"local": deployment.backend},
        default_backend="local",
        agents=agents,
        max_timeout=3600,
        create_timeout=60,
    )
    await sandboxes.start()
    yield sandboxes
    await sandboxes.stop(kill=False)
    await agents.close()
    await store.close()


@pytest.fixture
def backend(deployment: Deployment) -> LocalBackend:
    return deployment.backend


@pytest.fixture
def world(deployment: Deployment) -> World:
    return deployment.world


@pytest.fixture
def make_backend() -> type[LocalBackend]:
    return LocalBackend


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Every task that a test's core started has ended with it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(50):
        left = {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"tasks are left: {left}")


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Waits for a condition; the bound is against hangs only."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    return wait
