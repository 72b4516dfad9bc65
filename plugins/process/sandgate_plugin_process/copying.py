"""Copying a tree in which hostile code has lived, with all that makes it what it is.

Owners, modes, times, hard links, holes and the attributes that a sandbox can set are kept; blocks are shared where the file
system can (``FICLONE``, ioctl_ficlonerange(2)). Like :mod:`sandgate_plugin_process.removal` it depends on no path: every step
is relative to a directory descriptor and follows no link, and however deep the tree is, one directory of each side is open.

Nothing may change the source meanwhile: its sandbox stands still or has ended. Times of last access are not kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sandgate_plugin_process.removal import remove_tree

__all__ = ["Owners", "Stopped", "copy_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Without O_NONBLOCK, a pipe in the place of a file would hold the opening up.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FICLONE = 0x40049409
_PIECE_BYTES = 8 * 1024 * 1024
_NOT_SHARED = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}
_CAPABILITY = "security.capability"
_ACLS = frozenset({"system.posix_acl_access", "system.posix_acl_default"})
#: linux/capability.h: the third revision carries the outer id of the namespace's root.
_REVISION = 0xFF000000
_REVISION_3 = 0x03000000
#: linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id; these tags name an account or a group.
_ACL_HEAD = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_NAMED = frozenset({0x02, 0x08})


class Stopped(Exception):
    """Somebody said that the copy is not wanted any more; what there is of it is to be removed."""


@dataclass(frozen=True)
class Owners:
    """How outer ids of the source become those of the copy: ids of one sandbox become the same ids of another."""

    #: The first outer id of each side's sandbox; None: all belongs to the gateway's own user.
    source: int | None
    target: int | None
    count: int = 65536

    def of(self, outer: int) -> int:
        if self.source is None or self.target is None or not self.source <= outer < self.source + self.count:
            return outer
        return outer - self.source + self.target

    @property
    def kept(self) -> bool:
        """Whether there are owners to be set at all."""
        return self.source is not None


@dataclass
class _Level:
    """One directory on the way down: what is left to do in it, and what it was."""

    pending: list[str]
    was: os.stat_result
    #: Which directories these are, to be sure of the way back.
    source: tuple[int, int]
    target: tuple[int, int]


def copy_tree(source: Path, target: Path, *, owners: Owners, stop: threading.Event) -> None:
    """Copy the folder ``source`` to ``target``, which must not exist. Blocks.

    Raises Stopped soon after ``stop`` is set, and OSError; what was copied by then is left for the caller to remove.
    """
    os.mkdir(target, 0o700)
    links = target.with_name(f"{target.name}.links-{secrets.token_hex(4)}")
    os.mkdir(links, 0o700)
    try:
        with _opened(links) as found, _Copy(source, target, links=found, owners=owners, stop=stop) as copy:
            copy.run()
    finally:
        remove_tree(links)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Copy:
    """One copy under way: where it stands in both trees."""

    def __init__(self, source: Path, target: Path, *, links: int, owners: Owners, stop: threading.Event) -> None:
        self._owners = owners
        self._stop = stop
        #: A folder with one name for each file that has several, under which the others find it.
        self._links = links
        #: How many more names each of them has.
        self._names: dict[str, int] = {}
        self._levels: list[_Level] = []
        self._was = os.stat(source, follow_symlinks=False)
        self._source = _unlocked(os.fspath(source), None)
        self._target = os.open(target, _DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After a failure too, every folder that was opened to its owner is closed again.
        with contextlib.suppress(OSError):
            while self._levels:
                self._climb(finish=False)
        os.close(self._source)
        os.close(self._target)

    def run(self) -> None:
        self._begin(self._was)
        while self._levels:
            if self._levels[-1].pending:
                self._descend(self._levels[-1].pending.pop())
            else:
                self._climb(finish=True)

    def _begin(self, was: os.stat_result) -> None:
        """Copy all but folders of the directory where this stands, and note those. ``was``: before it had to be opened."""
        level = _Level(pending=[], was=was, source=_identity(self._source), target=_identity(self._target))
        self._levels.append(level)
        with os.scandir(self._source) as entries:
            for entry in entries:
                if self._stop.is_set():
                    raise Stopped
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    level.pending.append(entry.name)
                else:
                    self._copy(entry.name, found)

    def _descend(self, name: str) -> None:
        was = os.stat(name, dir_fd=self._source, follow_symlinks=False)
        inner = _unlocked(name, self._source)
        try:
            os.mkdir(name, 0o700, dir_fd=self._target)
            made = os.open(name, _DIRECTORY, dir_fd=self._target)
        except BaseException:
            os.close(inner)
            raise
        os.close(self._source)
        os.close(self._target)
        self._source, self._target = inner, made
        self._begin(was)

    def _climb(self, *, finish: bool) -> None:
        """Back to the directory above, with the one below done."""
        level = self._levels.pop()
        above = self._levels[-1] if self._levels else None
        up = None if above is None else self._above(self._source, above.source)
        try:
            made = None if above is None or not finish else self._above(self._target, above.target)
        except BaseException:
            if up is not None:
                os.close(up)
            raise
        try:
            if stat.S_IMODE(os.fstat(self._source).st_mode) != stat.S_IMODE(level.was.st_mode):
                os.fchmod(self._source, stat.S_IMODE(level.was.st_mode))
            if finish:
                self._dress(self._target, self._source, level.was)
        except BaseException:
            for descriptor in (up, made):
                if descriptor is not None:
                    os.close(descriptor)
            raise
        if up is not None:
            os.close(self._source)
            self._source = up
        if made is not None:
            os.close(self._target)
            self._target = made

    @staticmethod
    def _above(folder: int, expected: tuple[int, int]) -> int:
        descriptor = os.open("..", _DIRECTORY, dir_fd=folder)
        if _identity(descriptor) != expected:
            os.close(descriptor)
            raise OSError(errno.ESTALE, "a folder was moved while it was copied")
        return descriptor

    def _copy(self, name: str, found: os.stat_result) -> None:
        if self._is_linked(name, found):
            return
        kind = stat.S_IFMT(found.st_mode)
        match kind:
            case stat.S_IFREG:
                self._copy_file(name, found)
            case stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=self._source), name, dir_fd=self._target)
                self._dress_by_name(name, found)
            case stat.S_IFIFO | stat.S_IFSOCK:
                os.mknod(name, kind | 0o600, dir_fd=self._target)
                self._dress_by_name(name, found)
            case stat.S_IFCHR if found.st_rdev == 0:
                # What overlay file systems mark removed files by; the only device that a sandbox can make.
                os.mknod(name, kind, 0, dir_fd=self._target)
                self._dress_by_name(name, found)
            case _:
                return
        if found.st_nlink > 1:
            key = f"{found.st_dev}-{found.st_ino}"
            os.link(name, key, src_dir_fd=self._target, dst_dir_fd=self._links, follow_symlinks=False)
            self._names[key] = found.st_nlink - 1

    def _is_linked(self, name: str, found: os.stat_result) -> bool:
        """Whether this is another name of a file that was copied, and has it now."""
        key = f"{found.st_dev}-{found.st_ino}"
        if key not in self._names:
            return False
        self._names[key] -= 1
        if self._names[key]:
            os.link(key, name, src_dir_fd=self._links, dst_dir_fd=self._target, follow_symlinks=False)
        else:
            # The last one takes the place of ours: a file may have as many names as the file system allows.
            del self._names[key]
            os.rename(key, name, src_dir_fd=self._links, dst_dir_fd=self._target)
        return True

    def _copy_file(self, name: str, found: os.stat_result) -> None:
        with _readable(name, self._source, found) as source:
            target = os.open(name, _NEW_FILE, 0o600, dir_fd=self._target)
            try:
                self._copy_content(source, target)
                self._dress(target, source, found)
            finally:
                os.close(target)

    def _copy_content(self, source: int, target: int) -> None:
        try:
            fcntl.ioctl(target, _FICLONE, source)
            return
        except OSError as error:
            if error.errno not in _NOT_SHARED:
                raise
        size = os.fstat(source).st_size
        end = 0
        while (begin := _seek(source, end, os.SEEK_DATA)) is not None:
            end = _seek(source, begin, os.SEEK_HOLE) or size
            self._copy_range(source, target, begin, end)
        os.ftruncate(target, size)

    def _copy_range(self, source: int, target: int, begin: int, end: int) -> None:
        while begin < end:
            if self._stop.is_set():
                raise Stopped
            wanted = min(end - begin, _PIECE_BYTES)
            try:
                done = os.copy_file_range(source, target, wanted, begin, begin)
            except OSError as error:
                if error.errno not in _NOT_SHARED:
                    raise
                done = os.pwrite(target, os.pread(source, wanted, begin), begin)
            if not done:
                return
            begin += done

    def _dress(self, target: int, source: int, was: os.stat_result) -> None:
        """The owner first: a change of it takes away what comes next."""
        if self._owners.kept:
            os.fchown(target, self._owners.of(was.st_uid), self._owners.of(was.st_gid))
        os.fchmod(target, stat.S_IMODE(was.st_mode))
        for name in _attributes_of(source):
            if name.startswith("user.") or name == _CAPABILITY or name in _ACLS:
                os.setxattr(target, name, self._translated(name, os.getxattr(source, name)))
        os.utime(target, ns=(was.st_mtime_ns, was.st_mtime_ns))

    def _dress_by_name(self, name: str, was: os.stat_result) -> None:
        """For what is not opened: links, pipes and sockets."""
        if self._owners.kept:
            owner, group = self._owners.of(was.st_uid), self._owners.of(was.st_gid)
            os.chown(name, owner, group, dir_fd=self._target, follow_symlinks=False)
        if not stat.S_ISLNK(was.st_mode):
            # Nothing else is in the copy yet, so the name is what was made under it.
            os.chmod(name, stat.S_IMODE(was.st_mode), dir_fd=self._target)
        os.utime(name, ns=(was.st_mtime_ns, was.st_mtime_ns), dir_fd=self._target, follow_symlinks=False)

    def _translated(self, name: str, value: bytes) -> bytes:
        """An attribute that names outer ids, with those of the copy."""
        if name == _CAPABILITY and len(value) == 24 and struct.unpack_from("<I", value)[0] & _REVISION == _REVISION_3:
            return value[:20] + struct.pack("<I", self._owners.of(struct.unpack_from("<I", value, 20)[0]))
        if name in _ACLS:
            entries = _ACL_ENTRY.iter_unpack(value[_ACL_HEAD.size :])
            return value[: _ACL_HEAD.size] + b"".join(
                _ACL_ENTRY.pack(tag, allowed, self._owners.of(number) if tag in _ACL_NAMED else number)
                for tag, allowed, number in entries
            )
        return value


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _attributes_of(descriptor: int) -> list[str]:
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return []


def _seek(descriptor: int, position: int, how: int) -> int | None:
    """None: there is no such place up to the end of the file."""
    try:
        return os.lseek(descriptor, position, how)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def _unlocked(name: str, parent: int | None) -> int:
    """A folder, opened to its owner where it is closed: without privileges one can close a folder to oneself."""
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if os.geteuid() != 0 and mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(descriptor, mode | stat.S_IRWXU)
    return descriptor


@contextlib.contextmanager
def _readable(name: str, parent: int, found: os.stat_result) -> Iterator[int]:
    """A file; for as long as the block runs its owner may read it."""
    closed = False
    try:
        descriptor = os.open(name, _FILE, dir_fd=parent)
    except PermissionError:
        os.chmod(name, stat.S_IMODE(found.st_mode) | stat.S_IRUSR, dir_fd=parent)
        closed = True
        descriptor = os.open(name, _FILE, dir_fd=parent)
    try:
        yield descriptor
    finally:
        if closed:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
        os.close(descriptor)
