"""Which images clients may name in place of a template, for backends that make sandboxes of images.

A backend offers it as a setting: all, none, or patterns for the reference as the client writes it, tag or digest included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["allows_image"]


def allows_image(allowed: bool | Iterable[str], reference: str) -> bool:
    """``allowed``: whether any, or patterns, in which ``*`` is anything but a slash and ``**`` anything."""
    if isinstance(allowed, bool):
        return allowed
    return any(_pattern(pattern).fullmatch(reference) for pattern in allowed)


def _pattern(text: str) -> re.Pattern[str]:
    """With ``*`` over a slash, ``python:*`` would also be all that a host ``python`` has at any of its ports."""
    kinds = {"**": ".*", "*": "[^/]*"}
    return re.compile("".join(kinds.get(part) or re.escape(part) for part in re.split(r"(\*\*?)", text)))
