"""Times that callers give, read in one way everywhere: seconds, and 0 for "no limit" as in the E2B SDKs."""

from __future__ import annotations

import math

from sandgate_errors import InvalidArgument

__all__ = ["DEFAULT_REQUEST_TIMEOUT", "request_limit", "seconds_of"]

#: Seconds for one answer, where the caller names no other time.
DEFAULT_REQUEST_TIMEOUT = 60.0


def seconds_of(timeout: float | None) -> float | None:
    """A time limit; None for none. Raises InvalidArgument for what is no length of time."""
    if timeout is None or timeout == 0:
        return None
    if not (math.isfinite(timeout) and timeout > 0):
        raise InvalidArgument(f"a time limit is a number of seconds, and 0 for none; not {timeout}")
    return timeout


def request_limit(timeout: float | None) -> float | None:
    """How long to wait for one answer; None: for ever."""
    return DEFAULT_REQUEST_TIMEOUT if timeout is None else seconds_of(timeout)
