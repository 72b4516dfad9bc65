"""The family of a command: every process that belongs to it, as far as the kernel lets us know (behaviour.md 15.2, trap B03).

A group is not enough. A server that a shell puts into the background may lead a group or a session of its own and lose its
parent, and would live on, with its port, where no list shows it. A process belongs to a command when one of these holds:

* it is the command, or of its group, or of the session that it leads (a terminal's);
* it bears the command's *mark* (:mod:`sandgate_agent.marks`);
* it descends from such a process.

Only descendants of the root spawner are looked at, which are all that was started here and nothing else, whatever other
processes of this machine look like. Reading /proc takes a while, so it is done in a thread, and once for all who ask
meanwhile: a thousand commands may run into their limits in the same moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from sandgate_agent.marks import mark_of

__all__ = ["Families", "Family", "Reaching"]

_Key = TypeVar("_Key")

#: How long families that keep forking are hunted; and how often is looked whether what got SIGKILL is gone.
_HUNT_SECONDS = 1.5
_LOOK_SECONDS = 0.002
#: How long, and how often at least, one more look is taken though nothing was found, because processes were being born
#: during the last.
_UNREST_SECONDS = 0.25
_VAIN_LOOKS = 4
#: Of the youngest processes, so many are looked at first.
_CHASED = 32


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


@dataclass(eq=False, kw_only=True)
class Family:
    """One command's processes, or with ``group_only`` those of its process group."""

    pid: int
    mark: int
    group_only: bool
    #: The command itself, once seen. Whatever else has its number later has taken it over.
    leader: _Relative | None = None
    leader_reaped: bool = False


class Reaching(Protocol):
    """Whom the signals of a command reach: here, or wherever else its processes are."""

    async def signal(self, family: Family, number: int) -> None:
        """Send to all of it."""

    async def end(self, family: Family) -> None:
        """SIGKILL to all of it, such that none gets away."""

    async def alive(self, family: Family) -> bool:
        """Whether any of it lives."""


class Families:
    """Looks for families below the root spawner, and signals them; for as many at once as ask.

    Raises OSError when it cannot be known who belongs to a family: this process is out of descriptors or memory.
    Raises PermissionError when the command itself may not be signalled.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        # Its thread is there from the beginning: when a kill is needed most, a sandbox has no room for one more.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="families")
        self._thread.submit(threading.get_ident)
        self._waiting: list[_Errand] = []
        self._busy = False

    async def signal(self, family: Family, number: int) -> None:
        """Send to all of it."""
        await self._ask(_Errand(family, _send(number)))

    async def end(self, family: Family) -> None:
        """Freeze all, then kill all: what is frozen cannot fork away (X6). Returns when nothing is left, or gives up."""
        await self._ask(_Errand(family, None))

    async def alive(self, family: Family) -> bool:
        """Whether any of it still runs."""
        return bool(await self._ask(_Errand(family, lambda _, found: bool(found))))

    async def _ask(self, errand: _Errand) -> bool:
        self._waiting.append(errand)
        self._next()
        return await errand.done

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        errands, self._waiting = self._waiting, []
        run = asyncio.get_running_loop().run_in_executor(self._thread, _run, self._root, errands)
        run.add_done_callback(lambda run: self._done(run, errands))

    def _done(self, run: asyncio.Future[None], errands: Iterable[_Errand]) -> None:
        self._busy = False
        failure = run.exception()
        for errand in errands:
            if not errand.done.done():
                _settle(errand, failure or errand.failure)
        self._next()


@dataclass(eq=False)
class _Errand:
    """What one caller wants: something done with those who are found, or (None) their end."""

    family: Family
    work: Callable[[Family, set[_Relative]], bool] | None
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: bool = False
    failure: BaseException | None = None
    frozen: set[_Relative] = field(default_factory=set)


def _settle(errand: _Errand, failure: BaseException | None) -> None:
    if failure is None:
        errand.done.set_result(errand.answer)
    else:
        errand.done.set_exception(failure)


def _run(root: int, errands: Iterable[_Errand]) -> None:
    """In the thread."""
    snapshot = _Snapshot(root)
    for errand in errands:
        if errand.work is not None:
            try:
                errand.answer = errand.work(errand.family, snapshot.of(errand.family))
            except PermissionError as error:
                errand.failure = error
    _end(root, snapshot, [errand for errand in errands if errand.work is None])


def _end(root: int, snapshot: _Snapshot, errands: list[_Errand]) -> None:
    successful = time.monotonic()
    give_up = successful + _HUNT_SECONDS
    vain = 0
    while (found := _each(errands, snapshot, _freeze)) or snapshot.restless:
        now = time.monotonic()
        successful, vain = (now, 0) if found else (successful, vain + 1)
        # A busy machine may take long for one look.
        if now > give_up or (vain >= _VAIN_LOOKS and now > successful + _UNREST_SECONDS):
            break
        _chase(errands, root)
        snapshot = _Snapshot(root)
    # What was found first may have lost its place in the family by the death of its parent.
    for errand in errands:
        _try(errand, _kill, errand.frozen)
    while errands and time.monotonic() < give_up and _each(errands, _Snapshot(root), _kill):
        time.sleep(_LOOK_SECONDS)


def _chase(errands: Iterable[_Errand], root: int) -> None:
    """Freeze what dies before a look at all has come to it, having had a child: it is among the youngest."""
    wanted = {errand.family.mark: errand for errand in errands if not errand.family.group_only}
    for pid in sorted(_pids(), reverse=True)[:_CHASED]:
        errand = wanted.get(mark_of(pid) or 0)
        if errand is not None and (stat := _stat(pid)) is not None and _is_below(stat, root):
            with contextlib.suppress(PermissionError):
                _freeze(errand, {stat.who})


def _is_below(stat: _Stat, root: int) -> bool:
    ancestor: _Stat | None = stat
    while ancestor is not None and ancestor.parent not in {0, root}:
        ancestor = _stat(ancestor.parent)
    return ancestor is not None and ancestor.parent == root


def _each(errands: Iterable[_Errand], snapshot: _Snapshot, work: Callable[[_Errand, set[_Relative]], bool]) -> bool:
    """Do it for each; whether there was something to do for any."""
    # Not any(): that would stop at the first.
    return sum(_try(errand, work, snapshot.of(errand.family)) for errand in errands) > 0


def _try(errand: _Errand, work: Callable[[_Errand, set[_Relative]], bool], found: set[_Relative]) -> bool:
    try:
        return work(errand, found)
    except PermissionError as error:
        # Hunting what one may not signal leads nowhere.
        errand.failure = error
        return False


def _freeze(errand: _Errand, found: set[_Relative]) -> bool:
    new = found - errand.frozen
    errand.frozen |= new
    _send(signal.SIGSTOP)(errand.family, new)
    return bool(new)


def _kill(errand: _Errand, found: set[_Relative]) -> bool:
    return _send(signal.SIGKILL)(errand.family, found)


def _send(number: int) -> Callable[[Family, set[_Relative]], bool]:
    def send(family: Family, relatives: set[_Relative]) -> bool:
        refused = False
        for relative in relatives:
            try:
                _signal(relative, number)
            except PermissionError:
                refused = refused or relative == family.leader
        if refused:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return bool(relatives)

    return send


class _Snapshot:
    """Everything below the root spawner, as far as one look can tell."""

    def __init__(self, root: int) -> None:
        last = _last_pid()
        everybody = {stat.who.pid: stat for stat in map(_stat, _pids()) if stat is not None}
        #: Whether processes were born meanwhile: then it may be of no moment that ever was.
        self.restless = _last_pid() != last
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, stat in everybody.items():
            self._children[stat.parent].append(pid)
        self._stats = {pid: everybody[pid] for pid in self._below([root])}
        self._groups = _by(self._stats, lambda stat: stat.group)
        self._sessions = _by(self._stats, lambda stat: stat.session)

    @cached_property
    def _marks(self) -> Mapping[int | None, list[int]]:
        return _by(self._stats, lambda stat: mark_of(stat.who.pid))

    def of(self, family: Family) -> set[_Relative]:
        """Who lives of it."""
        self._meet(family)
        # No process gets a number that a group or session still goes by, so these are the command's.
        ours = set(self._groups[family.pid])
        if not family.group_only:
            ours.update(self._sessions[family.pid], self._marked(family))
        if (stat := self._stats.get(family.pid)) is not None:
            # Whoever has the number now; it may have moved to another group.
            (ours.add if stat.who == family.leader else ours.discard)(family.pid)
        if not family.group_only:
            ours.update(self._below(ours))
        return {self._stats[pid].who for pid in ours if not self._stats[pid].dead}

    def _meet(self, family: Family) -> None:
        stat = self._stats.get(family.pid)
        if stat is not None and family.leader is None and not family.leader_reaped:
            family.leader = stat.who

    def _marked(self, family: Family) -> Iterator[int]:
        for pid in self._marks[family.mark]:
            # What is older than the command bears the mark of one long ago: marks come round again too.
            if family.leader is None or self._stats[pid].who.started >= family.leader.started:
                yield pid

    def _below(self, roots: Iterable[int]) -> set[int]:
        """All descendants."""
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            for child in self._children[waiting.pop()]:
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found


def _by(stats: Mapping[int, _Stat], key: Callable[[_Stat], _Key]) -> Mapping[_Key, list[int]]:
    found: defaultdict[_Key, list[int]] = defaultdict(list)
    for pid, stat in stats.items():
        found[key(stat)].append(pid)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _last_pid() -> bytes:
    """The number that was given last in this namespace (proc(5), loadavg)."""
    return _read("/proc/loadavg").rpartition(b" ")[2]


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
