"""The acting user of an RPC: the name in its Basic credentials (behaviour U1, U3)."""

from __future__ import annotations

import base64
import binascii

from aiohttp import web

from sandgate_errors import Unauthenticated

__all__ = ["acting_user"]

# Longer than any account name; and gRPC metadata has little room.
_MAX_NAME_BYTES = 256


def acting_user(request: web.Request) -> str | None:
    """The name, or None for the sandbox's default user: no header, another scheme, or credentials that are none.

    The password is not looked at. Whether the user exists is for the agent to say, except for names that no account can
    have. Raises Unauthenticated for those.
    """
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        pair = base64.b64decode(credentials.strip().encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    name, colon, _ = pair.partition(b":")
    if not colon or not name:
        return None
    return _account_name(name)


def _account_name(name: bytes) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise Unauthenticated(f"invalid username: '{name[:64].decode('ascii', 'backslashreplace')}'") from None
    if len(name) > _MAX_NAME_BYTES or "\0" in text:
        raise Unauthenticated(f"invalid username: {text[:64]!a}")
    return text
