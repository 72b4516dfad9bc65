"""What changes in one directory, or in the tree below it: kernel records in, named changes out (behaviour.md F39-F42).

Blocking; one call at a time. Names are bytes relative to the watched directory. The kernel watches directories and not
trees, so each directory below has a watch of its own, made when the directory is first heard of. What happened in it
before that is read from the directory; whatever the queue then tells a second time is left out.
"""

from __future__ import annotations

import enum
import errno
import operator
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sandgate_agent.faults import file_error
from sandgate_agent.inotify import Mask, Record
from sandgate_agent.shared_queue import Share, SharedQueue
from sandgate_errors import Internal, InvalidArgument, ResourceExhausted, SandgateError

__all__ = ["Change", "Kind", "TreeWatch"]


class Kind(enum.IntEnum):
    """The numbers are those of ``EventType``."""

    CREATE = 1
    WRITE = 2
    REMOVE = 3
    RENAME = 4
    CHMOD = 5


class Change(NamedTuple):
    """``name`` is ``.`` for the watched directory itself (F40)."""

    name: bytes
    kind: Kind

    @property
    def keeps_entry(self) -> bool:
        """Whether there is still something under this name (F45)."""
        return self.kind not in {Kind.REMOVE, Kind.RENAME}


#: In the order in which one record with several of them is told (F39).
_KINDS = (
    (Mask.CREATE | Mask.MOVED_TO, Kind.CREATE),
    (Mask.MOVED_FROM | Mask.MOVE_SELF, Kind.RENAME),
    (Mask.ATTRIB, Kind.CHMOD),
    (Mask.MODIFY, Kind.WRITE),
    (Mask.DELETE | Mask.DELETE_SELF, Kind.REMOVE),
)
_WANTED = (
    Mask.CREATE
    | Mask.MOVED_TO
    | Mask.MOVED_FROM
    | Mask.MOVE_SELF
    | Mask.ATTRIB
    | Mask.MODIFY
    | Mask.DELETE
    | Mask.DELETE_SELF
    | Mask.ONLYDIR
)
_ROOT = b""
#: A directory that vanished or was replaced since it was heard of, or that the agent may not look into.
_PASSED_OVER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})


class TreeWatch:
    """A watch that is active once made. Raises errors of the taxonomy."""

    def __init__(self, path: str, *, recursive: bool, cancelled: Callable[[], bool], queue: SharedQueue) -> None:
        self._path = path
        self._root = os.fsencode(path)
        self._recursive = recursive
        self._names: dict[int, bytes] = {}
        self._watches: dict[bytes, int] = {}
        #: Directories that were moved away and have not yet come up elsewhere: watch to (cookie, old name).
        self._leaving: dict[int, tuple[int, bytes]] = {}
        #: Told from reading the directory; the queue may tell them again until it has been read to its end.
        self._told: set[tuple[int, bytes]] = set()
        #: What this watch sees of the agent's queue.
        self.share = _share_of(queue)
        try:
            self._start(cancelled)
        except BaseException:
            self.close()
            raise

    def changes(self) -> Iterator[Change]:
        """What has happened up to now. Raises Internal when something was lost."""
        for record in self.share.read():
            yield from self._changes_of(record)
        if not self.share.waiting:
            self._told.clear()

    def path_of(self, name: bytes) -> bytes:
        return self._root if name == b"." else os.path.join(self._root, name)

    def close(self) -> None:
        self.share.close()

    def _start(self, cancelled: Callable[[], bool]) -> None:
        try:
            self._watch(_ROOT)
        except OSError as error:
            if error.errno == errno.ENOTDIR and os.path.lexists(self._root):
                raise InvalidArgument(f"path '{self._path}' is not a directory") from None
            raise self._error(error) from None
        if self._recursive:
            for _ in self._enter(_ROOT):
                if cancelled():
                    break
            # Nobody was told: what the queue says about them now is news.
            self._told.clear()

    def _watch(self, name: bytes) -> int:
        mask = _WANTED if name == _ROOT else _WANTED | Mask.DONT_FOLLOW
        watch = self.share.add(os.path.join(self._root, name), mask)
        self._rename(watch, name)
        return watch

    def _rename(self, watch: int, name: bytes) -> None:
        self._forget_name(watch)
        self._names[watch] = name
        self._watches[name] = watch

    def _forget_name(self, watch: int) -> None:
        old = self._names.pop(watch, None)
        if old is not None and self._watches.get(old) == watch:
            del self._watches[old]

    def _changes_of(self, record: Record) -> Iterator[Change]:
        if record.mask & Mask.Q_OVERFLOW:
            raise Internal(f"too many changes at once below path '{self._path}': some were lost")
        name = self._names.get(record.watch)
        if record.mask & Mask.IGNORED:
            self._leaving.pop(record.watch, None)
            self._forget_name(record.watch)
        elif record.mask & Mask.UNMOUNT and name == _ROOT:
            raise Internal(f"the file system of path '{self._path}' was unmounted")
        elif name is None:
            # Of a directory that has left the tree.
            return
        elif record.name:
            yield from self._changes_in(record, name)
        elif name == _ROOT:
            yield from _told_as(record, b".")
        elif record.mask & Mask.MOVE_SELF:
            self._moved(record.watch, name)

    def _changes_in(self, record: Record, folder: bytes) -> Iterator[Change]:
        name = os.path.join(folder, record.name)
        key = (record.watch, record.name)
        if record.mask & (Mask.CREATE | Mask.MOVED_TO):
            if key in self._told:
                self._told.discard(key)
                self._arrived(record.cookie)
                return
        elif record.mask & (Mask.DELETE | Mask.MOVED_FROM):
            self._told.discard(key)
        yield from _told_as(record, name)
        if self._recursive and record.mask & Mask.ISDIR:
            if record.mask & Mask.MOVED_FROM:
                self._leave(record.cookie, name)
            elif record.mask & (Mask.CREATE | Mask.MOVED_TO):
                self._follow(record.cookie, name)
                yield from self._enter(name)

    # A rename is three records: away, to, and of the moved directory itself. The third comes last, so a directory that it
    # finds still leaving has left the tree.

    def _leave(self, cookie: int, name: bytes) -> None:
        watch = self._watches.get(name)
        if watch is not None:
            self._leaving[watch] = (cookie, name)

    def _arrived(self, cookie: int) -> bytes | None:
        """The old name of the directory that this rename has brought, if it was watched."""
        for watch, (other, name) in self._leaving.items():
            if other == cookie:
                del self._leaving[watch]
                return name
        return None

    def _follow(self, cookie: int, name: bytes) -> None:
        old = self._arrived(cookie) if cookie else None
        if old is not None:
            for watch, suffix in self._below(old):
                self._rename(watch, name + suffix)

    def _moved(self, watch: int, name: bytes) -> None:
        _, old = self._leaving.pop(watch, (0, None))
        if old == name:
            for left, _ in self._below(name):
                self._forget_name(left)
                self.share.remove(left)

    def _below(self, name: bytes) -> list[tuple[int, bytes]]:
        """The watches of a directory and of those in it, each with what its name has behind ``name``."""
        prefix = name + b"/"
        return [
            (watch, found[len(name) :])
            for watch, found in self._names.items()
            if found == name or found.startswith(prefix)
        ]

    def _enter(self, name: bytes) -> Iterator[Change]:
        """Watch a directory and those in it; tell what is found there, a directory's entries before what is in them."""
        waiting = [name]
        while waiting:
            folder = waiting.pop()
            try:
                watch = self._watch(folder)
                with os.scandir(os.path.join(self._root, folder)) as entries:
                    found = sorted(entries, key=operator.attrgetter("name"))
            except OSError as error:
                if error.errno in _PASSED_OVER:
                    continue
                raise self._error(error) from None
            for entry in found:
                self._told.add((watch, entry.name))
                yield Change(os.path.join(folder, entry.name), Kind.CREATE)
            waiting += [os.path.join(folder, entry.name) for entry in reversed(found) if _is_directory(entry)]

    def _error(self, error: OSError) -> SandgateError:
        if error.errno == errno.ENOSPC:
            return ResourceExhausted(
                f"too many directories below path '{self._path}' for this system's limit of watches"
            )
        return file_error(error, self._path)


def _share_of(queue: SharedQueue) -> Share:
    try:
        return queue.share()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise ResourceExhausted("others use all inotify instances that this system allows") from None
        raise Internal(f"this system offers no file events: {error.strerror}") from None


def _told_as(record: Record, name: bytes) -> Iterator[Change]:
    return (Change(name, kind) for mask, kind in _KINDS if record.mask & mask)


def _is_directory(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
