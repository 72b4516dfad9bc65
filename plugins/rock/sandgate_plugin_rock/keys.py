"""API keys of any form (K2): what a client sends, and the gateway's key that it stands for.

The gateway makes its own keys, of E2B's form. Clients that were given others go on with them where a file says which key of
the gateway each is: one pair in each line, the client's key, blanks, the gateway's. What is not in the file goes on as it is.
The file is read again when it has changed, so that a new key needs no restart; only digests of clients' keys stay in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["Keys"]

_LARGEST_FILE = 4 * 1024 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_log = logging.getLogger(__name__)


class Keys:
    """Which key of the gateway a client's key stands for."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises FailedPrecondition with one line for the operator, which names no key."""
        self._path = path
        self._seen: object = None
        self._known: Mapping[bytes, str] = {}
        if path is not None:
            self._seen = _mark(path)
            self._known = _read(path)

    def ours(self, key: str) -> str:
        """The gateway's key that a client's stands for; itself where the file does not know it."""
        if self._path is not None:
            self._look_again(self._path)
        return self._known.get(_digest(key), key)

    def _look_again(self, path: Path) -> None:
        mark = _mark(path)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._known = _read(path)
        except FailedPrecondition as error:
            # What was read before holds on: an editor may be in the middle of writing it.
            _log.error("the keys of clients were not read again: %s", error.message)


def _mark(path: Path) -> object:
    """Changes when the file does; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _read(path: Path) -> Mapping[bytes, str]:
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & _OTHERS:
                raise FailedPrecondition(f"keys_file {path} is open to others: chmod 600")
            if status.st_size > _LARGEST_FILE:
                raise FailedPrecondition(f"keys_file {path} is larger than {_LARGEST_FILE} bytes")
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"keys_file {path} cannot be read: {error}") from error
    known: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) != 2 or _digest(words[0]) in known:
            raise FailedPrecondition(f"keys_file {path}, line {number}: not a new key and the gateway's key for it")
        known[_digest(words[0])] = words[1]
    return known


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
