"""Stopping every process of a box at once, and letting them go on where they were.

Two ways. A control group with a freezer (cgroups(7): ``cgroup.freeze`` of version 2, ``freezer.state`` of version 1) is
better: nobody in the box can tell, and nobody can undo it. A box that was started in its group is all in it, and one write
stops it. Where the gateway may not make groups, SIGSTOP does it, parents before children and the other way round on resume:
no shell that waits for its jobs sees one stopped. Processes that were stopped before stay so.

A box that is not all in a group is walked until two walks in a row find nothing new. Code that forks faster than a walk can
escape that for as long as it wants; its sandbox then cannot be paused, and that is what the caller is told.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandgate_errors import Unavailable
from sandgate_plugin_process.hierarchies import hierarchies
from sandgate_plugin_process.pids import ProcessId, is_stopped

__all__ = ["Group", "go_on", "possible_groups", "remove_group", "stop_all", "stopped_by_themselves"]

_log = logging.getLogger(__name__)

# Uninterruptible I/O delays a stop; a box that takes longer than this is told as busy.
STOP_LIMIT_SECONDS = 10.0
# While code forks on, what it leaves dead is not reaped, since whoever would do that is stopped: thousands of process
# numbers a second, of which the machine has few. So one that cannot be caught soon is let go soon.
_WALK_LIMIT_SECONDS = 2.0
_POLL_SECONDS = 0.002
_EMPTY_LIMIT_SECONDS = 2.0

Members = Callable[[], Sequence[ProcessId]]


class Group:
    """One control group with a freezer; exists from :meth:`make` to :meth:`remove`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Raises OSError where the gateway may not make groups, or this kind has no freezer."""
        self.path.mkdir(exist_ok=True)
        if not (self._has_flag or self._state.exists()):
            self.path.rmdir()
            raise OSError(errno.ENOTSUP, "no freezer", str(self.path))

    def freeze(self) -> None:
        _write(*((self._flag, "1") if self._has_flag else (self._state, "FROZEN")))

    def thaw(self) -> None:
        """Nothing happens where there is no such group."""
        try:
            _write(*((self._flag, "0") if self._has_flag else (self._state, "THAWED")))
        except FileNotFoundError:
            pass

    def add(self, process: ProcessId) -> None:
        """Nothing happens when it has ended."""
        if process.is_there():
            try:
                _write(self.path / "cgroup.procs", str(process.pid))
            except ProcessLookupError:
                pass

    def is_frozen(self) -> bool:
        if self._has_flag:
            return "frozen 1" in (self.path / "cgroup.events").read_text("ascii").splitlines()
        return self._state.read_text("ascii").strip() == "FROZEN"

    def kill(self) -> None:
        """End all in it, also when it is frozen: a version 1 freezer holds SIGKILL back, so they are let go after it."""
        if (self.path / "cgroup.kill").exists():
            _write(self.path / "cgroup.kill", "1")
            return
        try:
            pids = [int(line) for line in (self.path / "cgroup.procs").read_text("ascii").split()]
        except FileNotFoundError:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.thaw()

    def remove(self) -> None:
        """Its processes have ended; the kernel may need a moment more to see that."""
        remove_group(self.path)

    @property
    def _flag(self) -> Path:
        return self.path / "cgroup.freeze"

    @property
    def _state(self) -> Path:
        return self.path / "freezer.state"

    @property
    def _has_flag(self) -> bool:
        return self._flag.exists()


def remove_group(path: Path) -> None:
    """Remove a group and all below it, once its processes have ended; a missing one is fine. Bounded; says what is left."""
    deadline = time.monotonic() + _EMPTY_LIMIT_SECONDS
    while True:
        try:
            for folder in reversed(_with_all_below(path)):
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                _log.warning("the control group %s cannot be removed: %s", path, error)
                return
            time.sleep(_POLL_SECONDS)


def _with_all_below(group: Path) -> list[Path]:
    """Parents first."""
    # The number of links says how many there are; most groups have none, and listing their files takes longer.
    if group.stat().st_nlink <= 2:
        return [group]
    with os.scandir(group) as entries:
        children = [group / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [group, *(below for child in children for below in _with_all_below(child))]


def possible_groups(name: str) -> Iterator[Group]:
    """Where a group of this name could be made, best first: below the gateway's own, so that its limits still hold."""
    able = [found for found in hierarchies() if found.version == 2 or "freezer" in found.controllers]
    for found in sorted(able, key=lambda able: -able.version):
        yield Group(found.place / name)


def stop_all(members: Members, group: Group | None, *, but: frozenset[ProcessId] = frozenset()) -> None:
    """Stop whatever ``members`` finds, top down, until it finds nothing new; blocks.

    By ``group``, which exists and is empty or holds the same box; by signals without one, then leaving ``but`` alone.
    Raises Unavailable when something does not stop in time; what was stopped is then still stopped.
    """
    deadline = time.monotonic() + STOP_LIMIT_SECONDS
    if group is not None:
        group.freeze()
    seen: set[ProcessId] = set(but)
    quiet = 0
    caught_by = time.monotonic() + _WALK_LIMIT_SECONDS
    while quiet < 2:
        if time.monotonic() > caught_by:
            raise Unavailable("the sandbox starts processes faster than they can be stopped")
        found = [process for process in members() if process not in seen]
        for process in found:
            if group is not None:
                group.add(process)
            else:
                process.signal(signal.SIGSTOP)
        seen.update(found)
        quiet = 0 if found else quiet + 1
    while not (group.is_frozen() if group is not None else all(map(is_stopped, seen))):
        if time.monotonic() > deadline:
            raise Unavailable("a process of the sandbox cannot be stopped at the moment")
        time.sleep(_POLL_SECONDS)


def go_on(members: Members, group: Group | None, *, but: frozenset[ProcessId] = frozenset()) -> None:
    """Undo :func:`stop_all`; blocks."""
    if group is not None:
        group.thaw()
        return
    for process in reversed(members()):
        if process not in but:
            process.signal(signal.SIGCONT)


def stopped_by_themselves(members: Members) -> frozenset[ProcessId]:
    """Those that somebody in the box has stopped; to be asked before the box is."""
    return frozenset(process for process in members() if is_stopped(process))


def _write(path: Path, text: str) -> None:
    # In one call, and without creating: a file that is missing means that there is no such group.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
