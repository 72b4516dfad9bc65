"""``sandgate audit``: who changed what on a running gateway, through the core's ``AuditService``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate.core_client import Core, connected
from sandgate.tables import show_table, when
from sandgate_api.core.v1 import audit_pb2
from sandgate_errors import InvalidArgument

__all__ = ["show"]

_PAGE = 1000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def show(
    state_dir: Path,
    *,
    filters: Mapping[str, str],
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print entries, newest first. ``filters`` by field; times as :func:`moment` reads them."""
    request = audit_pb2.ListAuditRequest(**filters)  # type: ignore[arg-type]
    for field, text in ((request.since, since), (request.until, until)):
        if text is not None:
            field.CopyFrom(moment(text))
    with connected(state_dir) as core:
        entries = list(_entries(core, request, limit))
    if as_json:
        items = [MessageToDict(entry, preserving_proto_field_name=True) for entry in entries]
        click.echo(json.dumps(items, indent=2, ensure_ascii=False))
        return
    rows = [
        (
            when(e.time),
            e.team or "-",
            e.key_name or e.key_id or "-",
            e.action,
            e.subject or "-",
            e.outcome,
            e.request_id,
        )
        for e in entries
    ]
    headings = ("TIME", "TEAM", "KEY", "ACTION", "SUBJECT", "OUTCOME", "REQUEST")
    show_table(headings, rows, nothing="no entries")


def moment(text: str) -> Timestamp:
    """A time as people write it: ``90m``, ``2h``, ``7d`` ago, or ISO 8601, in UTC where it names no zone."""
    found = Timestamp()
    try:
        if text[-1:] in _UNITS and text[:-1].isdecimal():
            found.FromDatetime(datetime.now(UTC) - timedelta(seconds=int(text[:-1]) * _UNITS[text[-1]]))
        else:
            parsed = datetime.fromisoformat(text)
            found.FromDatetime(parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        raise InvalidArgument(f"'{text}' is no time: write 90m, 2h, 7d, or 2026-01-31T12:00") from None
    return found


def _entries(core: Core, request: audit_pb2.ListAuditRequest, limit: int) -> Iterator[audit_pb2.AuditEntry]:
    while limit > 0:
        request.limit = min(limit, _PAGE)
        page = core.ask(core.audit.ListAudit, request).entries
        yield from page
        if len(page) < request.limit:
            return
        limit -= len(page)
        request.before = page[-1].id
