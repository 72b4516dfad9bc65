"""Who may use ``/files``: the access token in the header, or a signature in the URL (``behaviour.md`` S2 to S7).

A signed URL is made by the SDK without asking anybody, works without headers, and names one operation on one path. A token
in the header decides alone, so a wrong one is not saved by a good signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from typing import Literal, TypeAlias

from aiohttp import web

from sandgate_edge.core_client import Located
from sandgate_edge.routing import check_access_token
from sandgate_errors import Unauthenticated

__all__ = ["Operation", "check_file_access", "check_signature", "signature_of"]

Operation: TypeAlias = Literal["read", "write"]

_SECONDS = re.compile(r"-?[0-9]{1,18}")


def check_file_access(
    request: web.Request, located: Located, *, query: Mapping[str, str], operation: Operation
) -> None:
    """Raise Unauthenticated unless the request may do ``operation``; everybody may when the sandbox is not secured."""
    token = located.sandbox.access_token
    if not token:
        return
    if "X-Access-Token" in request.headers:
        check_access_token(request, located)
    else:
        check_signature(query, token=token, operation=operation, now=time.time())


def check_signature(query: Mapping[str, str], *, token: str, operation: Operation, now: float) -> None:
    """The signature first, then the expiry, with the messages that clients know (``behaviour.md`` S6)."""
    given = query.get("signature")
    if given is None:
        raise Unauthenticated("missing signature query parameter")
    expiration = query.get("signature_expiration")
    if expiration is not None and not _SECONDS.fullmatch(expiration):
        raise Unauthenticated("invalid signature")
    seconds = None if expiration is None else int(expiration)
    expected = signature_of(
        path=query.get("path", ""),
        operation=operation,
        user=query.get("username", ""),
        token=token,
        expiration=seconds,
    )
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise Unauthenticated("invalid signature")
    if seconds is not None and seconds < now:
        raise Unauthenticated("signature is already expired")


def signature_of(*, path: str, operation: Operation, user: str, token: str, expiration: int | None) -> str:
    """``v1_`` and the hash over the parameters as they stand in the query, before any resolving (S5)."""
    parts = [path, operation, user, token]
    if expiration is not None:
        parts.append(str(expiration))
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")
