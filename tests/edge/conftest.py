"""A real edge on a real socket between a real client and peers whose behaviour a test decides.

The peers are gRPC servers that speak the core's and the agent's services: what an edge must do when they answer late,
fail or vanish cannot be asked of real ones. The way through the real ones is in ``tests/journeys``.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2_grpc
from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_api.envd.v1 import filesystem_pb2_grpc, process_pb2_grpc
from sandgate_edge.app import build
from sandgate_edge.server import Server
from sandgate_edge.settings import Settings
from sandgate_errors import SandboxNotFound, SandgateError, Unauthenticated
from sandgate_errors.grpc import status_of, trailers_of
from sandgate_testing import raw_http

OPEN = "iopen"
SECURED = "isecured"
TOKEN = "tok123"
LIMIT = 100_000


class Core(sandboxes_pb2_grpc.SandboxServiceServicer):
    """Knows where sandboxes are; a test takes them away."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, sandboxes_pb2.LocateResponse] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.searches = 0
        """How often it was asked whose a token is."""
        self.asleep: set[str] = set()
        """Answered for without an agent until a question wakes them."""
        self.after_answer: Callable[[], None] = lambda: None

    def add(self, sandbox_id: str, *, target: str, token: str = "") -> None:
        self.sandboxes[sandbox_id] = sandboxes_pb2.LocateResponse(
            sandbox=sandboxes_pb2.Sandbox(id=sandbox_id, access_token=token),
            agent=sandboxes_pb2.AgentAddress(target=target, token=f"agent-token-of-{sandbox_id}"),
        )

    async def Locate(self, request, context):
        self.asked.append((request.id, dict(context.invocation_metadata())))
        if request.id not in self.sandboxes:
            await fail(context, SandboxNotFound.of(request.id))
        answer = self.sandboxes[request.id]
        if request.wake:
            self.asleep.discard(request.id)
        if request.id in self.asleep:
            answer = sandboxes_pb2.LocateResponse(sandbox=answer.sandbox)
        self.after_answer()
        return answer

    async def FindByTokenHash(self, request, context):
        self.searches += 1
        for sandbox_id, answer in self.sandboxes.items():
            token = answer.sandbox.access_token.encode()
            if token and hashlib.sha256(request.before + token + request.after).digest() == request.sha256:
                return sandboxes_pb2.FindByTokenHashResponse(id=sandbox_id)
        return await fail(context, Unauthenticated("invalid signature"))

    async def LocateStream(self, request_iterator, context):
        """Nothing is simple here, so that every question comes to Locate, where tests look."""
        async for request in request_iterator:
            yield sandboxes_pb2.LocateStreamResponse(answers=[sandboxes_pb2.LocateResponse() for _ in request.ids])


Answer = Callable[[Any, grpc.aio.ServicerContext], Any]


@dataclass
class Agent:
    """Answers each method as the test says; keeps what it was asked."""

    target: str
    on: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a stream's handler has ended, however it did."""
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1),))
        services = (
            (process_pb2_grpc.ProcessServicer, process_pb2_grpc.add_ProcessServicer_to_server),
            (filesystem_pb2_grpc.FilesystemServicer, filesystem_pb2_grpc.add_FilesystemServicer_to_server),
            (agent_pb2_grpc.AgentServicer, agent_pb2_grpc.add_AgentServicer_to_server),
        )
        for servicer, add in services:
            add(self._servicer(servicer), self.server)
        self.server.add_insecure_port(self.target)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)

    def _servicer(self, servicer: type) -> Any:
        names = [name for name in vars(servicer) if not name.startswith("_")]
        return type("Scripted", (servicer,), {name: self._method(name) for name in names})()

    def _method(self, name: str) -> Any:
        streams = name in {"Start", "Connect", "WatchDir", "ReadFile"}

        async def unary(_self: object, request: Any, context: grpc.aio.ServicerContext) -> Any:
            self._note(name, request, context)
            return await self._guarded(self.on[name](request, context), context)

        async def stream(_self: object, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            self._note(name, request, context)
            try:
                async for message in self.on[name](request, context):
                    yield message
            except SandgateError as error:
                await fail(context, error)
            finally:
                self.ended.set()

        return stream if streams else unary

    def _note(self, name: str, request: Any, context: grpc.aio.ServicerContext) -> None:
        self.requests.append((name, request))
        self.metadata.append(dict(context.invocation_metadata() or ()))

    async def _guarded(self, answer: Awaitable[Any], context: grpc.aio.ServicerContext) -> Any:
        try:
            return await answer
        except SandgateError as error:
            await fail(context, error)
        finally:
            self.ended.set()


async def fail(context: grpc.aio.ServicerContext, error: SandgateError) -> None:
    await context.abort(status_of(error), error.message, trailers_of(error))


@dataclass(kw_only=True)
class Edge:
    """An edge under test with its peers."""

    address: tuple[str, int]
    core: Core
    agent: Agent
    server: Server

    async def ask(
        self,
        path: str,
        *,
        method: str = "POST",
        sandbox: str | None = OPEN,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> raw_http.RawReply:
        """One request by a client of its own."""
        data = self.request(path, method=method, sandbox=sandbox, headers=headers, body=body)
        return await asyncio.to_thread(raw_http.exchange, self.address, data)

    def request(
        self,
        path: str,
        *,
        method: str = "POST",
        sandbox: str | None = OPEN,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> bytes:
        named = {} if sandbox is None else {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "49983"}
        return raw_http.request(method, path, {**named, **(headers or {})}, body=body)

    async def unary(
        self, path: str, body: bytes = b"{}", *, kind: str = "json", sandbox: str = OPEN, **headers: str
    ) -> raw_http.RawReply:
        fields = {"Content-Type": f"application/{kind}", **_header_names(headers)}
        return await self.ask(path, sandbox=sandbox, headers=fields, body=body)

    async def stream(
        self, path: str, body: bytes, *, kind: str = "json", sandbox: str = OPEN, **headers: str
    ) -> raw_http.RawReply:
        fields = {"Content-Type": f"application/connect+{kind}", **_header_names(headers)}
        return await self.ask(path, sandbox=sandbox, headers=fields, body=body)

    async def open_stream(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream call whose answer the test reads itself, with ``headers`` instead of a body length if they say so."""
        reader, writer = await asyncio.open_connection(*self.address)
        fields = {"Content-Type": "application/connect+json", **(headers or {})}
        writer.write(self.request(path, headers=fields, body=body))
        await writer.drain()
        return reader, writer


def _header_names(keywords: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in keywords.items()}


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    core, core_target = Core(), f"unix:{tmp_path}/core.sock"
    agent = Agent(f"unix:{tmp_path}/agent.sock")
    core.add(OPEN, target=agent.target)
    core.add(SECURED, target=agent.target, token=TOKEN)
    core_server = grpc.aio.server()
    sandboxes_pb2_grpc.add_SandboxServiceServicer_to_server(core, core_server)
    core_server.add_insecure_port(core_target)
    await core_server.start()
    await agent.start()
    settings = Settings(
        core=core_target, internal_token="internal", listen_fd=0, domain="box.test", max_rpc_bytes=LIMIT
    )
    server = Server(build(settings))
    sock = socket.create_server(("127.0.0.1", 0))
    await server.start(sock)
    yield Edge(address=sock.getsockname(), core=core, agent=agent, server=server)
    await server.close()
    await agent.stop()
    await core_server.stop(None)
