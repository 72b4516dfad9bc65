"""What happened in a sandbox: ``GET /sandboxes/{id}/logs`` and its second version (``rest.md`` 4.5).

Lines are the changes of the sandbox's state and, where the gateway keeps it, what its commands wrote. A client pages by
the time of the last line, in milliseconds; the core sees to it that no page lies within one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from aiohttp import web
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import logs_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.identifiers import sandbox_id_in_path
from sandgate_edge.rest.query import query_of
from sandgate_edge.rest.views import JsonObject, timestamp_text
from sandgate_errors import InvalidArgument

__all__ = ["routes"]

routes = web.RouteTableDef()

Level: TypeAlias = Literal["debug", "info", "warn", "error"]

_MOST = 1000
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_LEVELS: dict[Level, logs_pb2.LogLevel.ValueType] = {
    "debug": logs_pb2.LOG_LEVEL_DEBUG,
    "info": logs_pb2.LOG_LEVEL_INFO,
    "warn": logs_pb2.LOG_LEVEL_WARN,
    "error": logs_pb2.LOG_LEVEL_ERROR,
}
_LEVEL_NAMES = {number: name for name, number in _LEVELS.items()}
_DIRECTIONS = frozenset({"forward", "backward"})
#: The last millisecond that a timestamp can say.
_LAST_MILLISECOND = int(datetime.max.replace(tzinfo=UTC).timestamp()) * 1000 + 999


@routes.get("/sandboxes/{id}/logs", allow_head=False)
@key_first
async def logs_v1(request: web.Request) -> web.Response:
    """From ``start`` (milliseconds) on, oldest first, at most ``limit``."""
    query = query_of(request)
    since = _from(_number(query, "start"))
    lines = await _lines(request, logs_pb2.GetLogsRequest(since=since, limit=_limit(query)))
    return web.json_response(
        {"logs": [_older_view(line) for line in lines], "logEntries": [_view(line) for line in lines]}
    )


@routes.get("/v2/sandboxes/{id}/logs", allow_head=False)
@key_first
async def logs_v2(request: web.Request) -> web.Response:
    """From ``cursor`` (milliseconds) forward or backward, at least of ``level``, with ``search`` in the message."""
    query = query_of(request)
    limit = _limit(query)
    level = _choice(query, "level", _LEVELS, default="debug")
    backward = _choice(query, "direction", _DIRECTIONS, default="forward") == "backward"
    cursor = _number(query, "cursor")
    message = logs_pb2.GetLogsRequest(
        since=None if backward else _from(cursor),
        until=_to(cursor) if backward else None,
        backward=backward,
        limit=limit,
        level=next(number for name, number in _LEVELS.items() if name == level),
        search=query.get("search", ""),
    )
    return web.json_response({"logs": [_view(line) for line in await _lines(request, message)]})


async def _lines(request: web.Request, message: logs_pb2.GetLogsRequest) -> Iterable[logs_pb2.LogLine]:
    message.id = sandbox_id_in_path(request)
    answer = await request.app[CORE].logs(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    return answer.lines


def _view(line: logs_pb2.LogLine) -> JsonObject:
    return {
        "timestamp": timestamp_text(line.time),
        "message": line.message,
        "level": _LEVEL_NAMES[line.level],
        "fields": {"logger": line.logger, **line.fields},
    }


def _older_view(line: logs_pb2.LogLine) -> JsonObject:
    """JSON text within JSON."""
    text = {
        "timestamp": timestamp_text(line.time),
        "level": _LEVEL_NAMES[line.level],
        "message": line.message,
        "logger": line.logger,
        **line.fields,
    }
    return {"timestamp": timestamp_text(line.time), "line": json.dumps(text)}


def _from(milliseconds: int | None) -> Timestamp | None:
    return None if milliseconds is None else _timestamp(milliseconds, rest=0)


def _to(milliseconds: int | None) -> Timestamp | None:
    """To the end of that millisecond: what clients were given had parts of it."""
    return None if milliseconds is None else _timestamp(milliseconds, rest=999_999)


def _timestamp(milliseconds: int, *, rest: int) -> Timestamp:
    seconds, part = divmod(min(milliseconds, _LAST_MILLISECOND), 1000)
    return Timestamp(seconds=seconds, nanos=part * 1_000_000 + rest)


def _limit(query: dict[str, str]) -> int:
    limit = _number(query, "limit")
    if limit == 0:
        raise InvalidArgument("limit must be at least 1")
    return min(limit or _MOST, _MOST)


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise InvalidArgument(f"{name} must be a whole number")
    return int(text)


def _choice(query: dict[str, str], name: str, choices: Iterable[str], *, default: str) -> str:
    chosen = query.get(name, default)
    if chosen not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(sorted(choices))}")
    return chosen
