"""Who is calling: from the metadata of a gRPC call to an owner, or a refusal.

The interceptor (:mod:`sandgate_core.server`) identifies the caller before a service sees the call; services ask
:func:`current`. Every credential that is present must be right, and a missing one, a wrong one and a revoked one are
answered alike (S12).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from sandgate_core.keys import KeyRecord, Keys
from sandgate_errors import PermissionDenied, Unauthenticated

__all__ = ["API_KEY", "DEFAULT_OWNER", "INTERNAL_TOKEN", "Caller", "Callers", "current", "enter"]

API_KEY = "api-key"
INTERNAL_TOKEN = "internal-token"  # noqa: S105 - the name of a metadata key
#: Whose sandboxes are made where no owner is named.
DEFAULT_OWNER = "default"


@dataclass(frozen=True)
class Caller:
    """One caller. An API key narrows even an internal caller to its owner's sandboxes."""

    #: None: sees all.
    owner: str | None
    internal: bool = False
    #: The key that proved it.
    key: KeyRecord | None = None

    def sees(self, owner: str) -> bool:
        return self.owner is None or self.owner == owner

    def must_be_internal(self) -> None:
        if not self.internal:
            raise PermissionDenied("only the gateway itself may do this")


_current: ContextVar[Caller] = ContextVar("caller")


def current() -> Caller:
    """The caller of the gRPC call that is being served."""
    return _current.get()


def enter(caller: Caller) -> None:
    """Make ``caller`` the current one. A gRPC call is a task of its own, so this ends with the call."""
    _current.set(caller)


class Callers:
    """Tells callers by their metadata."""

    def __init__(self, keys: Keys, *, internal_token: str) -> None:
        self._keys = keys
        self._internal_token = internal_token.encode()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """The caller. Raises Unauthenticated, with one text for all reasons."""
        tokens: list[str] = []
        keys: list[str] = []
        for name, value in metadata:
            if name == INTERNAL_TOKEN:
                tokens.append(str(value))
            elif name == API_KEY:
                keys.append(str(value))
        # A repeated credential is ambiguous: which of the two was meant to be checked?
        if len(tokens) > 1 or len(keys) > 1 or not (tokens or keys):
            raise _refusal()
        if tokens and not hmac.compare_digest(tokens[0].encode(), self._internal_token):
            raise _refusal()
        key = self._key_of(keys[0]) if keys else None
        return Caller(owner=None if key is None else key.owner, internal=bool(tokens), key=key)

    def _key_of(self, secret: str) -> KeyRecord:
        key = self._keys.use(secret)
        if key is None:
            raise _refusal()
        return key


def _refusal() -> Unauthenticated:
    return Unauthenticated("the API key is missing or not valid")
