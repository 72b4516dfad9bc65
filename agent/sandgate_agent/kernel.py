"""The few calls of the kernel that Python 3.11 has no function for, by ctypes.

Imported by spawners after the fork, by the first watch or large file, and nowhere on the agent's way to its first call: ctypes costs
milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = [
    "become_subreaper",
    "drop_capabilities",
    "file_system_type",
    "hide_memory",
    "keep_freed_pieces",
    "new_user_namespace",
    "set_call_filter",
    "set_io_priority",
    "set_name",
]

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 4 * 1024 * 1024
_KEPT_BYTES = 8 * 1024 * 1024
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_SHIFT = 13
_BEST_EFFORT = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    _check(_libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def become_subreaper() -> None:
    """Descendants that lose their parent become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keep other processes of the same user from tracing this one; programs it starts are not affected."""
    _prctl(_PR_SET_DUMPABLE, 0)


def set_name(name: str) -> None:
    """The name in process lists, at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def set_call_filter(program: bytes) -> None:
    """One more filter of system calls, for this process and all that it starts from now on; ``program`` is for the kernel's BPF."""
    described = _Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(described), 0, 0))


def new_user_namespace() -> None:
    _check(_libc.unshare(_CLONE_NEWUSER))


def drop_capabilities() -> None:
    """Give up every capability, so that file permissions hold for this process too."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing))


def set_io_priority(level: int) -> None:
    """Best effort at ``level``; does nothing on machines whose call number is not known here."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        value = _BEST_EFFORT << _IOPRIO_CLASS_SHIFT | level
        _check(_libc.syscall(ctypes.c_long(number), _IOPRIO_WHO_PROCESS, 0, value))


def file_system_type(path: bytes) -> int:
    """The magic number of the file system that ``path`` lies on (statfs(2))."""
    # Far more than the largest layout; the type stands first in all of them, as one machine word or less.
    answer = (ctypes.c_long * 64)()
    _check(_libc.statfs(ctypes.c_char_p(path), ctypes.byref(answer)))
    return answer[0] & 0xFFFFFFFF


@functools.cache
def keep_freed_pieces() -> None:
    """Let the C library keep the memory of a piece of a file for the next one. It would give each back to the kernel and get
    it again page by page, at more than the cost of all else. Has no effect with a library that has no such choice.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
