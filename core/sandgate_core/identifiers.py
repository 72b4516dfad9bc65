"""Sandbox ids: how they are made and how a caller may write them (C4, C16)."""

from __future__ import annotations

import re
import secrets
import string

from sandgate_errors import InvalidArgument

__all__ = ["new_sandbox_id", "parse_sandbox_id"]

_LETTERS = string.ascii_lowercase + string.digits
_LONGEST = 64
# What follows the first `-` is a client id of old clients; it is accepted and means nothing.
_WRITTEN = re.compile(r"([a-z0-9]+)(?:-[A-Za-z0-9-]*)?")


def new_sandbox_id() -> str:
    """`i` and 20 characters: over 100 random bits, so an id is never used twice."""
    return "i" + "".join(secrets.choice(_LETTERS) for _ in range(20))


def parse_sandbox_id(written: str) -> str:
    """The id in ``id`` or ``id-clientID``. Raises InvalidArgument for anything else."""
    found = _WRITTEN.fullmatch(written) if len(written) <= _LONGEST else None
    if found is None:
        raise InvalidArgument("Invalid sandbox ID")
    return found[1]
