"""What happened to a sandbox, in the form of logs: ``GET /sandboxes/{id}/logs`` and its second version (``rest.md`` 4.5).

These are the changes of the sandbox's state. What commands write goes to those who follow them and is not kept here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aiohttp import web
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.rest.credentials import api_key_of, key_first
from sandgate_edge.rest.identifiers import sandbox_id_in_path
from sandgate_edge.rest.query import query_of
from sandgate_edge.rest.views import JsonObject, timestamp_text
from sandgate_errors import InvalidArgument

__all__ = ["routes"]

routes = web.RouteTableDef()

Level: TypeAlias = Literal["debug", "info", "warn", "error"]

_MOST = 1000
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")
_DIRECTIONS = frozenset({"forward", "backward"})
# The command line shows it in front of each line.
_LOGGER = "sandgate"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    time: Timestamp
    level: Level
    message: str
    fields: dict[str, str]

    @classmethod
    def of(cls, event: sandboxes_pb2.SandboxEvent) -> _Entry:
        return cls(
            time=event.time,
            level="error" if event.to_state == "failed" else "info",
            message=f"the sandbox is {event.to_state}: {event.note}",
            fields={"logger": _LOGGER, "from": event.from_state, "to": event.to_state, "reason": event.note},
        )

    @property
    def milliseconds(self) -> int:
        return self.time.seconds * 1000 + self.time.nanos // 1_000_000

    def view(self) -> JsonObject:
        return {
            "timestamp": timestamp_text(self.time),
            "message": self.message,
            "level": self.level,
            "fields": self.fields,
        }

    def line(self) -> JsonObject:
        """The older form: JSON text within JSON."""
        text = {"timestamp": timestamp_text(self.time), "level": self.level, "message": self.message, **self.fields}
        return {"timestamp": timestamp_text(self.time), "line": json.dumps(text)}


@routes.get("/sandboxes/{id}/logs", allow_head=False)
@key_first
async def logs_v1(request: web.Request) -> web.Response:
    """From ``start`` (milliseconds) on, oldest first, at most ``limit``."""
    query = query_of(request)
    start, limit = _number(query, "start") or 0, _limit(query)
    entries = [entry for entry in await _entries(request) if entry.milliseconds >= start][:limit]
    return web.json_response(
        {"logs": [entry.line() for entry in entries], "logEntries": [entry.view() for entry in entries]}
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
    search = query.get("search", "")
    entries = [
        entry
        for entry in await _entries(request)
        if _LEVELS.index(entry.level) >= _LEVELS.index(level)
        and search in entry.message
        and (cursor is None or (entry.milliseconds <= cursor if backward else entry.milliseconds >= cursor))
    ]
    if backward:
        entries.reverse()
    return web.json_response({"logs": [entry.view() for entry in entries[:limit]]})


async def _entries(request: web.Request) -> list[_Entry]:
    answer = await request.app[CORE].events(
        sandbox_id_in_path(request), api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    return [_Entry.of(event) for event in answer.events]


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
