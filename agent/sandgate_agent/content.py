"""File content, read and written in pieces (behaviour.md 9). Blocking; runs in threads, one call at a time.

A caller that is cancelled leaves while a thread may still be inside a call. Closing takes the same lock as reading and
writing, so that the descriptor's number cannot be given to another file under a call that is still running.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Mapping

from sandgate_agent.accounts import OwnerNames
from sandgate_agent.entries import METADATA_PREFIX, Entry, entry_at
from sandgate_agent.faults import NO_SPACE, file_error, virtual_file_error
from sandgate_agent.files import Owner, make_parents
from sandgate_errors import Internal, InvalidArgument, NoSpace, SandgateError

__all__ = ["PIECE_SIZE", "Reader", "Writer", "begin_to_write"]

#: Large enough that the hop to a thread and the message around it do not count; one frame of HTTP/2 with its message.
PIECE_SIZE = 1024 * 1024 - 64
#: Never waits for another side, and never takes a terminal over.
_SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_ATTRIBUTES = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP})


def _expect_many_pieces() -> None:
    # Not at the top: it brings ctypes, see there.
    from sandgate_agent.kernel import keep_freed_pieces

    keep_freed_pieces()


def _check_regular(path: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise InvalidArgument(f"path '{path}' is a directory")
    if not stat.S_ISREG(info.st_mode):
        raise InvalidArgument(f"path '{path}' is not a regular file")


class _OpenFile:
    """A descriptor that is closed once, and never under a call that still uses it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd: int | None = None

    def close(self) -> None:
        with self._lock:
            self._close()

    def try_close(self) -> bool:
        """Close unless a call is under way."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._close()
        finally:
            self._lock.release()
        return True

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class Reader(_OpenFile):
    """One file, from ``offset`` for ``length`` bytes, or to the end that it had when it was opened."""

    def __init__(self, path: str, *, offset: int, length: int | None) -> None:
        super().__init__(path)
        self._fd = _open_to_read(path)
        try:
            info = os.fstat(self._fd)
            _check_regular(path, info)
        except BaseException:
            self.close()
            raise
        self.size = info.st_size
        self.modified_ns = info.st_mtime_ns
        self._start = self._position = offset
        self._end = self._last_byte(offset, length)

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        with self._lock:
            if self._fd is None:
                return b""
            if self._position > self._start:
                _expect_many_pieces()
            wanted = PIECE_SIZE if self._end is None else min(PIECE_SIZE, self._end - self._position)
            if wanted <= 0:
                return b""
            try:
                data = os.pread(self._fd, wanted, self._position)
            except OSError as error:
                raise _content_error(error, self._fd, self.path) from None
            self._position += len(data)
            return data

    def hand_over(self, sock: socket.socket, header: bytes) -> None:
        """Send a copy of the descriptor with one packet. Raises OSError when the other side is gone or does not read."""
        with self._lock:
            if self._fd is not None:
                socket.send_fds(sock, [header], [self._fd])

    @property
    def at_end(self) -> bool:
        """Whether nothing is left, as far as can be told without reading."""
        return self._end is not None and self._position >= self._end

    def _last_byte(self, offset: int, length: int | None) -> int | None:
        # A virtual file reports 0 and is read until it gives nothing (D12). Any other ends where it ended at first: one
        # that grows faster than it is sent would have no end, and its size was announced.
        announced = self.size or None
        asked = None if length is None else offset + length
        ends = [end for end in (announced, asked) if end is not None]
        return min(ends) if ends else None


def _open_to_read(path: str) -> int:
    try:
        # Looked at first: opening a pipe or device can have effects of its own.
        _check_regular(path, os.stat(path))
        return os.open(path, os.O_RDONLY | _SAFE)
    except OSError as error:
        raise file_error(error, path) from None


class Writer(_OpenFile):
    """One file, written in place (D22-D36)."""

    def __init__(self, path: str, owner: Owner) -> None:
        super().__init__(path)
        self._written = 0
        self._received = 0
        make_parents(path, owner)
        try:
            self._fd, created = _open_to_write(path)
            info = os.fstat(self._fd)
            _check_regular(path, info)
            _give(self._fd, info, owner, created=created)
        except OSError as error:
            self.close()
            raise self._error(error) from None
        except BaseException:
            self.close()
            raise
        self._old_size = info.st_size

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._fd is None:
                raise Internal(f"path '{self.path}' is closed")
            if self._received:
                _expect_many_pieces()
            self._received += len(data)
            try:
                self._write(self._fd, data)
            except OSError as error:
                raise self._error(error, self._fd) from None
            finally:
                self._cut(self._fd)

    def finish(self, metadata: Mapping[str, str], names: OwnerNames) -> Entry:
        """Store metadata, close, and describe what was written."""
        try:
            with self._lock:
                if self._fd is None:
                    raise Internal(f"path '{self.path}' is closed")
                self._cut(self._fd)
                # Also when there is none: what an earlier upload said is not true of this content (D35).
                _replace_metadata(self._fd, metadata)
            self.close()
            return entry_at(self.path, names)
        except OSError as error:
            raise self._error(error) from None

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            count = os.write(fd, rest)
            self._written += count
            rest = rest[count:]

    def _cut(self, fd: int) -> None:
        """Drop what is left of the old content behind the first piece.

        After that piece and not before: content that fits into the old file's space then needs no other (D29), and a
        file that does not shrink shows watchers one write only (F44).
        """
        if self._old_size > self._written:
            os.ftruncate(fd, self._written)
        self._old_size = 0

    def _error(self, error: OSError, fd: int | None = None) -> Exception:
        if error.errno in NO_SPACE:
            return NoSpace(f"attempted to write {self._received} bytes: not enough {_lacking(self.path)} available")
        own: dict[int, Exception] = {
            errno.ENXIO: InvalidArgument(f"path '{self.path}' is not a regular file"),
            errno.ENOTDIR: Internal(f"a parent of path '{self.path}' is not a directory"),
        }
        if (meant := own.get(error.errno or 0)) is not None:
            return meant
        return file_error(error, self.path) if fd is None else _content_error(error, fd, self.path)


def begin_to_write(path: str, owner: Owner, content: bytes) -> Writer:
    """A file opened to be written, with the first of its content in it."""
    writer = Writer(path, owner)
    try:
        if content:
            writer.write(content)
    except BaseException:
        writer.close()
        raise
    return writer


def _content_error(error: OSError, fd: int, path: str) -> SandgateError:
    """What the kernel refuses on files that it makes up (D12, D31), such as junk for a number, is the caller's mistake."""
    # Such a file system has no blocks, and so no disk that could be broken.
    virtual = os.fstatvfs(fd).f_blocks == 0
    return virtual_file_error(error, path) if virtual else file_error(error, path)


def _lacking(path: str) -> str:
    try:
        system = os.statvfs(os.path.dirname(path))
    except OSError:
        return "disk space"
    return "inodes" if system.f_files and not system.f_favail and system.f_bavail else "disk space"


def _open_to_write(path: str) -> tuple[int, bool]:
    """Open, and whether the file was made. O_CREAT only where nothing is: in sticky directories the kernel refuses it on
    other users' files even to root.
    """
    flags = os.O_WRONLY | _SAFE
    try:
        return os.open(path, flags), False
    except FileNotFoundError:
        pass
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        # Made by another call in between, or a link to a file that does not exist yet (D25).
        return os.open(path, flags | os.O_CREAT, 0o666), False


def _give(fd: int, info: os.stat_result, owner: Owner, *, created: bool) -> None:
    """The owner, before the first byte is written (D23). Without accounts of its own the file is given to whom it belongs:
    watchers see the same events everywhere (F44).
    """
    try:
        os.fchown(fd, *(owner or (info.st_uid, info.st_gid)))
    except PermissionError:
        # Virtual files have no owner to change, and are written all the same (D31).
        if created:
            raise


def _replace_metadata(fd: int, metadata: Mapping[str, str]) -> None:
    try:
        for name in os.listxattr(fd):
            if name.startswith(METADATA_PREFIX) and name[len(METADATA_PREFIX) :] not in metadata:
                os.removexattr(fd, name)
        for key, value in metadata.items():
            os.setxattr(fd, METADATA_PREFIX + key, value.encode())
    except OSError as error:
        # Such a file system simply keeps none (D36).
        if error.errno not in _NO_ATTRIBUTES:
            raise
