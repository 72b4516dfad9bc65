"""What execd says of a file, as an entry of ours (``behaviour.md`` F6 to F15).

It follows no link and keeps no attributes: a link is told as one, without what it leads to, and metadata is never there.
"""

from __future__ import annotations

import calendar
import posixpath
import re
import stat
import time
from collections.abc import Mapping
from typing import Any

from sandgate_agent.entries import Entry, Kind, permissions
from sandgate_errors import Internal

__all__ = ["digits", "entry_of"]

_KINDS = {"file": Kind.FILE, "directory": Kind.DIRECTORY, "symlink": Kind.SYMLINK}
_FORMATS = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK, Kind.OTHER: stat.S_IFIFO}
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_MOST_BITS = 0o7777
#: Of what messages can carry, and Linux has.
_LARGEST_SIZE = 2**63 - 1
_LONGEST_PATH = 4096
_LONGEST_NAME = 256


def entry_of(about: object) -> Entry:
    """Raises Internal for what is no FileInfo."""
    try:
        if not isinstance(about, dict):
            raise TypeError
        path = "/" + _text(about["path"], _LONGEST_PATH).strip("/")
        kind = _KINDS.get(str(about["type"]), Kind.OTHER)
        bits = int(str(about["mode"]), 8) & _MOST_BITS
        size = int(about["size"])
        if not 0 <= size <= _LARGEST_SIZE:
            raise ValueError
        return Entry(
            name=posixpath.basename(path) or "/",
            kind=kind,
            path=path,
            size=size,
            mode=bits & 0o777,
            permissions=permissions(_FORMATS[kind] | bits),
            owner=_text(about.get("owner") or "", _LONGEST_NAME),
            group=_text(about.get("group") or "", _LONGEST_NAME),
            modified_ns=_nanoseconds(about),
            symlink_target=path if kind is Kind.SYMLINK else None,
            metadata=None,
            is_symlink=kind is Kind.SYMLINK,
        )
    except (LookupError, TypeError, ValueError, OverflowError):
        raise Internal("what execd says of a file cannot be read") from None


def digits(mode: int) -> int:
    """As execd writes a mode: the decimal digits are the octal ones."""
    return int(format(mode, "o"))


def _text(value: object, longest: int) -> str:
    """Raises ValueError for what no message can carry, or no system has."""
    text = str(value)
    if len(text.encode()) > longest:
        raise ValueError
    return text


def _nanoseconds(about: Mapping[str, Any]) -> int:
    found = _TIME.fullmatch(str(about.get("modified_at") or ""))
    if found is None:
        return 0
    moment, fraction, zone = found.groups()
    seconds = calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
    if zone != "Z":
        hours, minutes = int(zone[1:3]), int(zone[4:])
        seconds -= (1 if zone[0] == "+" else -1) * (3600 * hours + 60 * minutes)
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
