"""API keys: who may use the gateway, and whose sandboxes a key sees.

A key is shown once, when it is made; the store holds its SHA-256. A key has 160 random bits, so a plain hash cannot be
searched, and looking a key up by its hash leaks nothing by timing. Valid keys are held in memory
(:mod:`sandgate_core.mirrored`), so checking one touches no disk, and a revoked one is refused by every core from the next
call on. When a key was last used is noted in memory, once a minute at most, and written from there.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog

from sandgate_core import clock
from sandgate_core.chores import Pause, running
from sandgate_core.mirrored import Mirrored
from sandgate_core.store import Store
from sandgate_core.teams import Teams
from sandgate_errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

__all__ = ["KeyRecord", "Keys"]

#: The form that the SDKs check before they send anything.
_FORM = re.compile(r"e2b_[0-9a-f]{40}")
_PREFIX_LENGTH = len("e2b_") + 6
_NAME_LENGTH = 100
_ID_LETTERS = string.ascii_lowercase + string.digits
_FIRST = "first"
#: Microseconds between two notes that a key was used.
_USE_STEP = 60 * clock.MICROSECONDS
#: Seconds between two writes of such notes.
_USE_PAUSE = 5.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """One key without its secret."""

    id: str
    #: SHA-256 of the key, hexadecimal.
    digest: str
    #: The first characters, to recognise a key by.
    prefix: str
    name: str
    owner: str
    created_at: int
    revoked_at: int | None = None
    #: To the minute.
    last_used_at: int | None = None


class Keys(Mirrored):
    """The valid keys."""

    def __init__(self, store: Store, teams: Teams, *, changed: Callable[[], Awaitable[None]] | None = None) -> None:
        """``changed`` tells the other cores; None where there are none."""
        super().__init__(store, changed=changed)
        self._teams = teams
        self._by_digest: dict[str, KeyRecord] = {}
        #: When keys were last used, by id; not in the store yet.
        self._used: dict[str, int] = {}

    async def _read(self) -> None:
        stored = [key for key in map(_record_of, await self._store.keys()) if not key.revoked_at]
        # What was noted here and is not in the store yet stays.
        known = {key.id: key.last_used_at for key in self._by_digest.values()}
        self._by_digest = {
            key.digest: replace(key, last_used_at=max(key.last_used_at or 0, known.get(key.id) or 0) or None)
            for key in stored
        }

    @asynccontextmanager
    async def noting_use(self) -> AsyncIterator[None]:
        """While the block runs, the store hears of the keys that are used; at its end, of all that were."""
        try:
            async with running(self._keep_writing):
                yield
        finally:
            await self._write_use()

    def use(self, secret: str) -> KeyRecord | None:
        """The key behind a secret, noted as used now; None for one that does not hold."""
        key = self._by_digest.get(_digest(secret))
        if key is None:
            return None
        now = clock.now()
        # The clock may have been set back: a time to come is as good as none.
        if key.last_used_at is None or not 0 <= now - key.last_used_at < _USE_STEP:
            key = self._by_digest[key.digest] = replace(key, last_used_at=now)
            self._used[key.id] = now
        return key

    def list(self, *, owner: str = "") -> list[KeyRecord]:
        """Valid keys, oldest first; with ``owner`` that team's only."""
        found = (key for key in self._by_digest.values() if owner in {"", key.owner})
        return sorted(found, key=lambda key: (key.created_at, key.id))

    async def create(self, *, name: str, owner: str, create_team: bool) -> tuple[KeyRecord, str]:
        """A new key and its secret, which is not kept. Raises InvalidArgument, and NotFound for an unknown team."""
        _check_name(name)
        # Before the lock: to make one tells the other cores, which may be telling this one of keys.
        await self._teams.ensure(owner, create=create_team)
        secret = f"e2b_{secrets.token_hex(20)}"
        async with self._changing():
            return await self._add(secret, name=name, owner=owner), secret

    async def rename(self, key_id: str, *, name: str, owner: str = "") -> KeyRecord:
        """Raises NotFound as :meth:`revoke` does, InvalidArgument."""
        _check_name(name)
        async with self._changing():
            key = self._find(key_id, owner)
            await self._store.rename_key(key.id, name)
            # Looked up again: it may have been used meanwhile.
            current = self._find(key_id, owner)
            renamed = self._by_digest[current.digest] = replace(current, name=name)
            return renamed

    async def revoke(self, key_id: str, *, owner: str = "") -> None:
        """Ends a key. Raises NotFound for an unknown or revoked one, and with ``owner`` for another team's."""
        async with self._changing():
            key = self._find(key_id, owner)
            # Out of memory first: should the store fail, the key is refused until a restart rather than accepted.
            self._by_digest.pop(key.digest, None)
            await self._store.revoke_key(key.id, at=clock.now())

    async def ensure_first(self, secret: str | None, *, given: bool, owner: str) -> bool:
        """Make sure that there is a key to begin with; whether one was added.

        A ``given`` key must hold afterwards. A candidate is added only where no key was ever made. Raises
        FailedPrecondition for a given key that was revoked, because adding it again would undo the revocation.
        """
        if secret is None:
            return False
        if not _FORM.fullmatch(secret):
            raise FailedPrecondition("the first API key must be 'e2b_' and 40 lower-case hexadecimal digits")
        stored = {key.digest: key for key in map(_record_of, await self._store.keys())}
        known = stored.get(_digest(secret))
        if known is not None and known.revoked_at is not None:
            if given:
                raise FailedPrecondition(
                    f"the API key that was given ({known.prefix}…) has been revoked: give another one, or none"
                )
            return False
        if known is not None or (stored and not given):
            return False
        await self._teams.ensure(owner, create=True)
        try:
            await self._add(secret, name=_FIRST, owner=owner)
        except AlreadyExists:
            return False  # another core that starts was faster
        return True

    def _find(self, key_id: str, owner: str) -> KeyRecord:
        key = next((key for key in self.list(owner=owner) if key.id == key_id), None)
        if key is None:
            raise NotFound(f"there is no valid key '{key_id[:64]}'")
        return key

    async def _keep_writing(self, pause: Pause) -> None:
        while await pause(_USE_PAUSE):
            await self._write_use()

    async def _write_use(self) -> None:
        used, self._used = self._used, {}
        if not used:
            return
        try:
            await self._store.note_use(used)
        except Exception:
            # Not worth a failure of anything else; the next use is noted again within a minute.
            _log.exception("the last use of keys could not be stored")

    async def _add(self, secret: str, *, name: str, owner: str) -> KeyRecord:
        key = KeyRecord(
            id="k" + "".join(secrets.choice(_ID_LETTERS) for _ in range(7)),
            digest=_digest(secret),
            prefix=secret[:_PREFIX_LENGTH],
            name=name,
            owner=owner,
            created_at=clock.now(),
        )
        await self._store.add_key(asdict(key))
        self._by_digest[key.digest] = key
        return key


def _check_name(name: str) -> None:
    if len(name) > _NAME_LENGTH or not name.isprintable():
        raise InvalidArgument(f"a key's name is at most {_NAME_LENGTH} printable characters")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _record_of(row: dict[str, Any]) -> KeyRecord:
    return KeyRecord(**row)
