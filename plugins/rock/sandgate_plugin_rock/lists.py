"""The list of sandboxes: a filter is needed, all that match come in one piece, and only those that run (K16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote

from sandgate_errors import InvalidArgument
from sandgate_plugin_api import ListQuery

__all__ = ["accepted_query", "whole_list"]

_NOT_READ = frozenset({"state", "limit", "nextToken"})


def accepted_query(query: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The query with its filter as E2B's clients write it, and without what is not read. Raises InvalidArgument."""
    given = query.get("metadata", [])
    if len(given) != 1 or not given[0]:
        raise InvalidArgument("metadata must name at least one pair")
    pairs = _pairs(given[0])
    written = quote("&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in pairs.items()), safe="")
    kept = {name: values for name, values in query.items() if name not in _NOT_READ}
    return {**kept, "metadata": [written], "state": ["running"]}


def whole_list(query: ListQuery) -> ListQuery | None:
    """All in one piece; the operator's own tools, which see everybody's, are left alone."""
    if query.owner is None:
        return None
    return replace(query, page_size=None, states=frozenset({"running"}))


def _pairs(value: str) -> dict[str, str]:
    """The pairs of ``k=v&k2=v2``, with two layers of percent-escapes as E2B's clients write them, or of ``k:v,k2:v2``."""
    text = _unescaped(value.replace("+", " "))
    if "=" in text:
        parts = [part.split("=") for part in text.split("&")]
        escaped = True
    else:
        # A value may hold a colon, as addresses and images do; a key cannot.
        parts = [part.split(":", 1) for part in text.split(",")]
        escaped = False
    pairs: dict[str, str] = {}
    for part in parts:
        if len(part) != 2:
            raise InvalidArgument("metadata must be pairs: key=value joined by '&', or key:value joined by ','")
        key, item = (_unescaped(word) for word in part) if escaped else (word.strip() for word in part)
        if not key or not item:
            raise InvalidArgument("metadata holds a pair without a key or without a value")
        if key in pairs:
            raise InvalidArgument("metadata names a key twice")
        pairs[key] = item
    return pairs


def _unescaped(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument("metadata is not valid UTF-8") from None
