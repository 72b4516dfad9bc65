"""Removing a folder in which hostile code has lived.

``shutil.rmtree`` recurses and holds one descriptor per level, so a deep enough chain of directories defeats it; and an
unprivileged gateway cannot look into a directory that its owner has closed. Here every directory found is first moved
up beside the others, so paths never grow, and opened to its owner where that is needed. Symbolic links are removed,
never followed: every step is relative to a directory descriptor.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["remove_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path) -> None:
    """Remove ``folder`` with all it holds; a missing one is fine, an interrupted removal is taken up again.

    Blocks. Nothing may change the folder meanwhile: whatever lived in it has ended.
    """
    # Unguessable: a name the content already has would be taken for a moved directory.
    fresh = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
    try:
        with _opened(os.fspath(folder)) as top:
            pending = _unlink_files(top)
            while pending:
                name = pending.pop()
                with _opened(name, top) as current:
                    for child in _unlink_files(current):
                        moved = next(fresh).encode()
                        _move(child, current, moved, top)
                        pending.append(moved)
                os.rmdir(name, dir_fd=top)
    except FileNotFoundError:
        return
    os.rmdir(folder)


def _unlink_files(directory: int) -> list[bytes]:
    """Unlink all but directories; the names of those."""
    with os.scandir(directory) as entries:
        found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in found if is_directory]


@contextmanager
def _opened(name: str | bytes, parent: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        _unlock(name, parent)
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        if os.geteuid() != 0:
            os.fchmod(descriptor, stat.S_IRWXU)
        yield descriptor
    finally:
        os.close(descriptor)


def _move(name: bytes, source: int, moved: bytes, destination: int) -> None:
    try:
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=destination)
    except PermissionError:
        # Moving a directory rewrites its "..", which needs write permission on the directory itself.
        _unlock(name, source)
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=destination)


def _unlock(name: str | bytes, parent: int | None) -> None:
    os.chmod(name, stat.S_IRWXU, dir_fd=parent)
