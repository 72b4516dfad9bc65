"""A machine without room is no quota of the caller's: another time, or another caller, would meet it too.

Backends say both with ResourceExhausted (they know no teams, so it is never one's quota). Clients branch on the difference:
a quota is 429 and waits for something of their own to end, a lack of room is 503 with a slug (errors.md 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandgate_errors import NoSpace, ResourceExhausted, Unavailable

__all__ = ["of_the_machines"]

_SLUG = "sandbox_capacity_unavailable"
#: Seconds until there may be room: another sandbox has to end first.
_RETRY_AFTER = 10.0


@contextmanager
def of_the_machines() -> Iterator[None]:
    """Around a backend's work that needs room; nothing of it is left where there is none, so it may be asked for again."""
    try:
        yield
    except NoSpace:
        raise  # a full disk has a status of its own, and does not get emptier by waiting
    except ResourceExhausted as error:
        raise Unavailable(
            error.message,
            error_code=_SLUG,
            retry_after=_RETRY_AFTER if error.retry_after is None else error.retry_after,
            should_retry=True,
        ) from error
