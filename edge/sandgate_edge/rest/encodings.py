"""``Accept-Encoding``: whether a file goes out as gzip or as it is (RFC 9110 section 12.5.3, ``behaviour.md`` D8, D9)."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

__all__ = ["Encoding", "NoAcceptableEncoding", "choose_encoding"]

Encoding: TypeAlias = Literal["gzip", "identity"]

_QUALITY = re.compile(r"(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


class NoAcceptableEncoding(Exception):
    """The client forbids both: 406."""


def choose_encoding(header: str | None) -> Encoding:
    """``gzip`` when the client allows it and does not like the plain form better. Raises NoAcceptableEncoding."""
    if header is None:
        return "identity"
    qualities = _qualities(header)
    others = qualities.get("*")
    gzip = qualities.get("gzip", qualities.get("x-gzip", others or 0.0))
    identity = qualities.get("identity")
    if gzip > 0 and gzip >= (identity or 0.0):
        return "gzip"
    # The plain form is allowed unless it is forbidden by name, or by `*` without being named.
    if identity != 0 and not (identity is None and others == 0):
        return "identity"
    if gzip > 0:
        return "gzip"
    raise NoAcceptableEncoding


def _qualities(header: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in header.split(","):
        coding, *parameters = (part.strip().lower() for part in item.split(";"))
        if coding:
            found[coding] = _quality(parameters)
    return found


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            # An unreadable weight is no permission.
            return float(value) if _QUALITY.fullmatch(value.strip()) else 0.0
    return 1.0
