"""The time limits and intervals that a client asks for in headers (behaviour W11, T1 to T7, O14)."""

from __future__ import annotations

import re

from sandgate_errors import InvalidArgument

__all__ = ["keepalive_seconds", "passed_on", "timeout_ms"]

# It ends a stream by itself once nothing came for as long as the whole limit, and in an error of its transport's, which no
# program expects. Earlier and later releases leave the end to the agent, or report their own as a timeout.
_RACES_THE_LIMIT = re.compile(r"e2b-python-sdk/2\.(?:1[5-9]|2[0-9])\.", re.ASCII)
# What an agent may need to end a command and to say so, with something to spare on a busy machine.
_HEAD_START_MS = 200
_TIMEOUT = re.compile(r"[0-9]{1,10}", re.ASCII)
_INTERVAL = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


def timeout_ms(header: str | None) -> int | None:
    """``Connect-Timeout-Ms``: milliseconds, or None for no limit, which absent and 0 both mean (T4, T5)."""
    if header is None:
        return None
    if not _TIMEOUT.fullmatch(header):
        raise InvalidArgument("Connect-Timeout-Ms must be a whole number of at most 10 digits")
    return int(header) or None


def passed_on(header: str | None, *, user_agent: str = "") -> str | None:
    """The same for a call whose limit the agent keeps: it looks at the user first, and refuses what is unreadable (P27).

    A little less for the Python SDK from 2.15 to 2.29, so that it has the agent's word in time (T3).
    """
    try:
        limit = timeout_ms(header)
    except InvalidArgument:
        return "unreadable"
    if limit is None:
        return None
    if _RACES_THE_LIMIT.match(user_agent):
        limit -= min(_HEAD_START_MS, limit // 5)
    return str(limit)


def keepalive_seconds(header: str | None) -> int | None:
    """``Keepalive-Ping-Interval``: seconds; None, the agent's own default, where it is absent or unreadable (O14)."""
    return int(header) if header is not None and _INTERVAL.fullmatch(header) else None
