"""Which sandbox a token belongs to, when only a hash over it is known: signed URLs that name no sandbox (``behaviour.md`` S8).

Tokens are derived, so nothing needs to be stored or kept in step for this: the token of every candidate is made again and
tried. Anybody may ask by sending a made-up URL, hence two bounds: one search at a time, in slices between which the core
serves its other calls, so that any number of them delays nobody by more than one slice.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from typing import Protocol

from sandgate_core.tokens import Tokens
from sandgate_errors import Unauthenticated

__all__ = ["Candidate", "TokenSearch"]

#: About half a millisecond of work.
_SLICE = 128


class Candidate(Protocol):
    """What a token is made from."""

    @property
    def id(self) -> str: ...
    @property
    def token_version(self) -> int: ...


class TokenSearch:
    """One per core."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._turn = asyncio.Lock()

    async def find(self, candidates: Sequence[Candidate], *, before: bytes, after: bytes, sha256: bytes) -> str:
        """The id of the sandbox with ``SHA-256(before + token + after) == sha256``. Raises Unauthenticated."""
        start = hashlib.sha256(before)
        async with self._turn:
            for at in range(0, len(candidates), _SLICE):
                for record in candidates[at : at + _SLICE]:
                    hashed = start.copy()
                    token = self._tokens.token_of(record.id, version=record.token_version)
                    hashed.update(token.encode() + after)
                    if hmac.compare_digest(hashed.digest(), sha256):
                        return record.id
                await asyncio.sleep(0)
        raise Unauthenticated("invalid signature")
