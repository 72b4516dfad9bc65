"""What an operator is told of a plugin's table that does not hold: one line, and every wrong key in it.

For plugins whose settings are a pydantic model. This package does without pydantic, so it takes the errors as
``ValidationError.errors()`` gives them. Who the table belongs to is not in the line: whoever opens the plugin, and
``sandgate doctor``, say so.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from sandgate_errors import FailedPrecondition

__all__ = ["nearest", "refused_settings"]


def refused_settings(errors: Iterable[Mapping[str, Any]], *, keys: Iterable[str]) -> FailedPrecondition:
    """The error to raise for settings with these faults, at least one; ``keys`` are those that there are, on any level."""
    known = sorted(set(keys))
    return FailedPrecondition("; ".join(_sentence(error, known) for error in errors))


def _sentence(error: Mapping[str, Any], keys: Iterable[str]) -> str:
    location = [str(part) for part in error["loc"]]
    place = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"unknown key '{place}'{nearest(location[-1], keys)}"
    if error["type"] == "missing":
        return f"'{place}' is not set, and there is no default for it"
    text = error["msg"].removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    # A fault of the keys together has no place.
    return f"'{place}': {text}" if place else text


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what was probably meant, in parentheses, or nothing."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
