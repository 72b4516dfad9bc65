"""One sandbox of the backend under test, and its agent as the gateway speaks to it: gRPC with the token, nothing between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import grpc
import grpc.aio

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import filesystem_pb2_grpc, process_pb2, process_pb2_grpc
from sandgate_plugin_api.backend import Backend
from sandgate_plugin_api.records import Placement, SandboxRequest, Usage
from sandgate_plugin_api.testsuite.deployment import Deployment

__all__ = ["Agent", "Box", "Done", "agent_at", "made", "request_for", "rest_of"]

#: Seconds for one call of an agent: a bound against hanging, not a measure.
CALL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    def text(self) -> str:
        """What it wrote. Fails when it failed."""
        assert self.exit_code == 0, f"exit code {self.exit_code}: {self.stderr or self.stdout}"
        return self.stdout.strip()


class Agent:
    """Calls of one agent."""

    def __init__(self, channel: grpc.aio.Channel, placement: Placement) -> None:
        self._token = placement.agent.token
        self.process: Any = process_pb2_grpc.ProcessStub(channel)
        self.filesystem: Any = filesystem_pb2_grpc.FilesystemStub(channel)
        self.agent: Any = agent_pb2_grpc.AgentStub(channel)

    def metadata(self, user: str | None = None) -> tuple[tuple[str, str | bytes], ...]:
        proof: tuple[tuple[str, str | bytes], ...] = (("agent-token", self._token),)
        return proof if user is None else (*proof, ("acting-user-bin", user.encode()))

    def start(self, command: str, *, user: str | None = None, stdin: bool = False, **config: Any) -> Any:
        """A command in a shell, as a stream of events."""
        process = process_pb2.ProcessConfig(cmd="/bin/sh", args=["-c", command], **config)
        return self.process.Start(
            process_pb2.StartRequest(process=process, stdin=stdin), metadata=self.metadata(user), timeout=CALL_SECONDS
        )

    async def run(self, command: str, *, user: str | None = None, **config: Any) -> Done:
        output: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        code: int | None = None
        async for response in self.start(command, user=user, **config):
            if response.event.HasField("data"):
                kind = response.event.data.WhichOneof("output")
                output[kind] += getattr(response.event.data, kind)
            elif response.event.HasField("end"):
                code = response.event.end.exit_code
        assert code is not None, "the stream of a command ended without its end event"
        texts = {name: data.decode(errors="replace") for name, data in output.items()}
        return Done(exit_code=code, **texts)

    async def background(self, command: str) -> int:
        """Start a command and leave it running; its pid."""
        call = self.start(command)
        first = await call.read()
        call.cancel()
        pid: int = first.event.start.pid
        return pid

    async def init(self, sandbox_id: str, *, envs: Mapping[str, str] | None = None) -> None:
        request = agent_pb2.InitRequest(sandbox_id=sandbox_id, template_id="suite", envs=envs or {})
        await self.agent.Init(request, metadata=self.metadata(), timeout=CALL_SECONDS)

    async def usage(self) -> Usage:
        """As the agent measures."""
        found = await self.agent.Metrics(agent_pb2.MetricsRequest(), metadata=self.metadata(), timeout=CALL_SECONDS)
        return Usage(**{field.name: getattr(found, field.name) for field in fields(Usage)})

    async def write(
        self, path: str, content: bytes, *, user: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> Any:
        async def parts() -> AsyncIterator[agent_pb2.WriteFileRequest]:
            header = agent_pb2.WriteFileRequest.Header(path=path, metadata=metadata)
            yield agent_pb2.WriteFileRequest(header=header)
            for start in range(0, len(content), 64 * 1024):
                yield agent_pb2.WriteFileRequest(data=content[start : start + 64 * 1024])

        return await self.agent.WriteFile(parts(), metadata=self.metadata(user), timeout=CALL_SECONDS)

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        call = self.agent.ReadFile(
            agent_pb2.ReadFileRequest(path=path), metadata=self.metadata(user), timeout=CALL_SECONDS
        )
        return b"".join([part.data async for part in call])


async def rest_of(call: Any) -> list[process_pb2.ProcessEvent]:
    """The events of a stream from where it was read to."""
    events = []
    while (message := await call.read()) is not grpc.aio.EOF:
        events.append(message.event)
    return events


@asynccontextmanager
async def agent_at(placement: Placement) -> AsyncIterator[Agent]:
    # Without a pool of its own, gRPC would show a new agent at an old address with the old one's back-off.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500))
    async with grpc.aio.insecure_channel(placement.agent.target, options=options) as channel:
        yield Agent(channel, placement)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A sandbox that was made."""

    backend: Backend
    request: SandboxRequest
    placement: Placement

    @property
    def handle(self) -> Mapping[str, object]:
        return self.placement.handle

    def agent(self) -> Any:
        """Its agent, as an async context."""
        return agent_at(self.placement)

    async def run(self, command: str, *, user: str | None = None, **config: Any) -> Done:
        async with agent_at(self.placement) as agent:
            return await agent.run(command, user=user, **config)

    def moved(self, placement: Placement) -> Box:
        return replace(self, placement=placement)


async def request_for(deployment: Deployment, backend: Backend, **fields: Any) -> SandboxRequest:
    template = fields.pop("template", None) or await deployment.template(backend)
    return SandboxRequest(sandbox_id=deployment.new_id(), template=template, **fields)


@asynccontextmanager
async def made(deployment: Deployment, backend: Backend, *, init: bool = True, **fields: Any) -> AsyncIterator[Box]:
    """A sandbox for the block, as the core makes it: reserved, created, told who it is."""
    request = await request_for(deployment, backend, **fields)
    handle = backend.reserve(request)
    try:
        async with asyncio.timeout(deployment.options.create_seconds):
            placement = await backend.create(request, handle)
        handle = placement.handle
        if init:
            async with agent_at(placement) as agent:
                await agent.init(request.sandbox_id)
        yield Box(backend=backend, request=request, placement=placement)
    finally:
        await backend.destroy(handle)
