"""The program that becomes the agent of an OpenSandbox sandbox: furnishes the image, opens the door, then is the agent.

The backend has its file of settings written by the sandbox's execd, readable by root only, and starts this as the bundle's
``__main__`` with the file's path. It is removed as soon as it is read: the tokens in it are then in this process's memory and
nowhere else in the sandbox. Fields: ``agent``, the agent's own settings; ``door``, port and token of the way to it
(``sandgate_agent.doorway``); ``acting`` and ``workdir`` of the template.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

from sandgate_agent.doorway import Door, run_beside
from sandgate_agent.furnishing import furnish

__all__: list[str] = []


def main() -> int:
    """The exit status."""
    try:
        settings = _settings(sys.argv[1])
        agent = settings["agent"]
        socket = agent["listen"].removeprefix("unix:")
        _private_folder(os.path.dirname(socket))
        furnish({}, acting=settings["acting"], workdir=settings["workdir"])
        _give_line(agent)
        # Before the agent loads what must never be forked.
        run_beside(Door(port=settings["door"]["port"], token=settings["door"]["token"], agent=socket))
    except (OSError, ValueError, KeyError, IndexError) as error:
        os.write(1, json.dumps({"ready": False, "error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return 1
    del sys.argv[1:]
    from sandgate_agent.__main__ import main as run_agent

    return run_agent()


def _settings(path: str) -> Mapping[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        os.unlink(path)
        about = os.fstat(file.fileno())
        if about.st_uid != 0 or stat.S_IMODE(about.st_mode) & 0o077:
            raise ValueError("the settings can be read by others than root")
        settings: Mapping[str, Any] = json.loads(file.read())
        return settings


def _private_folder(path: str) -> None:
    """For the agent's socket. One that an earlier agent has left in files that were kept makes room."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        os.unlink(f"{path}/{name}")


def _give_line(agent: Mapping[str, object]) -> None:
    """The agent reads its settings from standard input, from whoever starts it."""
    descriptor = os.memfd_create("settings")
    os.write(descriptor, json.dumps(agent).encode() + b"\n")
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
