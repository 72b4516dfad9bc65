"""Headers of the form ``value; name=value; …``: reading them from clients, writing the one of a download.

Clients write file names in three ways: raw UTF-8 in quotes with quote and line ends as ``%22``, ``%0D``, ``%0A`` (the way of
browsers, and of every SDK; those of Python write other control characters so too), with backslashes before quotes (RFC 9110), and as ``filename*`` (RFC 5987). All three
are read; slashes and leading slashes stay, because the name is a whole path.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_to_bytes

from sandgate_errors import InvalidArgument

__all__ = ["inline_disposition", "parse_parameters", "unescape_form_name"]

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NAME = re.compile(r"\s*;\s*(?:([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*)?")
# Only before these is a backslash an escape: some clients write paths with single backslashes as they are.
_QUOTED = re.compile(r'"((?:\\["\\]|[^"])*)"')
_ESCAPED = re.compile(r'\\(["\\])')
# A name of a file hardly holds these three characters as they are, and never a control character that a client let through.
_FORM_ESCAPE = re.compile(r"%(22|0[0-9A-F]|1[0-9A-F])")


def parse_parameters(header: str) -> tuple[str, dict[str, str]]:
    """The value in lower case, and the parameters with their names in lower case.

    ``name*`` of RFC 5987 is decoded and stands under ``name*``. Raises InvalidArgument for a header that cannot be read
    in one way only.
    """
    value, _, _ = header.partition(";")
    position = len(value)
    parameters: dict[str, str] = {}
    while position < len(header):
        match = _NAME.match(header, position)
        if match is None:
            raise InvalidArgument("a header with parameters cannot be read")
        position = match.end()
        if match[1] is None:
            # `;` with nothing behind it.
            continue
        name = match[1].lower()
        text, position = _value(header, position)
        if name in parameters:
            raise InvalidArgument(f"a header has the parameter '{name}' twice")
        parameters[name] = _extended(text) if name.endswith("*") else text
    return value.strip().lower(), parameters


def _value(header: str, position: int) -> tuple[str, int]:
    if (quoted := _QUOTED.match(header, position)) is not None:
        return _ESCAPED.sub(r"\1", quoted[1]), quoted.end()
    if header.startswith('"', position):
        raise InvalidArgument("a header has a quote without its end")
    text, _, _ = header[position:].partition(";")
    return text.strip(), position + len(text)


def _extended(text: str) -> str:
    charset, first, rest = text.partition("'")
    _, second, encoded = rest.partition("'")
    if not first or not second or charset.lower() not in {"utf-8", "iso-8859-1"}:
        raise InvalidArgument("a header has an extended parameter that cannot be read")
    try:
        return unquote_to_bytes(encoded).decode(charset.lower())
    except UnicodeDecodeError:
        raise InvalidArgument("a header has an extended parameter that cannot be read") from None


def unescape_form_name(name: str) -> str:
    """A name of a form part with the escapes undone that forms have; any other ``%`` is meant."""
    return _FORM_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name)


def inline_disposition(name: str) -> str:
    """``Content-Disposition`` of a download: bare, quoted or encoded, as the name needs it (``behaviour.md`` D6)."""
    if _TOKEN.fullmatch(name):
        return f"inline; filename={name}"
    if name.isascii() and name.isprintable():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    return f"inline; filename*=utf-8''{quote(name, safe='')}"
