"""Whose access token a request brings that names no sandbox (behaviour.md S1, S8).

The Python SDK from 2.7 to 2.25 names the sandbox of a handle from ``connect`` by host only; where it was given one address for all sandboxes,
the token is all that tells them apart. It tells as much as a name does, since it opens one sandbox and no other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from sandgate_edge.core_client import CoreClient
from sandgate_errors import Unauthenticated

__all__ = ["Bearers"]

#: Answers that are kept, the latest used ones: the core tries the tokens of all its sandboxes for each.
_REMEMBERED = 4096


class Bearers:
    """One per edge. What it remembers says nothing about access: the token is compared with the sandbox's own each time."""

    def __init__(self) -> None:
        self._sandboxes: OrderedDict[bytes, str] = OrderedDict()

    async def sandbox_of(self, token: str, core: CoreClient, *, request_id: str) -> str:
        """The id of a sandbox, which may have ended meanwhile. Raises Unauthenticated when the token is nobody's."""
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found = self._sandboxes.get(digest)
        if found is None:
            found = await self._asked(digest, core, request_id=request_id)
            self._sandboxes[digest] = found
            if len(self._sandboxes) > _REMEMBERED:
                self._sandboxes.popitem(last=False)
        self._sandboxes.move_to_end(digest)
        return found

    async def _asked(self, digest: bytes, core: CoreClient, *, request_id: str) -> str:
        try:
            return await core.find_by_token_hash(before=b"", after=b"", sha256=digest, request_id=request_id)
        except Unauthenticated:
            raise Unauthenticated("no sandbox is named, and the token in header X-Access-Token is none's") from None
