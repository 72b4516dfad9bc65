"""The audit: every request to change something that came with a good credential, and what came of it.

Entries are noted by the interceptor when a call is over, whatever became of its caller, and written in batches a moment
later, so no call waits for them. A crash may lose that moment. What cannot be held for the store any longer goes to the
log instead of being lost. Entries are forgotten by age.

Refusals for want of a credential are no entries: anybody could fill the store with them. What the core does of itself, at
a deadline for example, stands in the sandbox's own history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from sandgate_core import clock
from sandgate_core.callers import Caller
from sandgate_core.chores import Pause, running
from sandgate_core.store import Store

__all__ = ["ACTIONS", "Audit", "AuditEntry", "AuditQuery"]

#: What is noted, by gRPC method, and where the answer names what it was about; empty: the request's ``id`` does, which is
#: there whatever came of it and whichever core answered. So a snapshot is about its sandbox.
ACTIONS: Mapping[str, tuple[str, str]] = {
    "/sandgate_api.core.v1.SandboxService/Create": ("sandbox.create", "sandbox"),
    "/sandgate_api.core.v1.SandboxService/Kill": ("sandbox.kill", ""),
    "/sandgate_api.core.v1.SandboxService/SetTimeout": ("sandbox.timeout", ""),
    "/sandgate_api.core.v1.SandboxService/Connect": ("sandbox.connect", ""),
    "/sandgate_api.core.v1.SandboxService/Pause": ("sandbox.pause", ""),
    "/sandgate_api.core.v1.SandboxService/Resume": ("sandbox.resume", ""),
    "/sandgate_api.core.v1.SandboxService/Fork": ("sandbox.fork", ""),
    "/sandgate_api.core.v1.SandboxService/UpdateNetwork": ("sandbox.network", ""),
    "/sandgate_api.core.v1.SandboxService/CreateSnapshot": ("snapshot.create", ""),
    "/sandgate_api.core.v1.SandboxService/DeleteSnapshot": ("snapshot.delete", ""),
    "/sandgate_api.core.v1.KeyService/CreateKey": ("key.create", "key"),
    "/sandgate_api.core.v1.KeyService/RenameKey": ("key.rename", ""),
    "/sandgate_api.core.v1.KeyService/RevokeKey": ("key.revoke", ""),
    "/sandgate_api.core.v1.TeamService/CreateTeam": ("team.create", ""),
    "/sandgate_api.core.v1.TeamService/UpdateTeam": ("team.update", ""),
}
#: Entries that wait for the store. Far more than come in while it is slow; when it is down they go to the log.
_WAITING = 10_000
#: Seconds between two writes, in which entries gather, and until the next attempt after one that failed.
_GATHER = 0.1
_RETRY = 2.0
#: Seconds between two looks for entries that are too old.
_PRUNE = 3600.0
_LONGEST_SUBJECT = 64
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One request. ``at`` in microseconds since 1970; ``team`` and key are empty for the gateway's own token."""

    at: int
    team: str
    key_id: str
    key_name: str
    action: str
    subject: str
    outcome: str
    request_id: str


@dataclass(frozen=True, kw_only=True)
class AuditQuery:
    """What to read; an empty field does not filter. Times in microseconds, ``until`` exclusive."""

    team: str = ""
    #: Id or name.
    key: str = ""
    subject: str = ""
    #: Whole, or the part before its dot.
    action: str = ""
    outcome: str = ""
    request_id: str = ""
    since: int | None = None
    until: int | None = None
    #: Only entries with a smaller number.
    before: int = 0
    limit: int = 100


class Audit:
    """Notes entries and reads them back."""

    def __init__(self, store: Store, *, days: int) -> None:
        self._store = store
        self._kept = days * 24 * 3600 * clock.MICROSECONDS
        self._waiting: list[AuditEntry] = []
        #: Held over a write: who reads waits for the one that is under way.
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """While the block runs, entries reach the store and leave it by age; at its end, all that were noted are written."""
        try:
            async with running(self._write, self._forget):
                yield
        finally:
            if not await self._flush():
                self._to_log()

    def note(self, method: str, caller: Caller, *, request: Any, answer: Any, outcome: str, request_id: str) -> None:
        """Note a call of one of :data:`ACTIONS`; does not wait."""
        action, made = ACTIONS[method]
        subject = getattr(getattr(answer, made, None), "id", "") if made else getattr(request, "id", "")
        if len(self._waiting) >= _WAITING:
            self._to_log()
        self._waiting.append(
            AuditEntry(
                at=clock.now(),
                team=caller.owner or "",
                key_id=caller.key.id if caller.key is not None else "",
                key_name=caller.key.name if caller.key is not None else "",
                action=action,
                subject=_plain(subject),
                outcome=outcome,
                request_id=_plain(request_id, longest=128),
            )
        )

    async def read(self, query: AuditQuery) -> list[tuple[int, AuditEntry]]:
        """Newest first, with their numbers; what was noted a moment ago included."""
        await self._flush()
        return [(row.pop("id"), AuditEntry(**row)) for row in await self._store.audit(**asdict(query))]

    async def _write(self, pause: Pause) -> None:
        while await pause(_GATHER):
            if not await self._flush() and not await pause(_RETRY):
                return

    async def _flush(self) -> bool:
        """False: the store could not be written; the entries still wait."""
        async with self._writing:
            return await self._write_waiting()

    async def _write_waiting(self) -> bool:
        entries, self._waiting = self._waiting, []
        if not entries:
            return True
        written = False
        try:
            await self._store.add_audit([asdict(entry) for entry in entries])
            written = True
        except Exception:
            _log.exception("the audit could not be written", entries=len(entries))
        finally:
            # Also where this was cancelled: one entry twice is better than one that is missing.
            if not written:
                self._waiting = entries + self._waiting
        return written

    async def _forget(self, pause: Pause) -> None:
        await self._forget_old()
        while await pause(_PRUNE):
            await self._forget_old()

    async def _forget_old(self) -> None:
        try:
            await self._store.forget_audit(before=clock.now() - self._kept)
        except Exception:
            _log.exception("old entries of the audit could not be removed")

    def _to_log(self) -> None:
        entries, self._waiting = self._waiting, []
        for entry in entries:
            _log.warning("an entry of the audit that could not be stored", **asdict(entry))


def _plain(text: object, *, longest: int = _LONGEST_SUBJECT) -> str:
    """What a caller sent, as every database takes it and every terminal may show it."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:longest])
