"""An edge before a real agent, in whose sandbox a server runs; the core is a double that says where the agent is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandgate_testing import raw_http
from sandgate_testing.agent_process import TOKEN, Agent, Running, an_agent

SANDBOX = "ibox"
DOMAIN = "box.test"
SERVER = Path(__file__).with_name("server.py").read_text()


@dataclass(kw_only=True)
class Ports:
    """The edge, its sandbox and the server in it."""

    edge: Any
    agent: Agent
    running: Running
    port: int
    progress: Path

    @property
    def host(self) -> str:
        return f"{self.port}-{SANDBOX}.{DOMAIN}"

    def request(self, target: str, method: str = "GET", *, body: bytes = b"", **headers: str) -> bytes:
        fields = {"Host": self.host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return raw_http.request(method, target, fields, body=body)

    async def ask(self, target: str, method: str = "GET", *, body: bytes = b"", **headers: str) -> raw_http.RawReply:
        return await self.send(self.request(target, method, body=body, **headers))

    async def send(self, data: bytes) -> raw_http.RawReply:
        return await asyncio.to_thread(raw_http.exchange, self.edge.address, data)

    async def told(self, target: str, method: str = "GET", *, body: bytes = b"", **headers: str) -> dict[str, Any]:
        """What the server saw."""
        reply = await self.ask(target, method, body=body, **headers)
        assert reply.status == 200, reply
        told: dict[str, Any] = json.loads(reply.body)
        return told

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(*self.edge.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def ports(edge: Any, tmp_path: Path) -> AsyncIterator[Ports]:
    progress = tmp_path / "progress"
    async with an_agent("same") as agent, agent.running("python3", "-c", SERVER, "0", str(progress)) as running:
        port = int((await running.read_until(b"\n")).split()[0])
        edge.core.add(SANDBOX, target=agent.target)
        edge.core.sandboxes[SANDBOX].agent.token = TOKEN
        yield Ports(edge=edge, agent=agent, running=running, port=port, progress=progress)
