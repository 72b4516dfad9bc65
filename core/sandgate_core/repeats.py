"""Which create a request repeats: the idempotency key that a client sends with every attempt of one call (rest.md 1.4).

The key is kept with the record of the sandbox that the first attempt made, so it holds as long as that record, over
restarts, and for one owner. An attempt that came to nothing leaves its key to the next one. The store's unique index
decides between attempts that come at the same moment.
"""

from __future__ import annotations

import hashlib
import re

from sandgate_core.records import SandboxRecord
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_errors import Conflict, InvalidArgument, RequestMismatch

__all__ = ["Repeats", "check_key", "digest_of", "in_progress"]

_KEY = re.compile(r"[a-z0-9-]{1,255}")
#: Seconds until a client should ask again for a sandbox that is being made: about what making one takes.
_RETRY_AFTER = 1.0


class Repeats:
    """Answers repeated creates from what the store has."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def earlier(self, *, owner: str, key: str, digest: str | None) -> SandboxRecord | None:
        """What the first attempt made, also when it has ended since; None when this is the first.

        Raises RequestMismatch when it asked for something else, Conflict while it is under way.
        """
        record = await self._store.find_by_key(owner, key)
        if record is None:
            return None
        if record.request_digest != digest:
            raise RequestMismatch(
                "this idempotency key was used with another request",
                error_code="idempotency_request_mismatch",
                should_retry=False,
            )
        if record.state is State.CREATING:
            raise in_progress()
        return record


def in_progress() -> Conflict:
    return Conflict(
        "the first request with this idempotency key is under way",
        error_code="idempotency_in_progress",
        retry_after=_RETRY_AFTER,
        should_retry=True,
    )


def check_key(key: str) -> str:
    """``key``. Raises InvalidArgument when no client could have meant it."""
    if not _KEY.fullmatch(key):
        raise InvalidArgument("an idempotency key has 1 to 255 of a-z, 0-9 and '-'")
    return key


def digest_of(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()
