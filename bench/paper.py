"""A backend whose sandboxes are entries in a dictionary: what the gateway itself costs with thousands of them.

All share one agent, which answers what the core asks of it and runs nothing. :func:`installed` makes it a plugin that a
gateway finds; it is part of no distribution.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from sandgate_api.agent.v1 import agent_pb2
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
    hookimpl,
)

__all__ = ["Paper", "installed", "sandgate_register_backends"]

_ROOT = Path(__file__).resolve().parents[1]


async def _init(_request: agent_pb2.InitRequest, _context: Any) -> agent_pb2.InitResponse:
    return agent_pb2.InitResponse(agent_version="paper")


async def _metrics(_request: agent_pb2.MetricsRequest, _context: Any) -> agent_pb2.MetricsResponse:
    return agent_pb2.MetricsResponse(cpu_count=1)


def _agent() -> grpc.GenericRpcHandler:
    # The types know handlers of the synchronous server only.
    methods: dict[str, Any] = {
        "Init": grpc.unary_unary_rpc_method_handler(
            cast(Any, _init), agent_pb2.InitRequest.FromString, agent_pb2.InitResponse.SerializeToString
        ),
        "Metrics": grpc.unary_unary_rpc_method_handler(
            cast(Any, _metrics), agent_pb2.MetricsRequest.FromString, agent_pb2.MetricsResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("sandgate_api.agent.v1.Agent", methods)


class Paper(Backend):
    """Nothing is started and nothing kept."""

    name = "paper"
    capabilities = frozenset({Capability.PAUSE_FILESYSTEM})

    def __init__(self, context: BackendContext) -> None:
        self._target = f"unix:{context.runtime_dir / 'agent.sock'}"
        self._server = grpc.aio.server()
        self._known: dict[str, Placement] = {}

    async def open(self) -> None:
        self._server.add_generic_rpc_handlers((_agent(),))
        self._server.add_insecure_port(self._target)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(None)

    async def templates(self) -> Sequence[Template]:
        return [Template(id="base", resources=Resources(cpu_count=1, memory_mb=1, disk_size_mb=1))]

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"id": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        address = AgentAddress(target=self._target, token="none")
        placement = self._known[request.sandbox_id] = Placement(handle=handle, agent=address)
        return placement

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        return self._known.get(str(handle["id"]))

    async def survey(self) -> Sequence[Survivor]:
        return [Survivor(sandbox_id=name, handle=placement.handle) for name, placement in self._known.items()]

    async def destroy(self, handle: Mapping[str, object]) -> None:
        self._known.pop(str(handle["id"]), None)

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        return handle

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        return self._known[str(handle["id"])]


@hookimpl
def sandgate_register_backends(registrar: Any) -> None:
    registrar.add(Paper)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While the block runs, gateways that are started find it."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="sg-paper-") as folder:
        info = Path(folder) / "paper-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: paper\nVersion: 1\nRequires-Dist: sandgate-plugin-api~=1.0\n"
        )
        (info / "entry_points.txt").write_text("[sandgate.plugins]\npaper = bench.paper\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(_ROOT), *([before] if before else [])])
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
