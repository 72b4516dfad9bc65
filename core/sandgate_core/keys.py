"""API keys: who may use the gateway, and whose sandboxes a key sees.

A key is shown once, when it is made; the store holds its SHA-256. A key has 160 random bits, so a plain hash cannot be
searched, and looking a key up by its hash leaks nothing by timing. Valid keys are held in memory (written through), so
checking one touches no disk and a revoked one is refused from the next call on.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from dataclasses import asdict, dataclass
from typing import Any

from sandgate_core import clock
from sandgate_core.store import Store
from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound

__all__ = ["KeyRecord", "Keys"]

#: The form that the SDKs check before they send anything.
_FORM = re.compile(r"e2b_[0-9a-f]{40}")
_PREFIX_LENGTH = len("e2b_") + 6
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_LENGTH = 100
_ID_LETTERS = string.ascii_lowercase + string.digits
_FIRST = "first"


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


class Keys:
    """The valid keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_digest: dict[str, KeyRecord] = {}

    async def load(self) -> None:
        self._by_digest = {key.digest: key for key in map(_record_of, await self._store.keys()) if not key.revoked_at}

    def owner_of(self, secret: str) -> str | None:
        """Whose key this is; None for one that does not hold."""
        key = self._by_digest.get(_digest(secret))
        return None if key is None else key.owner

    def list(self) -> list[KeyRecord]:
        """Valid keys, oldest first."""
        return sorted(self._by_digest.values(), key=lambda key: (key.created_at, key.id))

    async def create(self, *, name: str, owner: str) -> tuple[KeyRecord, str]:
        """A new key and its secret, which is not kept. Raises InvalidArgument."""
        if not _OWNER.fullmatch(owner):
            raise InvalidArgument(
                "an owner is 1 to 64 letters, digits, '.', '_', '@', '-', and starts with a letter or digit"
            )
        if len(name) > _NAME_LENGTH or not name.isprintable():
            raise InvalidArgument(f"a key's name is at most {_NAME_LENGTH} printable characters")
        secret = f"e2b_{secrets.token_hex(20)}"
        return await self._add(secret, name=name, owner=owner), secret

    async def revoke(self, key_id: str) -> None:
        """Ends a key. Raises NotFound for an unknown or revoked one."""
        key = next((key for key in self._by_digest.values() if key.id == key_id), None)
        if key is None:
            raise NotFound(f"there is no valid key '{key_id[:64]}'")
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
        await self._add(secret, name=_FIRST, owner=owner)
        return True

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


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _record_of(row: dict[str, Any]) -> KeyRecord:
    return KeyRecord(**row)
