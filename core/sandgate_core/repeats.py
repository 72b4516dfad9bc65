"""Which create a request repeats: the idempotency key that a client sends with every attempt of one call (rest.md 1.4).

The key is kept with the record of the sandbox that the first attempt made, so it holds as long as that record, over
restarts, and for one owner. An attempt that came to nothing leaves its key to the next one. The store's unique index
decides between attempts that come at the same moment.

Where several cores share the store, the first attempt may have been on one that has died. What any core can reach is taken
over and freed, so that attempt is as good as over; of what is bound to that core's host nobody can say what became of it
until it is back, and the client is told so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from sandgate_core.records import SandboxRecord
from sandgate_core.sharing import Sharing
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_errors import Conflict, InvalidArgument, RequestMismatch
from sandgate_plugin_api import Backend

__all__ = ["Repeats", "check_key", "digest_of", "in_progress"]

_KEY = re.compile(r"[a-z0-9-]{1,255}")
#: Seconds until a client should ask again for a sandbox that is being made: about what making one takes.
_RETRY_AFTER = 1.0
#: And for one whose core is away: about what starting it again takes.
_LATER = 10.0


class Repeats:
    """Answers repeated creates from what the store has."""

    def __init__(self, store: Store, *, backends: Mapping[str, Backend], sharing: Sharing | None) -> None:
        """``sharing``: with the other cores of the store; None where there are none."""
        self._store = store
        self._backends = backends
        self._sharing = sharing

    async def earlier(self, *, owner: str, key: str, digest: str | None) -> SandboxRecord | None:
        """What the first attempt made, also when it has ended since; None when this is the first.

        Raises RequestMismatch when it asked for something else, Conflict while it is under way or nobody knows.
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
            raise self._unknown(record) if await self._is_cut_off(record) else in_progress()
        return record

    async def _is_cut_off(self, record: SandboxRecord) -> bool:
        """Whether the core that was making it has died, and no other can go on in its place."""
        if self._sharing is None or record.core == self._store.node or await self._sharing.roster.lives(record.core):
            return False
        backend = self._backends.get(record.backend)
        return backend is None or backend.host_bound

    def _unknown(self, record: SandboxRecord) -> Conflict:
        return Conflict(
            f"the first request with this idempotency key was cut off: core {record.core}, which knows what became of it, is "
            "away",
            error_code="idempotency_outcome_unknown",
            retry_after=_LATER,
            # With its key a repeat makes nothing twice.
            should_retry=True,
        )


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
