"""The tree: list, make, move, remove (behaviour.md 7.3, 7.4). Blocking; runs in threads.

Operations have the agent's rights (F1); the acting user only owns what is made. Code in the sandbox may change the tree
at the same time, so what was made is opened and owned through its descriptor, never again through its path.
"""

from __future__ import annotations

import errno
import itertools
import operator
import os
import stat
from collections.abc import Callable, Iterator

from sandgate_agent.accounts import OwnerNames
from sandgate_agent.entries import Entry, describe, entry_at
from sandgate_agent.faults import file_error, missing
from sandgate_errors import AlreadyExists, Internal, InvalidArgument, ResourceExhausted

__all__ = ["Owner", "list_directory", "make_directory", "make_parents", "move", "remove", "stat_entry"]

#: uid and gid of the acting user; None where files keep the agent's.
Owner = tuple[int, int] | None

#: About 100 MB of entries: a tree that code in the sandbox made to be endless must not take the agent down.
_MOST_ENTRIES = 250_000
#: Directories held open while removing; deeper ones are moved up first.
_DEEPEST_OPEN = 64

_PARENT_IS_FILE = "a parent of path '{path}' is not a directory"


def stat_entry(path: str, names: OwnerNames) -> Entry:
    try:
        return entry_at(path, names)
    except OSError as error:
        raise file_error(error, path) from None


def list_directory(path: str, depth: int, names: OwnerNames, *, cancelled: Callable[[], bool]) -> list[Entry]:
    """Entries below ``path``, each directory's directly before its content, names in the order of their bytes (F19).

    ``cancelled`` is asked at every directory; the result then does not matter.
    """
    root = os.fsencode(path)
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise InvalidArgument(f"path '{path}' is not a directory")
        levels = [_scan(root)]
    except OSError as error:
        raise file_error(error, path) from None
    found: list[Entry] = []
    while levels and not cancelled():
        for item in levels[-1]:
            info = _lstat(item)
            if info is None:
                continue
            found.append(describe(item.path, item.name, info, names))
            if len(found) > _MOST_ENTRIES:
                raise ResourceExhausted(f"more than {_MOST_ENTRIES} entries below path '{path}'", should_retry=False)
            if len(levels) < depth and stat.S_ISDIR(info.st_mode):
                levels.append(_scan_below(item.path))
                break
        else:
            levels.pop()
    return found


def _scan(path: bytes) -> Iterator[os.DirEntry[bytes]]:
    with os.scandir(path) as entries:
        return iter(sorted(entries, key=operator.attrgetter("name")))


def _scan_below(path: bytes) -> Iterator[os.DirEntry[bytes]]:
    try:
        return _scan(path)
    except OSError:
        # Vanished, replaced or closed to the agent since its parent was read: it is listed, its content is not.
        return iter(())


def _lstat(entry: os.DirEntry[bytes]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def make_directory(path: str, owner: Owner, names: OwnerNames) -> Entry:
    """Make a directory and its parents; raises AlreadyExists when it is there (F26)."""
    made = _make_tree(path, owner)
    if not made:
        raise AlreadyExists(f"directory '{path}' already exists")
    return stat_entry(path, names)


def make_parents(path: str, owner: Owner) -> None:
    """Make what is missing above ``path``."""
    parent = os.path.dirname(path)
    try:
        _make_tree(parent, owner)
    except InvalidArgument:
        if not os.path.exists(parent):
            raise
        raise Internal(_PARENT_IS_FILE.format(path=path)) from None


def _make_tree(path: str, owner: Owner) -> bool:
    """True when the last directory was made by this call."""
    try:
        current, names = _deepest_existing(path)
        made = False
        try:
            for name in names:
                child, made = _make_child(current, name, owner)
                os.close(current)
                current = child
        finally:
            os.close(current)
    except NotADirectoryError:
        if _is_there(path):
            raise InvalidArgument(f"path '{path}' is not a directory") from None
        raise Internal(_PARENT_IS_FILE.format(path=path)) from None
    except FileNotFoundError:
        # Only a link that leads nowhere, or somebody who removes at the same time, makes a made directory missing.
        raise Internal(f"path '{path}' leads through a broken link or was removed meanwhile") from None
    except OSError as error:
        raise file_error(error, path) from None
    return made


def _deepest_existing(path: str) -> tuple[int, list[str]]:
    below: list[str] = []
    while True:
        try:
            return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), below
        except FileNotFoundError:
            if path == "/":
                raise
            path, name = os.path.split(path)
            below.insert(0, name)


def _make_child(parent: int, name: str, owner: Owner) -> tuple[int, bool]:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        # Another call was faster (D32).
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent), False
    # Never through a link: the owner would be given to whatever it points to.
    child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if owner is not None:
            os.fchown(child, *owner)
    except BaseException:
        os.close(child)
        raise
    return child, True


def _is_there(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def move(source: str, destination: str, owner: Owner, names: OwnerNames) -> Entry:
    """Rename, over an existing file too; the destination's parents are made (F28-F32)."""
    try:
        os.lstat(source)
    except OSError as error:
        raise file_error(error, source) from None
    if destination.startswith(source.rstrip("/") + "/"):
        raise Internal(f"path '{source}' cannot be moved into itself")
    make_parents(destination, owner)
    try:
        os.rename(source, destination)
    except FileNotFoundError:
        raise missing(source) from None
    except OSError as error:
        raise _move_error(error, source, destination) from None
    return stat_entry(destination, names)


def _move_error(error: OSError, source: str, destination: str) -> Exception:
    reasons = {
        errno.EXDEV: "it is on another file system",
        errno.ENOTEMPTY: "the destination is a directory that is not empty",
        errno.EEXIST: "the destination is a directory that is not empty",
        errno.EISDIR: "the destination is a directory",
        errno.ENOTDIR: "the destination is not a directory",
        errno.EINVAL: "it would be moved into itself",
    }
    reason = reasons.get(error.errno or 0)
    if reason is None:
        return file_error(error, source)
    return Internal(f"path '{source}' cannot be moved to '{destination}': {reason}")


def remove(path: str) -> None:
    """Delete, recursively; a link is deleted itself; nothing there is success (F33)."""
    if path == "/":
        raise InvalidArgument("the root directory cannot be removed")
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _remove_tree(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise file_error(error, path) from None


def _remove_tree(path: str) -> None:
    """By descriptors, so that no link that appears meanwhile leads out of the tree; without recursion, so that no depth
    is too deep.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(top: int) -> None:
    spare_names = (f".removed-{os.urandom(8).hex()}-{number}" for number in itertools.count())
    levels: list[tuple[int, str]] = [(top, "")]
    try:
        while levels:
            current = levels[-1][0]
            below = _delete_files(current)
            if below is None:
                fd, name = levels.pop()
                if levels:
                    os.close(fd)
                    _ignore_missing(os.rmdir, name, levels[-1][0])
            elif len(levels) < _DEEPEST_OPEN:
                if (child := _open_child(below, current)) is not None:
                    levels.append((child, below))
            else:
                # Its turn comes again as a child of the top.
                os.rename(below, next(spare_names), src_dir_fd=current, dst_dir_fd=top)
    finally:
        for fd, _ in levels[1:]:
            os.close(fd)


def _delete_files(folder: int) -> str | None:
    """Delete all but directories; the name of one directory that is left, or None when the folder is empty."""
    while True:
        seen = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    return entry.name
                _ignore_missing(os.unlink, entry.name, folder)
        if seen == 0:
            return None


def _open_child(name: str, parent: int) -> int | None:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError, OSError) as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            # Somebody else removed or replaced it; the next look decides.
            return None
        raise


def _ignore_missing(action: Callable[..., None], name: str, folder: int) -> None:
    try:
        action(name, dir_fd=folder)
    except FileNotFoundError:
        pass
