"""The duty of a first process: what loses its parent becomes its child, and stays a zombie until it is waited for.

In a container the agent is process 1: nothing inside can kill or stop it, its end ends the container, and no other program
is needed in between. What commands leave behind is the root spawner's, which is a subreaper; here arrive the children of
what an engine started beside the agent (``docker exec``), and everybody's once the root spawner is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal

__all__ = ["reap_as_first_process"]


def reap_as_first_process() -> None:
    """Wait for every child from now on, if this is process 1; the loop owns the handler. The root spawner is one of them:
    its end is known by its socket.
    """
    if os.getpid() == 1:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap)
        # What has ended before the handler was there.
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass
