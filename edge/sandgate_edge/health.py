"""``GET /health``, ``/ready``, ``/metrics``, ``/envs``: is it there, what does it use and tell (H1 to H4, C27).

One address serves both planes: where a request names a sandbox it asks about that one, else about the gateway.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio
from aiohttp import web

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge import routing
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, CORE, REQUEST_ID

__all__ = ["routes"]

Answer = TypeVar("Answer")

routes = web.RouteTableDef()
_MIB = 1024 * 1024
# An agent that takes longer is not going to answer a question this small.
_ANSWER_SECONDS = 10.0


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """204 for a sandbox that is there, 502 for one that is not; no token, and no stale answer: the core is asked.

    Only to wake one that sleeps takes the token (R15).
    """
    if routing.sandbox_id_of(request) is None and not routing.brings_token(request):
        return web.json_response({"status": "ok"})

    def access(located: Located) -> None:
        if not located.awake:
            routing.check_access_token(request, located)

    await routing.locate(request, access=access)
    return web.Response(status=204, headers={"Cache-Control": "no-store"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """Whether a request would be served: the core is asked. Needs no key, and tells no more than that."""
    if routing.sandbox_id_of(request) is not None:
        # An agent has no such route, and its sandbox must not be taken for ready.
        raise web.HTTPNotFound
    serves = await request.app[CORE].serves()
    body = {"status": "ready" if serves else "not ready"}
    return web.json_response(body, status=200 if serves else 503, headers={"Cache-Control": "no-store"})


@routes.get("/metrics", allow_head=False)
async def metrics(request: web.Request) -> web.Response:
    """What the sandbox uses now, as its agent measures it."""
    reply = await _ask(request, lambda agent, **how: agent.Metrics(agent_pb2.MetricsRequest(), **how))
    return web.json_response(_view(reply), headers={"Cache-Control": "no-store"})


@routes.get("/envs", allow_head=False)
async def envs(request: web.Request) -> web.Response:
    """The variables that each command of the sandbox gets. Often secrets: whoever asks needs the token."""
    reply = await _ask(request, lambda agent, **how: agent.GetEnvs(agent_pb2.GetEnvsRequest(), **how))
    return web.json_response(dict(sorted(reply.envs.items())), headers={"Cache-Control": "no-store"})


async def _ask(request: web.Request, call: Callable[..., Awaitable[Answer]]) -> Answer:
    """What the agent of the sandbox that is meant answers to whoever has its token."""
    located = await routing.admit(request)
    agents = request.app[AGENTS]
    metadata = agents.metadata(located, request_id=request[REQUEST_ID])
    try:
        return await call(agents.agent(located), metadata=metadata, timeout=_ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise await routing.lost(request, located, error) from error


def _view(sample: agent_pb2.MetricsResponse) -> dict[str, int | float]:
    return {
        "ts": sample.time.seconds,
        "cpu_count": sample.cpu_count,
        "cpu_used_pct": round(sample.cpu_used_pct, 2),
        "mem_total": sample.mem_total,
        "mem_used": sample.mem_used,
        "mem_cache": sample.mem_cache,
        "mem_total_mib": sample.mem_total // _MIB,
        "mem_used_mib": sample.mem_used // _MIB,
        "disk_used": sample.disk_used,
        "disk_total": sample.disk_total,
    }
