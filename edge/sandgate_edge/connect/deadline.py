"""The time limits and intervals that a client asks for in headers (behaviour W11, T1 to T7, O14)."""

from __future__ import annotations

import re

from sandgate_errors import InvalidArgument

__all__ = ["keepalive_seconds", "passed_on", "timeout_ms"]

_TIMEOUT = re.compile(r"[0-9]{1,10}", re.ASCII)
_INTERVAL = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


def timeout_ms(header: str | None) -> int | None:
    """``Connect-Timeout-Ms``: milliseconds, or None for no limit, which absent and 0 both mean (T4, T5)."""
    if header is None:
        return None
    if not _TIMEOUT.fullmatch(header):
        raise InvalidArgument("Connect-Timeout-Ms must be a whole number of at most 10 digits")
    return int(header) or None


def passed_on(header: str | None) -> str | None:
    """The same for a call whose limit the agent keeps: it looks at the user first, and refuses what is unreadable (P27)."""
    try:
        limit = timeout_ms(header)
    except InvalidArgument:
        return "unreadable"
    return None if limit is None else str(limit)


def keepalive_seconds(header: str | None) -> int | None:
    """``Keepalive-Ping-Interval``: seconds; None, the agent's own default, where it is absent or unreadable (O14)."""
    return int(header) if header is not None and _INTERVAL.fullmatch(header) else None
