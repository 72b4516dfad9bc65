"""inotify(7) by ctypes: one kernel queue of file events. Python 3.11 has no function for it.

Nothing is interpreted here; :mod:`sandgate_agent.tree_watch` does, which gets its part of the queue from
:mod:`sandgate_agent.shared_queue`. Imported by the first watch and not before: ctypes costs
milliseconds, which the agent's start does not have.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["Inotify", "Mask", "Record"]

_libc = ctypes.CDLL(None, use_errno=True)
_HEADER = struct.Struct("iIII")
#: Room for about two thousand records with short names; one record with the longest name needs 272.
_READ_BYTES = 64 * 1024


class Mask:
    """What is asked for, and what a record says. Plain numbers: there are several tests for each of many records."""

    MODIFY: Final = 0x2
    ATTRIB: Final = 0x4
    MOVED_FROM: Final = 0x40
    MOVED_TO: Final = 0x80
    CREATE: Final = 0x100
    DELETE: Final = 0x200
    DELETE_SELF: Final = 0x400
    MOVE_SELF: Final = 0x800
    # Records only: the file system went away, the queue was too long, the watch has ended, it is about a directory.
    UNMOUNT: Final = 0x2000
    Q_OVERFLOW: Final = 0x4000
    IGNORED: Final = 0x8000
    ISDIR: Final = 0x40000000
    # Requests only: fail on what is no directory, and on a link.
    ONLYDIR: Final = 0x01000000
    DONT_FOLLOW: Final = 0x02000000
    # Requests only: what was asked for before stays.
    MASK_ADD: Final = 0x20000000


class Record(NamedTuple):
    """One event as the kernel tells it. ``cookie`` joins the two records of a rename; ``name`` is empty for the watched
    directory itself.
    """

    watch: int
    mask: int
    cookie: int
    name: bytes


class Inotify:
    """One queue. Calls return at once; the descriptor is readable while records wait. Raises OSError."""

    def __init__(self) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._fd

    def add(self, path: bytes, mask: int) -> int:
        """Watch a path; the number of its watch, the same for the same inode."""
        return _checked(_libc.inotify_add_watch(self._fd, ctypes.c_char_p(path), ctypes.c_uint32(mask)))

    def remove(self, watch: int) -> None:
        """End a watch. One that the kernel has ended itself is not an error."""
        try:
            _checked(_libc.inotify_rm_watch(self._fd, ctypes.c_int(watch)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    @property
    def waiting(self) -> int:
        """Bytes of records that wait."""
        answer = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, answer)
        return answer[0]

    def read(self) -> Iterator[Record]:
        """The records that wait now, in their order. What comes meanwhile is left: it might never end."""
        left = self.waiting
        while left > 0:
            data = os.read(self._fd, _READ_BYTES)
            left -= len(data)
            yield from _records(data)

    def close(self) -> None:
        """Ends all watches."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _records(data: bytes) -> Iterator[Record]:
    at = 0
    while at < len(data):
        watch, mask, cookie, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        yield Record(watch, mask, cookie, data[at : at + length].rstrip(b"\0"))
        at += length


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
