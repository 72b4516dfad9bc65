"""Who is calling: from the metadata of a gRPC call to an owner, or a refusal.

Besides the callers of a deployment there are its other cores, which pass calls on to the core whose sandbox it is
(:mod:`sandgate_core.peers`). They have proved the caller and say who it is. A relay token stands for one sandbox.

The interceptor (:mod:`sandgate_core.server`) identifies the caller before a service sees the call; services ask
:func:`current`. Every credential that is present must be right, and a missing one, a wrong one and a revoked one are
answered alike (S12).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from sandgate_core.keys import KeyRecord, Keys
from sandgate_core.tokens import Tokens
from sandgate_errors import PermissionDenied, Unauthenticated

__all__ = [
    "API_KEY",
    "CREDENTIALS",
    "DEFAULT_OWNER",
    "INTERNAL_TOKEN",
    "PEER_INTERNAL",
    "PEER_TEAM",
    "PEER_TOKEN",
    "RELAY_TOKEN",
    "SANDBOX_ID",
    "Caller",
    "Callers",
    "current",
    "enter",
]

API_KEY = "api-key"
INTERNAL_TOKEN = "internal-token"  # noqa: S105 - the name of a metadata key
#: A call that another core passes on, for a caller who sees the sandboxes of this team; without a team, all.
PEER_TOKEN = "peer-token"  # noqa: S105 - the name of a metadata key
PEER_TEAM = "peer-team-bin"
#: Beside it: the caller is the gateway itself.
PEER_INTERNAL = "peer-internal"
#: A call to the agent of the one sandbox that it was made for.
RELAY_TOKEN = "relay-token"  # noqa: S105 - the name of a metadata key
#: Whose agent a call is for.
SANDBOX_ID = "sandbox-id"
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
    #: Another core passes the call on: it belongs here or nowhere.
    forwarded: bool = False

    def sees(self, owner: str) -> bool:
        return self.owner is None or self.owner == owner

    def must_be_internal(self) -> None:
        if not self.internal:
            raise PermissionDenied("only the gateway itself may do this")

    def must_be_core(self) -> None:
        if not self.forwarded:
            raise PermissionDenied("only another core may do this")


_current: ContextVar[Caller] = ContextVar("caller")


def current() -> Caller:
    """The caller of the gRPC call that is being served."""
    return _current.get()


def enter(caller: Caller) -> None:
    """Make ``caller`` the current one. A gRPC call is a task of its own, so this ends with the call."""
    _current.set(caller)


class Callers:
    """Tells callers by their metadata."""

    def __init__(self, keys: Keys, *, internal_token: str, tokens: Tokens) -> None:
        self._keys = keys
        self._tokens = tokens
        self._internal_token = internal_token.encode()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]], *, relayed: bool = False) -> Caller:
        """The caller; ``relayed``: of a call to an agent. Raises Unauthenticated, with one text for all reasons."""
        proofs: dict[str, str | bytes] = {}
        sandboxes: list[str] = []
        for name, value in metadata:
            if name == SANDBOX_ID:
                sandboxes.append(str(value))
            elif name in CREDENTIALS:
                # A repeated credential is ambiguous: which of the two was meant to be checked?
                if name in proofs:
                    raise _refusal()
                proofs[name] = value
        if proofs.keys() & _OF_CORES:
            return self._core(proofs)
        if RELAY_TOKEN in proofs:
            return self._relayed(proofs, sandboxes if relayed else [])
        return self._caller(proofs)

    def _caller(self, proofs: Mapping[str, str | bytes]) -> Caller:
        token, secret = proofs.get(INTERNAL_TOKEN), proofs.get(API_KEY)
        if token is None and secret is None:
            raise _refusal()
        if token is not None and not hmac.compare_digest(str(token).encode(), self._internal_token):
            raise _refusal()
        key = None if secret is None else self._key_of(str(secret))
        return Caller(owner=None if key is None else key.owner, internal=token is not None, key=key)

    def _core(self, proofs: Mapping[str, str | bytes]) -> Caller:
        if proofs.keys() - _OF_CORES:
            raise _refusal()
        _check(proofs.get(PEER_TOKEN), self._tokens.between_cores)
        team = proofs.get(PEER_TEAM)
        owner = team.decode(errors="replace") if isinstance(team, bytes) else None
        return Caller(owner=owner, internal=PEER_INTERNAL in proofs, forwarded=True)

    def _relayed(self, proofs: Mapping[str, str | bytes], sandboxes: list[str]) -> Caller:
        if len(proofs) > 1 or len(sandboxes) != 1:
            raise _refusal()
        _check(proofs[RELAY_TOKEN], self._tokens.relay_token_of(sandboxes[0]))
        return Caller(owner=None, forwarded=True)

    def _key_of(self, secret: str) -> KeyRecord:
        key = self._keys.use(secret)
        if key is None:
            raise _refusal()
        return key


_OF_CORES = frozenset({PEER_TOKEN, PEER_TEAM, PEER_INTERNAL})
#: All that proves a caller, or goes with a proof; what none but the core may see.
CREDENTIALS = frozenset({API_KEY, INTERNAL_TOKEN, RELAY_TOKEN, *_OF_CORES})


def _check(given: str | bytes | None, expected: str) -> None:
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), expected.encode()):
        raise _refusal()


def _refusal() -> Unauthenticated:
    return Unauthenticated("the API key is missing or not valid")
