"""``X-Metadata-*`` headers of an upload: what is stored with the file (``behaviour.md`` D35)."""

from __future__ import annotations

from collections.abc import Mapping

from sandgate_errors import InvalidArgument

__all__ = ["metadata_of"]

_PREFIX = "x-metadata-"
_MAX_KEY = 246
_MAX_TOTAL = 4096
# Every key is stored under a prefix, which counts.
_STORED_PREFIX = 9


def metadata_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Keys in lower case; of a repeated header the first counts. Raises InvalidArgument when a limit is passed."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        lowered = name.lower()
        if lowered.startswith(_PREFIX):
            found.setdefault(lowered.removeprefix(_PREFIX), value)
    for key, value in found.items():
        _check(key, value)
    if sum(len(key) + len(value) + _STORED_PREFIX for key, value in found.items()) > _MAX_TOTAL:
        raise InvalidArgument(f"the metadata is larger than {_MAX_TOTAL} bytes")
    return found


def _check(key: str, value: str) -> None:
    if not 0 < len(key) <= _MAX_KEY:
        raise InvalidArgument(f"a metadata key must have 1 to {_MAX_KEY} bytes")
    if not (key.isascii() and value.isascii() and value.isprintable()):
        raise InvalidArgument("metadata must be printable ASCII")
