"""What programs start with of the system's means: priorities, limits and control groups, whatever the agent has (P6, P7).

Called by the root spawner, whose children inherit all of it, and for terminals in the child that becomes one.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Sequence

__all__ = ["join", "limit_processes", "set_priorities"]

_IO_LEVEL = 4
#: What a login has on Linux; a program may raise it.
_DESCRIPTORS = 1024


def set_priorities() -> None:
    """What programs start with, whatever the agent has (P6). Raising one's own priority may be refused: left as it is."""
    from sandgate_agent import kernel

    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError):
        kernel.set_io_priority(_IO_LEVEL)
    # Whoever started the agent may have raised it for many connections; a program that closes all it could have open
    # would then take seconds for it.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_DESCRIPTORS, most), most))


def limit_processes(count: int) -> None:
    """For each account that programs run as; where it has a user namespace of its own, in there."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    count = count if most == resource.RLIM_INFINITY else min(count, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (count, count))


def join(descriptors: Sequence[int], *, complain: Callable[[str], None]) -> None:
    """Move this process into control groups. Where the kernel refuses, it stays in those of the whole sandbox (P7)."""
    for descriptor in descriptors:
        try:
            os.write(descriptor, b"0")
        except OSError as error:
            complain(f"sandgate spawner {os.getpid()}: cannot move into a control group: {error.strerror}\n")
