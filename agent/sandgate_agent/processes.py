"""Processes that were started through the agent: their table and the life of each (behaviour.md 3-6).

Between the service, which speaks protobuf, and the launcher, which has programs started. A process is *live* from its
start to its end event. The end event is due when the program was reaped and its pipes are at their end (O8), or when it
was reaped after a signal or the time limit (O9), or, on a terminal, when it was reaped: what a child writes to the
terminal later has no reader (as with any terminal whose shell is gone). While something is being ended it is not due yet,
so that after the end event nothing of it is left.

How far signals and the time limit reach is a :class:`Reach`; who is reached is for :mod:`sandgate_agent.family` to find.

Start is finished even if its caller leaves half way: otherwise a program could run that no list shows (T8).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import itertools
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sandgate_agent.accounts import Account
from sandgate_agent.countdown import Countdown
from sandgate_agent.family import Families, Family
from sandgate_agent.journal import Journal, Recorder
from sandgate_agent.launcher import Child, Launcher, Program
from sandgate_agent.marks import MARKS
from sandgate_agent.output import Follower, Output, output_pipe
from sandgate_agent.pty import Size, Terminal
from sandgate_agent.retention import Past, Retention, Stream
from sandgate_agent.stdin import Stdin
from sandgate_errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SandgateError,
    Unavailable,
)

__all__ = ["Command", "End", "Ended", "Process", "Processes", "Reach", "Selector"]

log = logging.getLogger(__name__)

MOST_PROCESSES = 1024
#: How long attaching to an ended process still tells its end (A9), and for how many of them.
_RETENTION_SECONDS = 30.0
_MOST_RETAINED = 4096
#: Output of ended processes is kept for replay up to here, the latest first: it is memory of the sandbox.
_MOST_RETAINED_BYTES = 32 * 1024 * 1024
_LONGEST_GRACE = 60.0
#: How often is looked whether all of a command obeyed the SIGTERM at its time limit.
_GRACE_LOOK_SECONDS = 0.05
#: SIGKILL works in microseconds, except on a process that hangs in the kernel: its limit is reported all the same.
_DEATH_SECONDS = 2.0

# As the Go standard library words them, which clients match (O12).
_SIGNAL_TEXTS = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    5: "trace/breakpoint trap",
    6: "aborted",
    7: "bus error",
    8: "floating point exception",
    9: "killed",
    10: "user defined signal 1",
    11: "segmentation fault",
    12: "user defined signal 2",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
    16: "stack fault",
    24: "CPU time limit exceeded",
    25: "file size limit exceeded",
    26: "virtual timer expired",
    27: "profiling timer expired",
    29: "I/O possible",
    30: "power failure",
    31: "bad system call",
}


class Reach(enum.Enum):
    """What signals and the time limit of a command reach (behaviour.md, end of 15.2)."""

    #: The process group, and whatever else of the command the kernel lets us know: the default (B03).
    FAMILY = enum.auto()
    #: The process group alone: what left it lives on (X1, X3, X9).
    GROUP = enum.auto()
    #: The family, and the command is made the subreaper of its descendants so that none can get away (X4-X6).
    TREE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a caller asked to start."""

    cmd: str
    args: Sequence[str] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    #: As asked for; the resolved one is an argument of its own.
    cwd: str | None = None
    tag: str | None = None
    stdin: bool = True
    #: Present: on a terminal.
    size: Size | None = None
    #: Seconds.
    limit: float | None = None
    reach: Reach = Reach.FAMILY
    #: Seconds from SIGTERM to SIGKILL at the limit; 0: SIGKILL at once.
    term_grace: float = 0.0
    #: Whether output waits for a reader (X13).
    strict_output: bool = False

    def check(self) -> None:
        if not self.cmd:
            raise InvalidArgument("cmd is empty")
        if any("\0" in text for text in (self.cmd, *self.args)):
            raise InvalidArgument("cmd and args must not contain a NUL byte")
        for name, value in self.envs.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise InvalidArgument(f"'{name[:100]}' is not a valid variable, or its value contains a NUL byte")
        if self.size is not None:
            self.size.check()
        if not 0 <= self.term_grace <= _LONGEST_GRACE:
            raise InvalidArgument(f"term_grace is not between 0 and {_LONGEST_GRACE:g} s")


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended, as the end event says it (O10-O12)."""

    exit_code: int
    exited: bool
    status: str
    #: The time limit ended it.
    timed_out: bool = False
    #: It was ended because nobody read its output (X13).
    truncated: bool = False

    @property
    def error(self) -> str | None:
        if self.truncated:
            return "output_truncated"
        return None if self.exited and self.exit_code == 0 else self.status

    @classmethod
    def of(cls, status: int | None, *, timed_out: bool = False, truncated: bool = False) -> End:
        """From a wait status; None when it was lost with the process that knew it."""
        code, exited, text = _described(status)
        return cls(exit_code=code, exited=exited, status=text, timed_out=timed_out, truncated=truncated)


def _described(status: int | None) -> tuple[int, bool, str]:
    """Exit code, whether it exited, and the text."""
    if status is None:
        return -1, False, "exit status unknown"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        text = _SIGNAL_TEXTS.get(number, f"signal {number}")
        dumped = " (core dumped)" if os.WCOREDUMP(status) else ""
        return -1, False, f"signal: {text}{dumped}"
    code = os.WEXITSTATUS(status)
    return code, True, f"exit status {code}"


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which process a call is for."""

    pid: int | None = None
    tag: str | None = None

    def missing(self) -> NotFound:
        if self.pid is not None:
            return NotFound(f"process with pid {self.pid} not found")
        return NotFound(f"process with tag '{self.tag}' not found")


class Process:
    """One live process."""

    def __init__(
        self,
        command: Command,
        child: Child,
        *,
        family: Family,
        families: Families,
        sources: Mapping[Stream, int],
        stdin: Stdin | None,
        terminal: Terminal | None,
        on_end: Callable[[Process, End], None],
        recorder: Recorder | None = None,
    ) -> None:
        """``on_end`` is called in the moment of the end: who attaches after it must not find a live process (A8)."""
        self.command = command
        self.pid = child.pid
        #: Drawn for this process alone; pids come round again.
        self.incarnation = int.from_bytes(os.urandom(8), "big") or 1
        self._recorder = recorder
        self.output = Output(
            sources,
            on_stall=self._give_up if command.strict_output else None,
            tap=None if recorder is None else recorder.write,
        )
        #: None when the program reads the null device.
        self.stdin = stdin
        self.terminal = terminal
        self.end: End | None = None
        #: The follower that started it: its stream ends with an error when the limit passes.
        self.starter: Follower | None = None
        self._child = child
        self._on_end = on_end
        self.family = family
        self._families = families
        # Signals outlive the call that asked for them, and the limit nobody waits for: they live as long as the process.
        self._ending: set[asyncio.Task[None]] = set()
        self._hasty = False
        self._expired = False
        self._truncated = False
        self._limit: Countdown | None = None

    def run(self) -> None:
        """Begin to read, to count the time limit and to wait for the end."""
        self.output.start(on_end=self.consider_end)
        if self.command.limit is not None:
            self._limit = Countdown(self.command.limit, self._expire)
        self._child.ended.add_done_callback(lambda _: self._reaped())

    async def signal(self, number: int) -> None:
        """To all that the command's reach covers; the end will not wait for pipes any more (O9).

        SIGKILL returns when nothing is left of it. Goes on when the caller leaves.
        """
        await asyncio.shield(self._own(self._kill() if number == signal.SIGKILL else self._send(number)))

    def consider_end(self) -> None:
        """The end is due: tell followers and let go of everything."""
        if self.end is not None or not self._child.ended.done() or self._ending:
            return
        if not (self._hasty or self.terminal is not None or self.output.at_end):
            return
        self.end = End.of(self._child.ended.result(), timed_out=self._expired, truncated=self._truncated)
        if self._limit is not None:
            self._limit.cancel()
        self.output.finish(self._failure_for)
        if self._recorder is not None:
            self._recorder.end()
        if self.stdin is not None:
            self.stdin.close()
        if self.terminal is not None:
            self.terminal.close()
        self._child.close()
        self._on_end(self, self.end)

    def abandon(self, failure: SandgateError) -> None:
        """The agent ends: so does everything it started."""
        self.output.fail_all(failure)
        try:
            self._child.signal_group(signal.SIGKILL)
        except PermissionError:
            # The root spawner's sweep meets the same refusal; whoever ends the sandbox has the rights.
            pass

    def _reaped(self) -> None:
        self.family.leader_reaped = True
        self.consider_end()

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending_over)
        return task

    def _ending_over(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandgateError):
            log.error("process %d could not be ended", self.pid, exc_info=error)
        self.consider_end()

    async def _send(self, number: int) -> None:
        await self._reach(number, self._families.signal(self.family, number))
        self._hasty = True

    async def _kill(self) -> None:
        await self._reach(signal.SIGKILL, self._families.end(self.family))
        self._hasty = True
        # A dead process answers `kill -0` until it was reaped (A27).
        await asyncio.wait([self._child.ended], timeout=_DEATH_SECONDS)

    async def _reach(self, number: int, work: Coroutine[None, None, None]) -> None:
        try:
            try:
                await work
            except PermissionError:
                raise
            except OSError as error:
                log.warning("what belongs to process %d is not known, its group gets the signal: %s", self.pid, error)
                self._child.signal_group(number)
        except PermissionError:
            raise PermissionDenied(f"the agent may not signal process {self.pid}") from None

    def _give_up(self) -> None:
        """Nobody reads what strict output has to say."""
        self._truncated = True
        self._own(self._kill())

    def _expire(self) -> None:
        self._expired = True
        self._own(self._enforce_limit())

    async def _enforce_limit(self) -> None:
        try:
            if self.command.term_grace:
                await self._send(signal.SIGTERM)
                await self._grace()
            await self._kill()
        finally:
            if self.starter is not None and not self._child.ended.done():
                # It hangs in the kernel, or may not be signalled.
                self.starter.end(self._limit_passed())

    async def _grace(self) -> None:
        """Wait until all have obeyed, at most as long as is granted (X1, X5)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.command.term_grace):
                # Only of the command itself does anybody tell that it ended.
                while await self._families.alive(self.family):  # noqa: ASYNC110
                    await asyncio.sleep(_GRACE_LOOK_SECONDS)

    def _limit_passed(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the command ran into its time limit of {self.command.limit:g} s")

    def _failure_for(self, follower: Follower) -> SandgateError | None:
        return self._limit_passed() if self._expired and follower is self.starter else None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is still known of a process that has ended."""

    pid: int
    tag: str | None
    incarnation: int
    end: End
    retained: Retention
    next_seq: int
    until: float

    @classmethod
    def of(cls, process: Process, end: End, *, until: float) -> Ended:
        output = process.output
        return cls(
            pid=process.pid,
            tag=process.command.tag,
            incarnation=process.incarnation,
            end=end,
            retained=output.retained,
            next_seq=output.next_seq,
            until=until,
        )

    def past(self, from_seq: int | None) -> Past:
        return self.retained.since(from_seq, self.next_seq)


class _Ends:
    """Processes that attaching may still ask for (A9), with the rest of their output (X12)."""

    def __init__(self) -> None:
        self._ends: OrderedDict[int, Ended] = OrderedDict()
        self._size = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, process: Process, end: End) -> None:
        self._remove(process.pid)
        ended = Ended.of(process, end, until=self._loop.time() + _RETENTION_SECONDS)
        self._ends[process.pid] = ended
        self._size += ended.retained.weight
        if len(self._ends) > _MOST_RETAINED:
            self._remove(next(iter(self._ends)))
        self._shrink()
        if self._timer is None:
            self._timer = self._loop.call_at(ended.until, self._tick)

    def drop(self, *, pid: int, tag: str | None) -> None:
        """A newer process has taken the pid or tag: the old end must not be told for it (A10, P33)."""
        self._remove(pid)
        if tag is not None:
            for ended in [ended for ended in self._ends.values() if ended.tag == tag]:
                self._remove(ended.pid)

    def find(self, selector: Selector) -> Ended | None:
        self._expire()
        for ended in reversed(self._ends.values()):
            if selector.pid == ended.pid or (selector.tag is not None and selector.tag == ended.tag):
                return ended
        return None

    def _remove(self, pid: int) -> None:
        if (ended := self._ends.pop(pid, None)) is not None:
            self._size -= ended.retained.weight

    def _shrink(self) -> None:
        """Forget output, oldest first, until the rest fits; the ends stay known."""
        for ended in self._ends.values():
            if self._size <= _MOST_RETAINED_BYTES:
                return
            self._size -= ended.retained.weight
            ended.retained.clear()

    def _expire(self) -> None:
        now = self._loop.time()
        while self._ends and (oldest := next(iter(self._ends.values()))).until <= now:
            self._remove(oldest.pid)

    def _tick(self) -> None:
        """Output is given back in time, whether somebody asks or not."""
        self._timer = None
        self._expire()
        if self._ends:
            self._timer = self._loop.call_at(next(iter(self._ends.values())).until, self._tick)


class Processes:
    """The table."""

    def __init__(self, launcher: Launcher, journal: Journal) -> None:
        self._launcher = launcher
        self._journal = journal
        self._live: dict[int, Process] = {}
        self._ends = _Ends()
        # Starts outlive the call that asked for them, see the module's docstring.
        self._starting: set[asyncio.Task[tuple[Process, Follower]]] = set()
        self._marks = itertools.cycle(MARKS)
        self._families = Families(launcher.root_pid)
        self._closed = False

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._live.values()))

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str
    ) -> tuple[Process, Follower]:
        """Start a process and follow it from its first byte. The caller leaves through ``process.output.leave``."""
        command.check()
        if self._closed:
            raise Unavailable("the sandbox is ending")
        if len(self._live) + len(self._starting) >= MOST_PROCESSES:
            raise ResourceExhausted(f"more than {MOST_PROCESSES} processes at once")
        task = asyncio.create_task(self._start(command, account, env=env, cwd=cwd))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_leave)
            raise

    def find(self, selector: Selector) -> Process:
        """A live process. Of several with one tag, the newest."""
        process = self._find(selector)
        if process is None:
            raise selector.missing()
        return process

    def attach(self, selector: Selector) -> Process | Ended:
        """A live process, or what is still known of one that ended."""
        found = self._find(selector) or self._ends.find(selector)
        if found is None:
            raise selector.missing()
        return found

    def stdin_of(self, selector: Selector, *, terminal: bool) -> Stdin:
        """Where to write. Raises Internal with the reason when there is no such input (A17)."""
        process = self.find(selector)
        if terminal and process.terminal is None:
            raise Internal(f"process {process.pid} has no terminal; send stdin instead")
        if not terminal and process.terminal is not None:
            raise Internal(f"process {process.pid} runs on a terminal; send pty input instead")
        if process.stdin is None:
            raise Internal(f"stdin of process {process.pid} is disabled")
        return process.stdin

    async def close(self, failure: SandgateError) -> None:
        """End every process and every stream; starts under way included."""
        self._closed = True
        for process in self:
            process.abandon(failure)
        if self._starting:
            await asyncio.wait(self._starting, timeout=0.5)
            for process in self:
                process.abandon(failure)

    def _find(self, selector: Selector) -> Process | None:
        if selector.pid is not None:
            return self._live.get(selector.pid)
        return next((found for found in reversed(self._live.values()) if found.command.tag == selector.tag), None)

    async def _start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str
    ) -> tuple[Process, Follower]:
        # A user without files of its own shares the agent's id, which owns new terminals already.
        owner = account.uid if account.uid != os.geteuid() and self._launcher.switches_users else None
        streams = _Streams.open(command, owner)
        program = Program(
            argv=[command.cmd, *command.args],
            env=env,
            cwd=cwd,
            fds=streams.theirs,
            terminal=command.size is not None,
            mark=self._free_mark(),
            subreaper=command.reach is Reach.TREE,
        )
        try:
            child = await self._launcher.launch(account, program)
        except BaseException:
            streams.close_ours()
            raise
        return self._register(command, program, child, streams=streams)

    def _free_mark(self) -> int:
        used = {process.family.mark for process in self._live.values()}
        return next(mark for mark in self._marks if mark not in used)

    def _register(
        self, command: Command, program: Program, child: Child, *, streams: _Streams
    ) -> tuple[Process, Follower]:
        process = Process(
            command,
            child,
            family=Family(pid=child.pid, mark=program.mark, group_only=command.reach is Reach.GROUP),
            families=self._families,
            sources=streams.outputs,
            stdin=streams.stdin,
            terminal=streams.terminal,
            on_end=self._retire,
            recorder=self._journal.recorder(pid=child.pid, tag=command.tag),
        )
        self._ends.drop(pid=process.pid, tag=command.tag)
        self._live[process.pid] = process
        process.starter = process.output.follow()
        process.run()
        return process, process.starter

    def _retire(self, process: Process, end: End) -> None:
        if self._live.get(process.pid) is process:
            del self._live[process.pid]
            self._ends.keep(process, end)


def _leave(task: asyncio.Task[tuple[Process, Follower]]) -> None:
    if not task.cancelled() and task.exception() is None:
        process, mailbox = task.result()
        process.output.leave(mailbox)


class _Streams:
    """Descriptors of a process to be: ours, and the program's, which the launcher closes."""

    def __init__(self) -> None:
        self.theirs: list[int] = []
        self.outputs: dict[Stream, int] = {}
        self.stdin: Stdin | None = None
        self.terminal: Terminal | None = None

    @classmethod
    def open(cls, command: Command, owner: int | None) -> _Streams:
        streams = cls()
        try:
            if command.size is not None:
                streams._open_terminal(command.size, owner)
            else:
                streams._open_pipes(command.stdin)
        except BaseException as error:
            for fd in streams.theirs:
                os.close(fd)
            streams.close_ours()
            if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise ResourceExhausted(f"no room for another process: {error.strerror}") from None
            raise
        return streams

    def close_ours(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
        if self.terminal is not None:
            self.terminal.close()
        else:
            for fd in self.outputs.values():
                os.close(fd)

    def _open_terminal(self, size: Size, owner: int | None) -> None:
        self.terminal, slave = Terminal.open(size, owner=owner)
        self.theirs.append(slave)
        self.outputs[Stream.PTY] = self.terminal.master
        self.stdin = Stdin(self.terminal.master, owned=False)

    def _open_pipes(self, with_stdin: bool) -> None:
        if with_stdin:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self.theirs.append(reader)
            self.stdin = Stdin(writer, owned=True)
        else:
            self.theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for stream in (Stream.STDOUT, Stream.STDERR):
            self.outputs[stream], writer = output_pipe()
            self.theirs.append(writer)
