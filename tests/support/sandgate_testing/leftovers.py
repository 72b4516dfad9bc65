"""What a gateway left on the machine: processes, sockets and sandboxes that still belong to its state directory.

A process belongs to it when its command line, environment or working directory names the directory, or when one of its
mounts comes from there: that is how a process inside a sandbox is found, which knows nothing of the outside.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["command_lines", "groups_of", "processes_of", "remains_of", "sandboxes_of", "thaw"]


def remains_of(state_dir: Path) -> list[str]:
    """One line for each thing that should be gone once a gateway has ended that keeps nothing."""
    return [
        *(f"process {pid}: {command}" for pid, command in processes_of(state_dir).items()),
        *(f"socket {path}" for path in _sockets_below(state_dir)),
        *(f"box {path}" for path in _boxes(state_dir)),
    ]


def processes_of(state_dir: Path) -> dict[int, str]:
    """Command lines of the live processes that belong to ``state_dir``, by pid."""
    marker = str(state_dir).encode()
    return {pid: command for pid, command in command_lines() if any(marker in text for text in _traces(pid))}


def sandboxes_of(state_dir: Path) -> Mapping[str, Path]:
    """Folders of the process backend's boxes by the sandbox each belongs to; those of nobody by their own name."""
    return {_owner(box) or box.name: box for box in _boxes(state_dir)}


def groups_of(state_dir: Path) -> list[Path]:
    """Control groups of the process backend's boxes."""
    named = (_recorded(box, "group") for box in _boxes(state_dir))
    return [path for name in named if name and (path := Path(name)).is_dir()]


def thaw(group: Path) -> None:
    """Let a frozen group's processes go on: by the older kind of freezer they cannot even be killed before."""
    for name, text in (("cgroup.freeze", "0"), ("freezer.state", "THAWED")):
        if (group / name).exists():
            (group / name).write_text(text)


def _boxes(state_dir: Path) -> list[Path]:
    return [path for path in _below(state_dir) if path.parent.name == "boxes" and path.is_dir()]


def _owner(box: Path) -> str:
    return _recorded(box, "sandbox_id")


def _recorded(box: Path, name: str) -> str:
    try:
        value: str | None = json.loads((box / "record.json").read_text()).get(name)
    except FileNotFoundError:
        return ""
    return value or ""


def command_lines() -> Iterator[tuple[int, str]]:
    """Every live process of this machine: pid and command line."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        command = _read(folder / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        # Empty: a zombie, or a thread of the kernel.
        if command:
            yield int(folder.name), command


def _traces(pid: int) -> Iterator[bytes]:
    for name in ("cmdline", "environ", "mountinfo"):
        yield _read(Path("/proc") / str(pid) / name)
    try:
        yield os.readlink(f"/proc/{pid}/cwd").encode()
    except OSError:
        pass


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # Gone meanwhile, or another user's.
        return b""


def _sockets_below(folder: Path) -> list[Path]:
    return [path for path in _below(folder) if stat.S_ISSOCK(path.lstat().st_mode)]


def _below(folder: Path) -> Iterator[Path]:
    """Everything below ``folder`` but what is inside a sandbox's own root, which may be large and oddly named."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink() and path.name != "rootfs":
            yield from _below(path)
