"""A sandbox from outside: its processes on this machine, and whether anything of it is there, whatever backend made it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from sandgate_bundle import MOUNT
from sandgate_testing.engine import docker
from sandgate_testing.leftovers import command_lines, processes_of

__all__ = ["Box", "ContainerBox", "ProcessBox", "descriptors_of"]


class Box(Protocol):
    """Of one sandbox; tells the truth about it also when it is gone."""

    def exists(self) -> bool: ...

    def processes(self) -> dict[int, str]:
        """Command lines by pid."""

    def agent(self) -> int:
        """Pid of the process that answers calls."""


class ProcessBox:
    """A folder of the process backend."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def exists(self) -> bool:
        return self._folder.exists()

    def processes(self) -> dict[int, str]:
        return processes_of(self._folder)

    def agent(self) -> int:
        """The one that holds the socket; the one with most descriptors is the innermost of the starters."""
        listening = [pid for pid in self.processes() if any("socket:" in target for target in descriptors_of(pid))]
        return max(listening, key=lambda pid: len(descriptors_of(pid)))


class ContainerBox:
    """A container of an engine on this machine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = int(docker("inspect", "-f", "{{.State.Pid}}", name).stdout)
        self._namespace = _namespace_of(self._first)

    def exists(self) -> bool:
        return docker("container", "inspect", self._name, check=False).returncode == 0

    def processes(self) -> dict[int, str]:
        return {pid: line for pid, line in command_lines() if _namespace_of(pid) == self._namespace}

    def agent(self) -> int:
        """The first process, or what the first one had started; of those that were forked from it, none holds as much."""
        started = [pid for pid, line in self.processes().items() if MOUNT in line]
        return max(started, key=lambda pid: len(descriptors_of(pid)))


def descriptors_of(pid: int) -> list[str]:
    """What the open descriptors of a process lead to."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found


def _namespace_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
