"""The query of the list routes: filters, order and page size, out of their text forms (``rest.md`` 1.5 and 4.4).

The metadata filter is encoded three times by the clients: every key and value is percent-encoded, the pairs are joined
as a form, and the form becomes one query value. One layer is gone when :mod:`sandgate_edge.rest.query` hands it over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import unquote

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_errors import InvalidArgument

__all__ = ["MAX_PAGE", "list_request", "parse_limit", "parse_metadata", "parse_order", "parse_states", "parse_time"]

#: The largest page, and the one that is given when no size is named.
MAX_PAGE = 100

_STATES = {
    "running": sandboxes_pb2.SANDBOX_STATE_RUNNING,
    "paused": sandboxes_pb2.SANDBOX_STATE_PAUSED,
}
_ORDERS = {"asc": sandboxes_pb2.ORDER_ASC, "desc": sandboxes_pb2.ORDER_DESC}
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
# RFC 3339. A space may stand where the `+` of the offset was decoded as a form.
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,100}))?(?:[Zz]|([+ -])(\d\d):(\d\d))", re.ASCII
)


def list_request(query: Mapping[str, list[str]]) -> sandboxes_pb2.ListRequest:
    """The message for the parameters of ``GET /v2/sandboxes``. Raises InvalidArgument that names the parameter."""
    first = {name: values[0] for name, values in query.items()}
    started_after = first.get("startedAfter", "")
    return sandboxes_pb2.ListRequest(
        metadata=parse_metadata(first.get("metadata", "")),
        # Repeated parameters are the other usual way to write a list.
        states=parse_states(",".join(query.get("state", []))),
        page_size=parse_limit(first["limit"]) if "limit" in first else MAX_PAGE,
        page_token=_text("nextToken", first.get("nextToken", "")),
        order=parse_order(first.get("order", "")),
        started_after=parse_time(started_after) if started_after else None,
        template=_text("template", first.get("template", "")),
    )


def parse_metadata(value: str) -> dict[str, str]:
    """The pairs of the filter; an empty value filters nothing (``behaviour.md`` C21).

    ``value`` is what the query string holds after its own decoding. Raises InvalidArgument for anything that the two
    remaining layers cannot have produced.
    """
    if not value:
        return {}
    pairs: dict[str, str] = {}
    for part in _unescape(value.replace("+", " ")).split("&"):
        if part.count("=") != 1:
            raise InvalidArgument("metadata must be key=value pairs joined by '&'")
        key, item = (_unescape(text) for text in part.split("="))
        if key in pairs:
            raise InvalidArgument("metadata names a key twice")
        pairs[key] = item
    return pairs


def _unescape(text: str) -> str:
    if _BROKEN_ESCAPE.search(text):
        raise InvalidArgument("metadata holds a broken percent-escape")
    try:
        return _text("metadata", unquote(text, errors="strict"))
    except UnicodeDecodeError:
        raise InvalidArgument("metadata is not valid UTF-8") from None


def _text(name: str, value: str) -> str:
    if "\0" in value:
        raise InvalidArgument(f"{name} must not contain NUL")
    return value


def parse_states(value: str) -> list[sandboxes_pb2.SandboxState.ValueType]:
    """States of a comma list; an empty one means all."""
    names = [name for name in value.split(",") if name]
    if unknown := [name for name in names if name not in _STATES]:
        raise InvalidArgument(f"state must be 'running' or 'paused', not {unknown[0][:40]!a}")
    return [_STATES[name] for name in dict.fromkeys(names)]


def parse_order(value: str) -> sandboxes_pb2.Order.ValueType:
    if not value:
        return sandboxes_pb2.ORDER_DESC
    if value not in _ORDERS:
        raise InvalidArgument("order must be 'asc' or 'desc'")
    return _ORDERS[value]


def parse_limit(value: str) -> int:
    """A page size; more than the maximum is cut to it (``behaviour.md`` C17)."""
    if not _INTEGER.fullmatch(value):
        raise InvalidArgument("limit must be an integer")
    limit = int(value)
    if limit < 1:
        raise InvalidArgument("limit must be at least 1")
    return min(limit, MAX_PAGE)


def parse_time(value: str) -> Timestamp:
    """A moment with its offset from UTC; digits beyond nanoseconds are dropped."""
    match = _TIME.fullmatch(value)
    if match is None:
        raise InvalidArgument("startedAfter must be an RFC 3339 time with an offset")
    year, month, day, hour, minute, second, fraction, sign, *offset = match.groups()
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=_zone(sign, *offset)
        ).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidArgument("startedAfter is not a time that exists") from None
    whole = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    return Timestamp(seconds=whole, nanos=int((fraction or "")[:9].ljust(9, "0")))


def _zone(sign: str | None, hours: str | None, minutes: str | None) -> timezone:
    if sign is None or hours is None or minutes is None:
        return UTC
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    # A minute of 60 would silently be the next hour.
    if int(minutes) > 59:
        raise ValueError(minutes)
    return timezone(-offset if sign == "-" else offset)
