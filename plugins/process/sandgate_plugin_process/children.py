"""The backend's own children, reaped when they end.

Sandboxes outlive the core; while it lives it is the parent of their first processes and must collect them. Not by
asyncio's child watcher: on Python 3.11 that keeps one thread for every process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess

__all__ = ["Children"]


class Children:
    """Owns the processes it was given until they end or it is closed."""

    def __init__(self) -> None:
        self._pidfds: dict[int, subprocess.Popen[bytes]] = {}

    def adopt(self, popen: subprocess.Popen[bytes]) -> None:
        """Reap this process when it ends. From the event loop's thread only."""
        pidfd = os.pidfd_open(popen.pid)
        self._pidfds[pidfd] = popen
        asyncio.get_running_loop().add_reader(pidfd, self._reap, pidfd)

    def close(self) -> None:
        """Let go of those that live: they are meant to."""
        for pidfd, popen in list(self._pidfds.items()):
            self._forget(pidfd)
            if popen.poll() is None:
                # Popen would otherwise warn, when collected, that a process is left running.
                popen.returncode = 0

    def _reap(self, pidfd: int) -> None:
        if self._pidfds[pidfd].poll() is not None:
            self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        del self._pidfds[pidfd]
