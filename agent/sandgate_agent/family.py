"""The family of a command: every process that belongs to it, as far as the kernel lets us know (behaviour.md 15.2, trap B03).

A group is not enough. A server that a shell puts into the background may lead a group or a session of its own and lose its
parent, and would live on, with its port, where no list shows it. A process belongs to a command when one of these holds:

* it is the command, or of its group, or of the session that it leads (a terminal's);
* it bears the command's *mark*;
* it descends from such a process.

The mark is the timer slack (prctl(2), PR_SET_TIMERSLACK): of all that a process inherits over fork and exec, for good and
from parents long dead, it is what programs neither see nor change, as they do a variable or a descriptor. Commands differ
in it by nanoseconds. Reading it takes CAP_SYS_NICE over the process; where that is missing (proc(5)), the other two remain.

Only descendants of the root spawner are looked at, which are all that was started here and nothing else, whatever other
processes of this machine look like. Everything blocks, for as long as reading /proc takes: called in threads. OSError is
raised when it cannot be known who belongs to the family: this process is out of descriptors or memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MARKS", "Family", "mark_of"]

#: What marks are drawn from, in nanoseconds. They begin above the usual slack and end before timers become noticeably late.
MARKS = range(50_001, 50_001 + (1 << 18))
#: How long a family that keeps forking is hunted; and how often is looked whether what got SIGKILL is gone.
_HUNT_SECONDS = 1.5
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class _Relative:
    """A process, named so that no other can be meant: numbers come round again, the time of the start does not."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    """What /proc says about a process."""

    who: _Relative
    parent: int
    group: int
    session: int
    dead: bool


class Family:
    """One command's processes, or with ``group_only`` those of its process group. ``root`` is the root spawner's pid."""

    def __init__(self, *, root: int, pid: int, mark: int, group_only: bool) -> None:
        self._root = root
        self._pid = pid
        self.mark = mark
        self._group_only = group_only
        #: The command itself, once seen. Whatever else has its number later has taken it over.
        self._leader: _Relative | None = None
        self.leader_reaped = False

    def signal(self, number: int) -> None:
        """Send to all. Raises PermissionError when the command itself may not be signalled."""
        self._send(self._living(), number)

    def end(self) -> None:
        """Freeze all, then kill all: what is frozen cannot fork away (X6). Returns when nothing is left, or gives up.

        Raises PermissionError when the command itself may not be signalled.
        """
        give_up = time.monotonic() + _HUNT_SECONDS
        frozen: set[_Relative] = set()
        while (found := self._living() - frozen) and time.monotonic() < give_up:
            self._send(found, signal.SIGSTOP)
            frozen |= found
        # What was found first may have lost its place in the family by the death of its parent.
        self._send(frozen, signal.SIGKILL)
        while (left := self._living()) and time.monotonic() < give_up:
            self._send(left, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)

    def alive(self) -> bool:
        """Whether any of it still runs."""
        return bool(self._living())

    def _send(self, relatives: Iterable[_Relative], number: int) -> None:
        refused = False
        for relative in relatives:
            try:
                _signal(relative, number)
            except PermissionError:
                refused = refused or relative == self._leader
        if refused:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def _living(self) -> set[_Relative]:
        everybody = {stat.who.pid: stat for stat in _processes()}
        below = _below({self._root}, everybody)
        if self._pid in below:
            self._meet(everybody[self._pid].who)
        ours = {pid for pid in below if self._belongs(everybody[pid])}
        if not self._group_only:
            ours |= _below(ours, everybody)
        return {everybody[pid].who for pid in ours if not everybody[pid].dead}

    def _meet(self, who: _Relative) -> None:
        if self._leader is None and not self.leader_reaped:
            self._leader = who

    def _belongs(self, stat: _Stat) -> bool:
        if stat.who.pid == self._pid:
            return stat.who == self._leader
        # No process gets a number that a group or session still goes by, so these are the command's.
        if stat.group == self._pid:
            return True
        return not self._group_only and (stat.session == self._pid or self._is_marked(stat.who))

    def _is_marked(self, who: _Relative) -> bool:
        # What is older than the command bears the mark of one long ago: marks come round again too.
        older = self._leader is not None and who.started < self._leader.started
        return not older and mark_of(who.pid) == self.mark


def _below(roots: set[int], everybody: Mapping[int, _Stat]) -> set[int]:
    """All descendants of ``roots``."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, stat in everybody.items():
        children[stat.parent].append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children[waiting.pop()]:
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _processes() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            yield stat


def _stat(pid: int) -> _Stat | None:
    content = _read(f"/proc/{pid}/stat")
    # The name stands in parentheses and may hold any.
    fields = content.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    state, parent, group, session = fields[:4]
    return _Stat(
        who=_Relative(pid, int(fields[19])),
        parent=int(parent),
        group=int(group),
        session=int(session),
        dead=state in {b"Z", b"X"},
    )


def mark_of(pid: int) -> int | None:
    """The mark that a process bears; None when it may not be known."""
    content = _read(f"/proc/{pid}/timerslack_ns")
    return int(content) if content.strip().isdigit() else None


def _read(path: str) -> bytes:
    """Empty when the process is gone, or keeps it to itself. Raises OSError when this process is out of something."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _signal(relative: _Relative, number: int) -> None:
    """By pidfd where the kernel has them: between the look and the signal a number can change hands."""
    with contextlib.suppress(ProcessLookupError):
        try:
            pidfd = os.pidfd_open(relative.pid)
        except OSError as error:
            # EPERM: how container runtimes refuse calls that they do not know.
            if error.errno in {errno.ENOSYS, errno.EPERM} and _still(relative):
                os.kill(relative.pid, number)
            return
        try:
            if _still(relative):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _still(relative: _Relative) -> bool:
    stat = _stat(relative.pid)
    return stat is not None and stat.who == relative
