"""Processes that are certainly the ones meant: a pid together with its start time, and signals through pidfds.

A pid alone may belong to somebody else by the time it is used: boxes outlive the core, so their pids are read back
from disk after any length of time. The start time (proc(5), ``/proc/<pid>/stat``, field 22) is compared *after* the
pidfd is open; from then on the descriptor means this process and no other.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandgate_errors import Unavailable

__all__ = [
    "ProcessId",
    "boot_id",
    "descendants",
    "end",
    "end_all",
    "is_stopped",
    "marked_by",
    "names_itself",
    "tree",
    "was_given",
]

# How long the kernel may take to clear away a process that got SIGKILL; only uninterruptible I/O takes longer.
END_LIMIT_SECONDS = 20.0
# A pass finds what was forked since the previous one. With everything found stopped, more than a few passes are rare.
MAX_PASSES = 1000


@dataclass(frozen=True)
class ProcessId:
    """One process, now and later."""

    pid: int
    #: Clock ticks between boot and start.
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None when there is none, or only its unreaped rest."""
        stat = _stat(pid)
        return None if stat is None or stat.dead else cls(pid, stat.start)

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def is_there(self) -> bool:
        """Whether its number is still its own, alive or not."""
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int | None]:
        """A pidfd of exactly this process, or of what is left of it; None when that is gone too."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield descriptor if self.is_there() else None
        finally:
            os.close(descriptor)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended. Raises Unavailable when it may not be sent."""
        with self.pinned() as descriptor, contextlib.suppress(ProcessLookupError):
            if descriptor is not None:
                try:
                    signal.pidfd_send_signal(descriptor, number)
                except PermissionError:
                    raise Unavailable("a process of the sandbox belongs to another user and cannot be ended") from None

    def wait_gone(self, deadline: float) -> bool:
        """Wait for the end (an unreaped rest counts as ended) until ``deadline`` of the monotonic clock."""
        with self.pinned() as descriptor:
            if descriptor is None:
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


@dataclass(frozen=True)
class _Stat:
    parent: int
    start: int
    dead: bool


def _stat(pid: int) -> _Stat | None:
    try:
        # Not by Path: a walk reads this of every process of the machine, and most of its time would go into objects.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, also parentheses: what follows the last one is plain.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(parent=int(fields[1]), start=int(fields[19]), dead=fields[0] in b"ZX")


def boot_id() -> str:
    """Which boot of the machine this is: no pid of another one means anything."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def names_itself(mark: str) -> Callable[[int], bool]:
    """A test for processes whose first argument is ``mark``."""
    start = mark.encode() + b"\0"
    return lambda pid: _read(pid, "cmdline").startswith(start)


def was_given(variable: str) -> Callable[[int], bool]:
    """A test for processes that were started with ``variable`` (``NAME=value``) in their environment."""
    wanted = variable.encode()
    return lambda pid: wanted in _read(pid, "environ").split(b"\0")


def _read(pid: int, file: str) -> bytes:
    # Other users' processes and ended ones read as empty: neither is ours.
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def marked_by(test: Callable[[int], bool]) -> set[ProcessId]:
    """Every living process that passes ``test``, this one left out."""
    found = (ProcessId.of(pid) for pid in _all_pids() if pid != os.getpid() and test(pid))
    return {process for process in found if process is not None}


def descendants(roots: Iterable[ProcessId]) -> set[ProcessId]:
    """The living processes of ``roots`` and everything below them."""
    return {process for process, stat in _below(roots).items() if not stat.dead}


def tree(roots: Iterable[ProcessId]) -> list[ProcessId]:
    """The same, parents first, and the dead too: one may only look so because its first thread ended before others.

    And one that nobody has reaped yet tells that there was something an earlier walk did not see.
    """
    return list(_below(roots))


def _below(roots: Iterable[ProcessId]) -> dict[ProcessId, _Stat]:
    """Parents first. The dead are among them: they are passed through, for they may still have children for a moment."""
    stats = {pid: stat for pid in _all_pids() if (stat := _stat(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    pending = [root.pid for root in roots if root.pid in stats and stats[root.pid].start == root.start]
    found: dict[ProcessId, _Stat] = {}
    for pid in pending:
        process = ProcessId(pid, stats[pid].start)
        if process not in found:
            found[process] = stats[pid]
            pending.extend(children.get(pid, ()))
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def is_stopped(process: ProcessId) -> bool:
    """Whether no thread of it runs: stopped by a signal, held by a tracer, or ended."""
    return not process.is_there() or all(_state_of(process.pid, task) in b"TtZX" for task in _tasks(process.pid))


def _state_of(pid: int, task: str) -> bytes:
    text = _read(pid, f"task/{task}/stat")
    return text[text.rindex(b")") + 2 :][:1] if text else b"X"


def end(process: ProcessId) -> None:
    """Kill one process and wait until it is gone; blocks. Raises Unavailable when it does not go."""
    process.signal(signal.SIGKILL)
    _wait_all({process}, time.monotonic() + END_LIMIT_SECONDS)


def end_all(find: Callable[[], set[ProcessId]], *, last: ProcessId | None = None) -> None:
    """Stop, then kill whatever ``find`` finds, until it finds nothing; blocks.

    Stopped first: a process that forks as fast as it is killed would otherwise always be one ahead. ``last`` is stopped
    with the others, as it may fork too, but killed after them: it adopts their orphans and so keeps them findable.

    Raises Unavailable when something is still there after the limit.
    """
    deadline = time.monotonic() + END_LIMIT_SECONDS
    stopped: set[ProcessId] = set()
    for _ in range(MAX_PASSES):
        found = find()
        if new := found - stopped:
            for process in new:
                process.signal(signal.SIGSTOP)
            stopped |= new
        elif others := found - {last}:
            for process in others:
                process.signal(signal.SIGKILL)
            _wait_all(others, deadline)
        else:
            break
    else:
        raise Unavailable("the sandbox starts processes faster than they can be ended")
    if last is not None:
        end(last)


def _wait_all(processes: set[ProcessId], deadline: float) -> None:
    if not all(process.wait_gone(deadline) for process in processes):
        raise Unavailable("a process of the sandbox does not end")
