"""The state directory as the front sees it: its privacy, its lock, its secret files.

What lies deeper (store, sandboxes) is the core's. One gateway at a time holds the directory: the lock is a ``flock``, so
it goes with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["LOCK", "SEED", "TOKEN", "Held", "check_private", "holder", "locked", "read_private", "secret_of"]

LOCK = "lock"
TOKEN = "internal.token"  # noqa: S105 - a file's name
SEED = "seed"

_SECRET_BYTES = 32


class Held:
    """A state directory that is this process's. Nothing is worth keeping in a new one until :meth:`keep` says so."""

    def __init__(self, *, new: bool) -> None:
        self.new = new

    def keep(self) -> None:
        self.new = False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Held]:
    """Make the directory if need be, and hold it. Raises FailedPrecondition naming who holds it already.

    A gateway that is refused at its first start leaves nothing: what was put into an empty directory goes again, and so
    does one that was made here.
    """
    made = _make_private(folder)
    descriptor = _hold(folder)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        held = Held(new=set(os.listdir(folder)) <= {LOCK})
        try:
            yield held
        finally:
            os.ftruncate(descriptor, 0)
            if held.new:
                _clear(folder, remove=made)
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    """The descriptor that holds the lock."""
    while True:
        # Close-on-exec, so no child keeps the lock alive after the front.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = _holder(descriptor)
            os.close(descriptor)
            raise FailedPrecondition(
                f"state directory {folder} is in use by the gateway with process id {by}: "
                "stop that one, or choose another directory with --state-dir"
            ) from None
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # Its holder has just taken it away with all else.
        os.close(descriptor)


def _clear(folder: Path, *, remove: bool) -> None:
    for path in folder.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    # The lock last: as long as it is there, nobody else begins here.
    (folder / LOCK).unlink(missing_ok=True)
    if remove:
        with contextlib.suppress(OSError):
            folder.rmdir()


def holder(folder: Path) -> str | None:
    """The process id of the gateway that holds a state directory now."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _holder(descriptor: int) -> str:
    # Empty for the instant between the other's lock and its note.
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "(just starting)"


def _make_private(folder: Path) -> bool:
    """Whether it was made just now."""
    made = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            made = True
    except OSError as error:
        raise FailedPrecondition(f"state directory {folder}: {error.strerror}") from error
    check_private(folder)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return made


def check_private(folder: Path) -> None:
    """Raises FailedPrecondition when a directory cannot be a state directory of this user.

    One that is open to others may be closed only if it is plainly meant for us: never one that holds other things, as
    ``/tmp`` does.
    """
    try:
        info = folder.stat()
        names = os.listdir(folder) if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o077 else []
    except OSError as error:
        raise FailedPrecondition(f"state directory {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise FailedPrecondition(f"state directory {folder}: not a directory")
    if info.st_uid != os.geteuid():
        raise FailedPrecondition(f"state directory {folder} belongs to user id {info.st_uid}, not to this one")
    if names and LOCK not in names:
        raise FailedPrecondition(
            f"state directory {folder} is open to other users and holds other files: choose one of its own, "
            f"or close it with: chmod 700 {folder}"
        )


def secret_of(folder: Path, name: str) -> str:
    """The secret in a file of the state directory, in hexadecimal; made at the first start. Call with the lock held."""
    path = folder / name
    if not path.exists():
        _write_whole(path, secrets.token_hex(_SECRET_BYTES))
    text = read_private(path)
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _SECRET_BYTES}}}", text):
        raise FailedPrecondition(f"{path} is damaged: put back a copy of it")
    return text


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all, and never readable by others: a crash in between leaves the old state."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        _sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private(path: Path) -> str:
    """The text of a secret file. Raises FailedPrecondition when it is not this user's alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise FailedPrecondition(f"{path} is not a file of this user")
        if info.st_mode & 0o077:
            raise FailedPrecondition(f"{path} can be read by other users: close it with: chmod 600 {path}")
        return file.read(4096).decode("ascii", "replace").strip()
