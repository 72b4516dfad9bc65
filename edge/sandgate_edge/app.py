"""The edge's application: its routes, what surrounds each of them, and the parts that live as long as the process.

The two planes share one address. A request that names a sandbox is for its agent; every other is for the gateway itself.
Middlewares, from the outside in: the log line, requests to ports of sandboxes, cross-origin preflight, errors to
responses, the border of the planes.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from sandgate_edge import ambiguity, cors, draining, health, ports, request_log, routing, rpc, tracing
from sandgate_edge.agents import Agents
from sandgate_edge.bearers import Bearers
from sandgate_edge.core_client import CoreClient
from sandgate_edge.keys import (
    AGENTS,
    BEARERS,
    CORE,
    DRAIN,
    HANDOVER,
    POLICY,
    REQUEST_ID,
    ROOM,
    SANDBOX_ID,
    SETTINGS,
    STREAMS,
    TELEMETRY,
)
from sandgate_edge.policy import EdgePolicy, agent_requests, opened
from sandgate_edge.responses import connect_error, files_error, http_error, internal, rest_error, rpc_http_error
from sandgate_edge.rest import changes, events, files, metrics, sandboxes, snapshots, teams, templates
from sandgate_edge.rest.handover import Handover
from sandgate_edge.room import Room
from sandgate_edge.settings import Settings
from sandgate_edge.telemetry import Reporter, Telemetry
from sandgate_errors import InvalidArgument, SandgateError
from sandgate_plugin_api.policies import Policies
from sandgate_tracing import Tracing

__all__ = ["build"]

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RPC_PATH = re.compile(r"/[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+/\w+", re.ASCII)
_HEALTH = "/health"
_AGENT_PATHS = frozenset({"/files", _HEALTH, "/metrics", "/envs"})


def build(settings: Settings) -> web.Application:
    """The application; its channels open when it starts and close when it ends. Raises FailedPrecondition."""
    traces = Tracing.start("edge") if settings.traces == "otlp" else None
    outermost = [] if traces is None else [tracing.following(traces)]
    app = web.Application(
        middlewares=[
            *outermost,
            request_log.observe,
            ports.forward,
            cors.preflight,
            errors_to_responses,
            *([agent_requests] if settings.plugins else []),
            border_of_planes,
        ],
        # Every handler bounds what it reads by its own rule; aiohttp's limit would only apply to some ways of reading.
        client_max_size=0,
    )
    app[SETTINGS] = settings
    app[POLICY] = EdgePolicy(Policies.load(settings.plugins))
    app[STREAMS] = set()
    app[ROOM] = Room(settings.max_rpc_bytes)
    app[BEARERS] = Bearers()
    app[DRAIN] = draining.Drain()
    app[TELEMETRY] = Telemetry()
    app.cleanup_ctx.append(functools.partial(_channels, traces=traces))
    if settings.plugins:
        app.cleanup_ctx.append(opened)
    if settings.metrics:
        app.cleanup_ctx.append(_reporting)
    app.on_response_prepare.append(cors.add_headers)
    app.on_response_prepare.append(request_log.add_header)
    app.on_response_prepare.append(draining.add_header)
    app.add_routes(health.routes)
    app.add_routes(rpc.routes)
    app.add_routes(files.routes)
    app.add_routes(teams.routes)
    # Before the routes of one sandbox, which would take `metrics` for an id.
    app.add_routes(metrics.routes)
    app.add_routes(templates.routes)
    app.add_routes(snapshots.routes)
    app.add_routes(changes.routes)
    app.add_routes(events.routes)
    app.add_routes(sandboxes.routes)
    return app


async def _channels(app: web.Application, traces: Tracing | None) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    app[CORE] = CoreClient(settings.core, settings.internal_token, tracing=traces)
    app[AGENTS] = Agents(max_rpc_bytes=settings.max_rpc_bytes, tracing=traces)
    app[HANDOVER] = Handover()
    yield
    app[HANDOVER].close()
    await app[AGENTS].close()
    await app[CORE].close()
    if traces is not None:
        await asyncio.to_thread(traces.close)


async def _reporting(app: web.Application) -> AsyncIterator[None]:
    streams = app[STREAMS]
    reporter = Reporter(
        app[TELEMETRY], send=app[CORE].report, worker=app[SETTINGS].worker, streams=lambda: len(streams)
    )
    reporter.start()
    yield
    await reporter.close()


@web.middleware
async def errors_to_responses(request: web.Request, handler: Next) -> web.StreamResponse:
    """Every error leaves in the words of the plane that was asked. A client that left is not an error."""
    if (fault := ambiguity.fault_of(request)) is not None:
        response = _told(request, fault)
        response.force_close()
        return response
    try:
        if request.path != _HEALTH:
            draining.check(request)
        return await handler(request)
    except SandgateError as error:
        error = await request.app[POLICY].error(request, error)
        response = _told(request, error)
    except web.RequestPayloadError:
        broken = InvalidArgument("the request body is broken")
        response = files_error(broken) if _is_for_agent(request) else rest_error(broken)
    except web.HTTPException as error:
        response = rpc_http_error(error) if _is_rpc(request) else http_error(error)
    except ConnectionError:
        raise
    except Exception as error:
        failure = internal(error, request_id=request[REQUEST_ID])
        response = connect_error(failure) if _is_rpc(request) else rest_error(failure)
    if request.writer.output_size > 0:
        # An answer had begun. Ending it in order would pass a part off as the whole.
        routing.cut(request)
    return response


@web.middleware
async def border_of_planes(request: web.Request, handler: Next) -> web.StreamResponse:
    """A host of a sandbox never leads to the control plane, whatever the path. Headers that name one, with the agent's
    port, mean nothing there: the Python SDK from 2.7 to 2.26 sends them with ``connect``.
    """
    for_agent = _is_for_agent(request)
    try:
        named = routing.sandbox_id_of(request)
    except routing.NamedInVain:
        if for_agent:
            raise
        named = None
    if named is not None and for_agent:
        request[SANDBOX_ID], _ = named
    elif named is not None and routing.is_on_host_of_sandbox(request):
        raise web.HTTPNotFound
    return await handler(request)


def _told(request: web.Request, error: SandgateError) -> web.Response:
    if not _is_for_agent(request):
        return rest_error(error)
    if isinstance(error, routing.SandboxGone | routing.PortClosed) and ports.wants_page(request.headers):
        # Somebody follows a link to a file of a sandbox that is gone (R6).
        return ports.refusal(request, error, sandbox_id=error.sandbox_id, port=routing.AGENT_PORT)
    return files_error(error)


def _is_rpc(request: web.Request) -> bool:
    return _RPC_PATH.fullmatch(request.path) is not None


def _is_for_agent(request: web.Request) -> bool:
    return request.path in _AGENT_PATHS or _is_rpc(request)
