"""The runtime directory: where the gateway's unix sockets are.

A socket's path has room for 107 bytes, and a state directory may lie deep. ``<state>/run`` is therefore a folder where
that is short enough, else a link to a short private folder. The link is the memory: sandboxes outlive the gateway, so the
place must not move with ``XDG_RUNTIME_DIR``, which a login has and a service has not; and the command line finds the core
through it. The short folder may lie in ``/tmp``, where anybody may have been first: it is used only when it is ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["CORE_SOCKET", "core_socket", "opened"]

CORE_SOCKET = "core.sock"

#: Bytes of a socket's path, without the closing NUL.
_SOCKET_PATH = 107
#: What must fit behind the runtime directory: a backend's folder, a sandbox's, the socket.
_ROOM = len("/backends/opensandbox") + len("/" + "i" * 21) + len("/agent.sock.files")
_LINK = "run"


def core_socket(state_dir: Path) -> Path:
    """Where the core of the gateway of this state directory listens, whether one runs or not."""
    return Path(os.path.realpath(state_dir / _LINK)) / CORE_SOCKET


@contextlib.contextmanager
def opened(state_dir: Path) -> Iterator[Path]:
    """The runtime directory, made if need be, and taken away at the end if nothing is in it. Needs the lock."""
    link = state_dir / _LINK
    folder = _place(link)
    _make_private(folder)
    if folder != link and not link.is_symlink():
        link.symlink_to(folder)
    try:
        yield folder
    finally:
        _tidy(folder)
        if folder != link and not folder.exists():
            link.unlink(missing_ok=True)


def _place(link: Path) -> Path:
    if link.is_symlink():
        target = Path(os.readlink(link))
        if target.parent.is_dir():
            return target
        # A login's folder, gone with the login or the boot, and every socket in it.
        link.unlink()
    if _fits(link):
        return link
    if link.is_dir() and any(link.iterdir()):
        raise FailedPrecondition(f"{link} holds sockets and its path has become too long: move the directory back")
    return _short(link)


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + _ROOM <= _SOCKET_PATH


def _short(link: Path) -> Path:
    mark = hashlib.sha256(os.fsencode(link)).hexdigest()[:12]
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and _ours(Path(base)) and _fits(folder := Path(base) / f"sandgate-{mark}"):
        return folder
    return Path("/tmp") / f"sandgate-{os.geteuid()}-{mark}"  # noqa: S108 - verified to be ours before use


def _ours(folder: Path) -> bool:
    # After sudo the variable may still name another user's folder.
    return folder.is_dir() and folder.stat().st_uid == os.geteuid()


def _make_private(folder: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # lstat: a link planted by somebody else must not be followed.
        info = folder.lstat()
    except OSError as error:
        raise FailedPrecondition(f"runtime directory {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise FailedPrecondition(f"runtime directory {folder} was made by somebody else: remove it")
    if info.st_mode & 0o077:
        raise FailedPrecondition(f"runtime directory {folder} is open to other users: chmod 700 {folder}")


def _tidy(folder: Path) -> None:
    """Remove the core's socket, which a killed core leaves, and every folder in which nothing is left."""
    with contextlib.suppress(OSError):
        (folder / CORE_SOCKET).unlink(missing_ok=True)
    for where, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(where)
