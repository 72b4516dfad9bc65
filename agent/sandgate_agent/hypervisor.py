"""No way from a sandbox to the hypervisor that its machine runs under: a filter of system calls (seccomp(2)).

Sockets of the family AF_VSOCK lead there, past every namespace and packet filter, and what listens was made for the
machine and not for strangers on it. Some container engines close them to what runs in containers, from a version on;
others and plain processes do not have such a filter. This one is set by the root spawner, so all programs of a sandbox
have it, and adds to whatever filter there is already.

A 32 bit program can also ask for a socket by `socketcall`, with its arguments in memory, where no filter sees them. That is
closed as a whole, by what a kernel without it says: C libraries since 2016 ask the other way first.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator

from sandgate_agent import kernel

__all__ = ["close_hypervisor", "filter_program"]

_FAMILY = 40
# linux/audit.h: the kinds of system calls of a processor.
_X86_64, _I386, _AARCH64, _ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
#: Number of the call `socket` for each kind.
_SOCKET = {_X86_64: 41, _I386: 359, _AARCH64: 198, _ARM: 281}
#: And of `socketcall`, whose first argument 1 means `socket`.
_SOCKETCALL = {_I386: 102}
_MEANS_SOCKET = 1
#: What x32 programs set in the numbers of the processor's own calls.
_X32 = 0x40000000
# linux/seccomp.h: places in `struct seccomp_data`; of an argument the lower half, as all these are little-endian.
_NUMBER, _KIND, _FIRST = 0, 4, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
# linux/bpf_common.h
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06

_Instruction = tuple[int, int, int, int]


def close_hypervisor() -> None:
    """For this process and all that it starts. Raises OSError with EACCES where it may still gain privileges."""
    kernel.set_call_filter(filter_program())


def filter_program() -> bytes:
    """An array of `struct sock_filter`."""
    return b"".join(struct.pack("=HBBI", *each) for each in _instructions())


def _instructions() -> Iterator[_Instruction]:
    for kind, number in _SOCKET.items():
        calls = [*_refuse(number, _FAMILY, errno.EAFNOSUPPORT)]
        if kind in _SOCKETCALL:
            calls += _refuse(_SOCKETCALL[kind], _MEANS_SOCKET, errno.ENOSYS)
        body = [*calls, (_RETURN, 0, 0, _ALLOW)]
        yield _LOAD, 0, 0, _KIND
        yield _IF_EQUAL, 0, len(body), kind
        yield from body
    yield _RETURN, 0, 0, _ALLOW


def _refuse(number: int, first: int, error: int) -> Iterator[_Instruction]:
    """Fail the call of a number with a first argument; else go on behind."""
    yield _LOAD, 0, 0, _NUMBER
    yield _AND, 0, 0, ~_X32 & 0xFFFFFFFF
    yield _IF_EQUAL, 0, 3, number
    yield _LOAD, 0, 0, _FIRST
    yield _IF_EQUAL, 0, 1, first
    yield _RETURN, 0, 0, _FAIL_WITH | error
