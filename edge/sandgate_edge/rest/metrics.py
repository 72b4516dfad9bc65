"""What sandboxes used: ``GET /sandboxes/{id}/metrics`` and the newest of several (``behaviour.md`` C25, C26)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from aiohttp import web
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.identifiers import parse_sandbox_id, sandbox_id_in_path
from sandgate_edge.rest.query import parse, query_of
from sandgate_edge.rest.views import JsonObject, timestamp_text
from sandgate_errors import InvalidArgument, SandboxNotFound

__all__ = ["routes"]

routes = web.RouteTableDef()

_MOST_IDS = 100
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)
#: The last second that a timestamp can say.
_LAST_SECOND = int(datetime.max.replace(tzinfo=UTC).timestamp())


@routes.get("/sandboxes/metrics", allow_head=False)
@key_first
async def newest(request: web.Request) -> web.Response:
    """The newest sample of each sandbox that has one; ids that mean nothing to this caller are left out."""
    named = ",".join(parse(request.rel_url.raw_query_string).get("sandbox_ids", []))
    ids = [parse_sandbox_id(text) for text in named.split(",") if text]
    if not 1 <= len(ids) <= _MOST_IDS:
        raise InvalidArgument(f"sandbox_ids must name 1 to {_MOST_IDS} sandboxes")
    answer = await _ask(request, sandboxes_pb2.GetMetricsRequest(ids=ids, latest=True))
    found = {sandbox.id: _view(sandbox.samples[-1]) for sandbox in answer.sandboxes if sandbox.samples}
    return web.json_response({"sandboxes": found})


@routes.get("/sandboxes/{id}/metrics", allow_head=False)
@key_first
async def metrics(request: web.Request) -> web.Response:
    """The samples from ``start`` to ``end``, whole seconds, both inclusive."""
    sandbox_id = sandbox_id_in_path(request)
    query = query_of(request)
    since, until = _second(query, "start"), _second(query, "end")
    if since is not None and until is not None and since > until:
        raise InvalidArgument("start must not be after end")
    message = sandboxes_pb2.GetMetricsRequest(
        ids=[sandbox_id],
        since=None if since is None else Timestamp(seconds=since),
        # To the end of that second: clients cut or round what they were given.
        until=None if until is None else Timestamp(seconds=until, nanos=999_999_999),
    )
    answer = await _ask(request, message)
    if not answer.sandboxes:
        raise SandboxNotFound.of(sandbox_id)
    return web.json_response([_view(sample) for sample in answer.sandboxes[0].samples])


async def _ask(request: web.Request, message: sandboxes_pb2.GetMetricsRequest) -> sandboxes_pb2.GetMetricsResponse:
    return await request.app[CORE].metrics(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])


def _second(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or int(text) > _LAST_SECOND:
        raise InvalidArgument(f"{name} must be a time in whole seconds since 1970")
    return int(text)


def _view(sample: sandboxes_pb2.MetricsSample) -> JsonObject:
    return {
        "timestamp": timestamp_text(sample.time),
        "timestampUnix": sample.time.seconds,
        "cpuCount": sample.cpu_count,
        "cpuUsedPct": round(sample.cpu_used_pct, 2),
        "memUsed": sample.mem_used,
        "memTotal": sample.mem_total,
        "memCache": sample.mem_cache,
        "diskUsed": sample.disk_used,
        "diskTotal": sample.disk_total,
    }
