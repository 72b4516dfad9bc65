"""The query string of a request, decoded strictly.

The framework's own decoding replaces what is not UTF-8; a path or a signature must not change on its way, so text that
cannot be decoded is the caller's error here. The form is ``application/x-www-form-urlencoded``: ``+`` is a space.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from aiohttp import web

from sandgate_errors import InvalidArgument

__all__ = ["parse", "query_of"]

# No route has ten parameters; a longer list only costs time.
_MAX_FIELDS = 100


def query_of(request: web.Request) -> dict[str, str]:
    """The parameters of a request; of a repeated one the first counts. Raises InvalidArgument."""
    return {name: values[0] for name, values in parse(request.rel_url.raw_query_string).items()}


def parse(raw: str) -> Mapping[str, list[str]]:
    """Names and all their values, in order. Raises InvalidArgument for what is not UTF-8 and for too many parameters."""
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
        for pair in pairs:
            # Bytes that the client sent unescaped arrive as surrogates when they are not UTF-8.
            "".join(pair).encode()
    except UnicodeError:
        raise InvalidArgument("the query string is not valid UTF-8") from None
    except ValueError:
        raise InvalidArgument(f"the query string has more than {_MAX_FIELDS} parameters") from None
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found
