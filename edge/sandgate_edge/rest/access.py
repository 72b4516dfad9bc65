"""Who may use ``/files``: the access token in the header, or a signature in the URL (``behaviour.md`` S2 to S7).

A signed URL is made by the SDK without asking anybody, works without headers, and names one operation on one path. A token
in the header decides alone, so a wrong one is not saved by a good signature. Where the SDK was given one address for all
sandboxes, such a URL does not even name its sandbox (S8): the core is asked whose token the signature was made with.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from typing import Literal, TypeAlias

from aiohttp import web

from sandgate_edge.core_client import Located
from sandgate_edge.keys import CORE, REQUEST_ID
from sandgate_edge.routing import check_access_token
from sandgate_errors import Unauthenticated

__all__ = ["Operation", "check_file_access", "check_signature", "sandbox_of_signature", "signature_of"]

Operation: TypeAlias = Literal["read", "write"]

_PREFIX = "v1_"
_DIGEST_BYTES = 32
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


async def sandbox_of_signature(request: web.Request, *, query: Mapping[str, str], operation: Operation) -> str | None:
    """The sandbox that a signed URL is for; None when the request carries no signature, or has a token to decide by.

    Raises Unauthenticated when no sandbox has signed it. Whether it has expired is checked with all else, later.
    """
    if "signature" not in query or "X-Access-Token" in request.headers:
        return None
    covered = _covered(query, operation)
    digest = _digest(query["signature"])
    if covered is None or digest is None:
        raise Unauthenticated("invalid signature")
    before, after = covered
    return await request.app[CORE].find_by_token_hash(
        before=before, after=after, sha256=digest, request_id=request[REQUEST_ID]
    )


def check_signature(query: Mapping[str, str], *, token: str, operation: Operation, now: float) -> None:
    """The signature first, then the expiry, with the messages that clients know (``behaviour.md`` S6)."""
    given = query.get("signature")
    if given is None:
        raise Unauthenticated("missing signature query parameter")
    covered = _covered(query, operation)
    if covered is None:
        raise Unauthenticated("invalid signature")
    before, after = covered
    if not hmac.compare_digest(given.encode(), _signature(before + token.encode() + after).encode()):
        raise Unauthenticated("invalid signature")
    expiration = query.get("signature_expiration")
    if expiration is not None and int(expiration) < now:
        raise Unauthenticated("signature is already expired")


def signature_of(*, path: str, operation: Operation, user: str, token: str, expiration: int | None) -> str:
    """``v1_`` and the hash over the parameters as they stand in the query, before any resolving (S5)."""
    before, after = _around_token(path=path, operation=operation, user=user, expiration=expiration)
    return _signature(before + token.encode() + after)


def _covered(query: Mapping[str, str], operation: Operation) -> tuple[bytes, bytes] | None:
    """What a signature covers before and behind the token; None when it cannot be what anybody has signed."""
    expiration = query.get("signature_expiration")
    if expiration is not None and not _SECONDS.fullmatch(expiration):
        return None
    return _around_token(
        path=query.get("path", ""),
        operation=operation,
        user=query.get("username", ""),
        expiration=None if expiration is None else int(expiration),
    )


def _around_token(*, path: str, operation: Operation, user: str, expiration: int | None) -> tuple[bytes, bytes]:
    after = "" if expiration is None else f":{expiration}"
    return f"{path}:{operation}:{user}:".encode(), after.encode()


def _signature(signed: bytes) -> str:
    return _written(hashlib.sha256(signed).digest())


def _digest(signature: str) -> bytes | None:
    """The hash in a signature; None for what is none, or is written in another way than a signature is."""
    try:
        digest = base64.b64decode(signature.removeprefix(_PREFIX).encode("ascii") + b"=", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return digest if len(digest) == _DIGEST_BYTES and signature == _written(digest) else None


def _written(digest: bytes) -> str:
    return _PREFIX + base64.b64encode(digest).decode().rstrip("=")
