"""What the client's calls return: plain frozen records, the same for sync and async."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

__all__ = [
    "CommandResult",
    "EntryInfo",
    "FileType",
    "Output",
    "OutputText",
    "ProcessInfo",
    "ProcessKind",
    "PtySize",
    "SandboxInfo",
    "SandboxState",
]


class Output(NamedTuple):
    """One piece of output as it was written; exactly one of the three is not None."""

    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class OutputText(NamedTuple):
    """One piece of output as text (a terminal's as bytes, since programs there write more than text)."""

    stdout: str | None = None
    stderr: str | None = None
    pty: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a command ended that ended well; otherwise CommandExitException carries the same."""

    stdout: str
    stderr: str
    exit_code: int
    #: Earlier output was left out for ``max_output_bytes``.
    truncated: bool
    #: None on success.
    error: str | None = None


class ProcessKind(enum.Enum):
    """What a process was started as."""

    COMMAND = "command"
    TERMINAL = "terminal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """A live process that was started through the agent. ``envs`` and ``cwd`` are those that its caller asked for."""

    pid: int
    cmd: str
    args: Sequence[str]
    envs: Mapping[str, str] = field(repr=False)
    cwd: str | None
    tag: str | None
    kind: ProcessKind


@dataclass(frozen=True, kw_only=True)
class PtySize:
    """Size of a terminal in characters, each 1 to 65535."""

    rows: int = 24
    cols: int = 80


class SandboxState(enum.Enum):
    """What a client may see."""

    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class SandboxInfo:
    """One sandbox. Times are in UTC."""

    sandbox_id: str
    template_id: str
    backend: str
    state: SandboxState
    started_at: datetime
    end_at: datetime
    metadata: Mapping[str, str]
    cpu_count: int
    memory_mb: int


class FileType(enum.Enum):
    """What a path is; a link that leads somewhere has the type of its target."""

    FILE = "file"
    DIRECTORY = "dir"
    SYMLINK = "symlink"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """A file or directory. ``size`` is in bytes, ``mode`` holds the permission bits."""

    name: str
    path: str
    type: FileType
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_at: datetime
    symlink_target: str | None
