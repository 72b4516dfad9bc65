"""Marks: by what a process is known to belong to a command that it has otherwise nothing to do with any more.

The mark is the limit for locks on files (RLIMIT_LOCKS, setrlimit(2)), which no kernel has heeded since 2.4.25. Of all that a
process inherits over fork and exec, for good and from parents long dead, it is what programs neither look at nor change, as
they do a variable or a descriptor; and everybody may read it (proc(5), /proc/PID/limits), also in a container that has no
privileges over its own processes.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator

__all__ = ["MARKS", "mark_of", "marking"]

#: What marks are drawn from: far above what anybody would set, and not "unlimited".
MARKS = range(1 << 40, (1 << 40) + (1 << 18))
#: Of the generic system call interface; Python has no name for it.
_RLIMIT_LOCKS = 10
_LINE = re.compile(rb"^Max file locks +(\d+) ", re.MULTILINE)


@contextlib.contextmanager
def marking(mark: int) -> Iterator[None]:
    """What this process starts within bears the mark, as it bears it itself meanwhile; 0: none."""
    usual = resource.getrlimit(_RLIMIT_LOCKS)
    if mark:
        # Refused where somebody has limited it: what a command left behind is then not found.
        with contextlib.suppress(ValueError):
            resource.setrlimit(_RLIMIT_LOCKS, (mark, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(_RLIMIT_LOCKS, usual)


def mark_of(pid: int) -> int | None:
    """The mark that a process bears, None when it bears none or is gone. Raises OSError when this process is out of something."""
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            found = _LINE.search(file.read())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    mark = int(found[1]) if found is not None else 0
    return mark if mark in MARKS else None
