"""Names under which the application holds its long-lived parts, and under which a request carries what was found out.

They stand apart from ``app.py`` so that handlers need not import the application they are part of.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.agents import Agents
from sandgate_edge.bearers import Bearers
from sandgate_edge.core_client import CoreClient
from sandgate_edge.rest.handover import Handover
from sandgate_edge.room import Place, Room
from sandgate_edge.settings import Settings
from sandgate_edge.telemetry import Telemetry
from sandgate_plugin_api import AgentRequest, RestRequest

if TYPE_CHECKING:
    from sandgate_edge.draining import Drain
    from sandgate_edge.policy import EdgePolicy

__all__ = [
    "AGENTS",
    "AGENT_REQUEST",
    "ANSWER_BEGAN",
    "BEARERS",
    "CORE",
    "DRAIN",
    "ERROR_CODE",
    "HANDOVER",
    "NAMED",
    "PLACE",
    "POLICY",
    "PORT",
    "REQUEST_ID",
    "REST_REQUEST",
    "ROOM",
    "SANDBOX_ID",
    "SETTINGS",
    "STREAMS",
    "TARGET",
    "TELEMETRY",
    "TRACE_ID",
    "USED",
]

CORE: Final = web.AppKey("core", CoreClient)
POLICY: Final[web.AppKey[EdgePolicy]] = web.AppKey("policy", object)  # type: ignore[arg-type]
"""Where plugins are asked. Its class knows these keys, so it cannot be named here but as a type."""
DRAIN: Final[web.AppKey[Drain]] = web.AppKey("drain", object)  # type: ignore[arg-type]
"""Whether the edge is stopping. Its class knows these keys, as that of ``POLICY`` does."""
AGENTS: Final = web.AppKey("agents", Agents)
BEARERS: Final = web.AppKey("bearers", Bearers)
HANDOVER: Final = web.AppKey("handover", Handover)
ROOM: Final = web.AppKey("room", Room)
SETTINGS: Final = web.AppKey("settings", Settings)
TELEMETRY: Final = web.AppKey("telemetry", Telemetry)
STREAMS: Final[web.AppKey[set[asyncio.Transport]]] = web.AppKey("streams", set)
"""Connections whose answer has no end of its own; a stopping edge resets them instead of waiting."""

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Request key: one id for one request, in every log line about it. Set by the outermost middleware."""
NAMED: Final[web.RequestKey[tuple[str, int] | None]] = web.RequestKey("named", tuple)
"""Request key: what ``routing.sandbox_id_of`` found, so that it is looked for once."""
PORT: Final = web.RequestKey("port", int)
"""Request key: the port of a sandbox that the request is for; absent when it is for an agent or the gateway."""
TARGET: Final = web.RequestKey("target", str)
"""Request key: the request's target as it came, where routing was given another."""
PLACE: Final = web.RequestKey("place", Place)
"""What an RPC holds of the room for large messages."""
SANDBOX_ID: Final = web.RequestKey("sandbox_id", str)
"""Request key: the sandbox a request is about, for the log; absent when it names none."""
ANSWER_BEGAN: Final = web.RequestKey("answer_began", float)
"""Request key: when the answer of a stream or a file began, by ``time.perf_counter``."""
ERROR_CODE: Final = web.RequestKey("error_code", str)
"""Request key: the Connect code that a stream ended with, whose status was 200 before."""
TRACE_ID: Final = web.RequestKey("trace_id", str)
"""Request key: the trace that the request belongs to, for the log; absent without traces."""
REST_REQUEST: Final[web.RequestKey[tuple[RestRequest, bool]]] = web.RequestKey("rest_request", tuple)
"""Request key: the request of the control plane as plugins want it, and whether it has no body; absent without them."""
AGENT_REQUEST: Final = web.RequestKey("agent_request", AgentRequest)
"""Request key: the request of the data plane as plugins want it; absent without them."""
USED: Final[web.RequestKey[tuple[str, sandboxes_pb2.Activity.ValueType]]] = web.RequestKey("used", tuple)
"""Request key: the sandbox that the request uses, and how; absent where no plugin wants to know."""
