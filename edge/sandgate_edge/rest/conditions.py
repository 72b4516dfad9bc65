"""Conditional requests by date (RFC 9110 section 13); files have no entity tags here (``behaviour.md`` D7)."""

from __future__ import annotations

import enum
from email.utils import formatdate

from aiohttp import web

__all__ = ["Verdict", "check_conditions", "http_date", "is_conditional", "range_holds"]

_CONDITIONS = ("If-Modified-Since", "If-Unmodified-Since", "If-Match", "If-None-Match", "If-Range")


class Verdict(enum.Enum):
    """What the conditions say about a file."""

    SEND = enum.auto()
    #: 304
    NOT_MODIFIED = enum.auto()
    #: 412
    FAILED = enum.auto()


def is_conditional(request: web.Request) -> bool:
    return any(name in request.headers for name in _CONDITIONS)


def check_conditions(request: web.Request, modified: int) -> Verdict:
    """``modified`` is in whole seconds since 1970, as the date headers are."""
    if "If-Match" in request.headers:
        # Without a tag nothing but the file's existence can match.
        if request.headers["If-Match"].strip() != "*":
            return Verdict.FAILED
    elif (limit := request.if_unmodified_since) is not None and modified > limit.timestamp():
        return Verdict.FAILED
    if "If-None-Match" in request.headers:
        return Verdict.NOT_MODIFIED if request.headers["If-None-Match"].strip() == "*" else Verdict.SEND
    if (since := request.if_modified_since) is not None and modified <= since.timestamp():
        return Verdict.NOT_MODIFIED
    return Verdict.SEND


def range_holds(request: web.Request, modified: int) -> bool:
    """Whether ``If-Range`` lets the range stand: absent, or the exact date. A tag never matches."""
    if "If-Range" not in request.headers:
        return True
    date = request.if_range
    return date is not None and int(date.timestamp()) == modified


def http_date(seconds: int) -> str | None:
    """The date as headers have it; None for a time that no calendar can show, which anybody can give a file."""
    try:
        return formatdate(seconds, usegmt=True)
    except (ValueError, OverflowError, OSError):
        return None
