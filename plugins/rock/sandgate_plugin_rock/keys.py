"""API keys of any form (K2): what a client sends, and the gateway's key that it stands for.

The gateway makes its own keys, of E2B's form. Clients that were given others go on with them where a file says which key of
the gateway each is: one pair in each line, the client's key, blanks, the gateway's. What is not in the file goes on as it is.
Only digests of clients' keys are kept in memory.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["Keys"]

_LARGEST_FILE = 4 * 1024 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Keys:
    """Which key of the gateway a client's key stands for."""

    def __init__(self, pairs: Mapping[str, str] | None = None) -> None:
        self._known = {_digest(theirs): ours for theirs, ours in (pairs or {}).items()}

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Raises FailedPrecondition with one line for the operator, which names no key."""
        try:
            if path.stat().st_mode & _OTHERS:
                raise FailedPrecondition(f"keys_file {path} can be read by others: chmod 600")
            if path.stat().st_size > _LARGEST_FILE:
                raise FailedPrecondition(f"keys_file {path} is larger than {_LARGEST_FILE} bytes")
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(f"keys_file {path} cannot be read: {error}") from error
        pairs: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or line.startswith("#"):
                continue
            if len(words) != 2 or words[0] in pairs:
                raise FailedPrecondition(f"keys_file {path}, line {number}: not one new key and the gateway's")
            pairs[words[0]] = words[1]
        return cls(pairs)

    def ours(self, key: str) -> str:
        """The gateway's key that a client's stands for; itself where the file does not know it."""
        return self._known.get(_digest(key), key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
