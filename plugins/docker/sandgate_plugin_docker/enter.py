"""The first program of a container: finds out who it is, furnishes the image, then becomes the agent.

The backend starts it as the bundle's ``__main__`` with one of:

``meet PATH``
    The socket PATH, in a read-only mount, leads to the backend. It hands over the folder for the agent's socket as a
    descriptor: the folder has no path in the container, so nothing in it can ever reach or replace what is there.
(nothing)
    Standard input and output are the backend's, by way of the engine.

Then comes one line of JSON: ``agent`` is the agent's own settings, ``account`` says which ids the account
``user`` is to have, ``acting`` who acts where a call names nobody, ``workdir`` where commands start.

Runs as root of the container before anything of the sandbox's user, with nothing but the standard library. What it
writes lands in the container's own layer; the image stays as it is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Mapping

from sandgate_agent.furnishing import SHELL, accounts_with_user, furnish, profile_around

__all__ = ["SHELL", "accounts_with_user", "profile_around"]

#: Where the agent's settings say that the folder is.
_FOLDER = 3
_LONGEST_LINE = 1024 * 1024


def main() -> int:
    """The exit status."""
    try:
        if sys.argv[1:2] == ["meet"]:
            _meet(sys.argv[2])
        settings = json.loads(_line(0))
        furnish(settings["account"], acting=settings["acting"], workdir=settings["workdir"])
        _give_line(settings["agent"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        os.write(1, json.dumps({"ready": False, "error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return 1
    del sys.argv[1:]
    from sandgate_agent.__main__ import main as run_agent

    return run_agent()


def _meet(path: str) -> None:
    """Take the folder's descriptor, and the backend's socket as standard input and output."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as backend:
        backend.connect(path)
        # One byte, so that nothing of the line is read with it.
        _, folders, _, _ = socket.recv_fds(backend, 1, 1)
        if len(folders) != 1:
            raise OSError(errno.EPROTO, "the backend handed over no folder")
        # Out of the way first: the socket may have the number that the folder is to get.
        folder = fcntl.fcntl(folders[0], fcntl.F_DUPFD_CLOEXEC, _FOLDER + 1)
        os.close(folders[0])
        os.dup2(backend.fileno(), 0)
        os.dup2(backend.fileno(), 1)
    os.dup2(folder, _FOLDER, inheritable=False)
    os.close(folder)


def _line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece or len(line) > _LONGEST_LINE:
            raise ValueError("no settings came")
        line += piece
    return line


def _give_line(agent: Mapping[str, object]) -> None:
    """The agent reads its settings from standard input, from whoever starts it."""
    descriptor = os.memfd_create("settings")
    os.write(descriptor, json.dumps(agent).encode() + b"\n")
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
