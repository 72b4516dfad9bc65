"""What there is to say about one directory entry (F6-F15).

Paths are bytes here: names in a sandbox need not be UTF-8. They become text, with a replacement character for what is
not, only in an entry's fields.
"""

from __future__ import annotations

import enum
import errno
import functools
import os
import stat
from typing import NamedTuple

from sandgate_agent.accounts import OwnerNames

__all__ = ["METADATA_PREFIX", "Entry", "Kind", "describe", "entry_at", "permissions"]

METADATA_PREFIX = "user.e2b."
#: The file system keeps no attributes, or not for this kind of file; or the entry has vanished meanwhile.
_NO_ATTRIBUTES = frozenset(
    {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENODATA, errno.ELOOP}
)

_TYPE_LETTERS = {
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "L",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "S",
    stat.S_IFBLK: "D",
    stat.S_IFCHR: "Dc",
}


class Kind(enum.IntEnum):
    """The numbers are those of ``FileType``."""

    OTHER = 0
    FILE = 1
    DIRECTORY = 2
    #: Only a link that leads nowhere.
    SYMLINK = 3


class Entry(NamedTuple):
    """One entry; see ``EntryInfo`` for the fields."""

    name: str
    kind: Kind
    path: str
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_ns: int
    symlink_target: str | None
    metadata: dict[str, str] | None
    is_symlink: bool


def entry_at(path: str, names: OwnerNames) -> Entry:
    """Raises OSError when there is nothing."""
    encoded = os.fsencode(path)
    return describe(encoded, os.path.basename(encoded), os.lstat(encoded), names)


def describe(path: bytes, name: bytes, info: os.stat_result, names: OwnerNames) -> Entry:
    """The entry of what ``lstat`` said about ``path``."""
    target: os.stat_result | None = info
    symlink_target: str | None = None
    is_symlink = stat.S_ISLNK(info.st_mode)
    if is_symlink:
        target, symlink_target = _follow(path)
    mode = info.st_mode if target is None else target.st_mode
    kind = Kind.SYMLINK if target is None else _kind(mode)
    return Entry(
        _text(name) if name else "/",
        kind,
        _text(path),
        info.st_size,
        mode & 0o777,
        permissions(info.st_mode),
        names.user(info.st_uid),
        names.group(info.st_gid),
        info.st_mtime_ns,
        symlink_target,
        _metadata(path) if kind is Kind.FILE or kind is Kind.DIRECTORY else None,
        is_symlink,
    )


def _follow(path: bytes) -> tuple[os.stat_result | None, str]:
    """What a link finally points to, and its path; for a link that leads nowhere its own path (F13)."""
    try:
        return os.stat(path), _text(os.path.realpath(path))
    except OSError:
        return None, _text(path)


@functools.lru_cache(maxsize=512)
def _kind(mode: int) -> Kind:
    return Kind.FILE if stat.S_ISREG(mode) else Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.OTHER


@functools.lru_cache(maxsize=512)
def permissions(mode: int) -> str:
    """As the Go standard library writes a mode (F10)."""
    letters = ""
    kind = _TYPE_LETTERS.get(stat.S_IFMT(mode), "")
    special = (
        ("u" if mode & stat.S_ISUID else "") + ("g" if mode & stat.S_ISGID else ""),
        "t" if mode & stat.S_ISVTX else "",
    )
    # The order of Go's bits: type, setuid, setgid, character device, sticky.
    letters = kind[:1] + special[0] + kind[1:] + special[1]
    return (letters or "-") + "".join(
        letter if mode & 1 << 8 - index else "-" for index, letter in enumerate("rwxrwxrwx")
    )


def _metadata(path: bytes) -> dict[str, str] | None:
    try:
        names = [name for name in os.listxattr(path) if name.startswith(METADATA_PREFIX)]
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return None
        raise
    found = {}
    for name in names:
        try:
            found[name[len(METADATA_PREFIX) :]] = os.getxattr(path, name).decode()
        except (UnicodeDecodeError, OSError):
            # Not text, so not ours to show (F14); or removed since it was listed.
            continue
    return _printable(found) or None


def _printable(metadata: dict[str, str]) -> dict[str, str]:
    return {key.encode(errors="replace").decode(): value for key, value in metadata.items()}


def _text(path: bytes) -> str:
    return path.decode(errors="replace")
