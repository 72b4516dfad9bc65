"""Processes that were started through the agent: their table and the life of each (behaviour.md 3-6).

Between the service, which speaks protobuf, and the launcher, which has programs started. A process is *live* from its
start to its end event. The end event is due when the program was reaped and its pipes are at their end (O8), or when it
was reaped after a signal or the time limit (O9), or, on a terminal, when it was reaped: what a child writes to the
terminal later has no reader (as with any terminal whose shell is gone).

Start is finished even if its caller leaves half way: otherwise a program could run that no list shows (T8).
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sandgate_agent.accounts import Account
from sandgate_agent.launcher import Child, Launcher, Program
from sandgate_agent.mailbox import Mailbox
from sandgate_agent.output import Output, Piece, Stream, output_pipe
from sandgate_agent.pty import Size, Terminal
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

__all__ = ["Command", "End", "Process", "Processes", "Selector"]

MOST_PROCESSES = 1024
#: How long attaching to an ended process still tells its end (A9), and for how many of them.
_RETENTION_SECONDS = 30.0
_MOST_RETAINED = 4096
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


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended, as the end event says it (O10-O12)."""

    exit_code: int
    exited: bool
    status: str

    @property
    def error(self) -> str | None:
        return None if self.exited and self.exit_code == 0 else self.status

    @classmethod
    def of(cls, status: int | None) -> End:
        """From a wait status; None when it was lost with the process that knew it."""
        if status is None:
            return cls(exit_code=-1, exited=False, status="exit status unknown")
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            text = _SIGNAL_TEXTS.get(number, f"signal {number}")
            dumped = " (core dumped)" if os.WCOREDUMP(status) else ""
            return cls(exit_code=-1, exited=False, status=f"signal: {text}{dumped}")
        code = os.WEXITSTATUS(status)
        return cls(exit_code=code, exited=True, status=f"exit status {code}")


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
        self, command: Command, child: Child, *, output: Output, stdin: Stdin | None, terminal: Terminal | None
    ) -> None:
        self.command = command
        self.pid = child.pid
        self.output = output
        #: None when the program reads the null device.
        self.stdin = stdin
        self.terminal = terminal
        self.end: End | None = None
        #: Resolved with the end.
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        #: The follower that started it: its stream ends with an error when the limit passes.
        self.starter: Mailbox[Piece] | None = None
        self._child = child
        self._hasty = False
        self._expired = False
        self._limit = command.limit
        self._timers: list[asyncio.TimerHandle] = []

    def run(self) -> None:
        """Begin to read, to count the time limit and to wait for the end."""
        self.output.start(on_end=self.consider_end)
        loop = asyncio.get_running_loop()
        if self._limit is not None:
            self._timers.append(loop.call_later(self._limit, self._expire))
        self._child.ended.add_done_callback(lambda _: self.consider_end())

    def signal(self, number: int) -> None:
        """To the whole process group; the end will not wait for pipes any more (O9)."""
        try:
            self._child.signal_group(number)
        except PermissionError:
            raise PermissionDenied(f"the agent may not signal process {self.pid}") from None
        self._hasty = True
        self.consider_end()

    def consider_end(self) -> None:
        """The end is due: tell followers and let go of everything."""
        if self.end is not None or not self._child.ended.done():
            return
        if not (self._hasty or self.terminal is not None or self.output.at_end):
            return
        self.end = End.of(self._child.ended.result())
        for timer in self._timers:
            timer.cancel()
        self.output.finish(self._failure_for)
        if self.stdin is not None:
            self.stdin.close()
        if self.terminal is not None:
            self.terminal.close()
        self._child.close()
        self.ended.set_result(self.end)

    def abandon(self, failure: SandgateError) -> None:
        """The agent ends: so does everything it started."""
        self.output.fail_all(failure)
        try:
            self._child.signal_group(signal.SIGKILL)
        except PermissionError:
            # The root spawner's sweep meets the same refusal; whoever ends the sandbox has the rights.
            pass

    def _expire(self) -> None:
        self._expired = True
        self._timers.append(asyncio.get_running_loop().call_later(_DEATH_SECONDS, self._report_limit))
        try:
            self.signal(signal.SIGKILL)
        except PermissionDenied:
            self._report_limit()

    def _report_limit(self) -> None:
        if self.starter is not None:
            self.starter.end(self._limit_passed())

    def _limit_passed(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the command ran into its time limit of {self._limit:g} s")

    def _failure_for(self, follower: Mailbox[Piece]) -> SandgateError | None:
        return self._limit_passed() if self._expired and follower is self.starter else None


@dataclass(frozen=True, kw_only=True)
class _Retained:
    pid: int
    tag: str | None
    end: End
    until: float


class _Ends:
    """Ends that attaching may still ask for (A9)."""

    def __init__(self) -> None:
        self._ends: OrderedDict[int, _Retained] = OrderedDict()
        self._loop = asyncio.get_running_loop()

    def keep(self, process: Process, end: End) -> None:
        self._ends.pop(process.pid, None)
        until = self._loop.time() + _RETENTION_SECONDS
        self._ends[process.pid] = _Retained(pid=process.pid, tag=process.command.tag, end=end, until=until)
        if len(self._ends) > _MOST_RETAINED:
            self._ends.popitem(last=False)

    def drop(self, *, pid: int, tag: str | None) -> None:
        """A newer process has taken the pid or tag: the old end must not be told for it (A10, P33)."""
        self._ends.pop(pid, None)
        if tag is not None:
            for retained in [retained for retained in self._ends.values() if retained.tag == tag]:
                del self._ends[retained.pid]

    def find(self, selector: Selector) -> tuple[int, End] | None:
        self._expire()
        for retained in reversed(self._ends.values()):
            if selector.pid == retained.pid or (selector.tag is not None and selector.tag == retained.tag):
                return retained.pid, retained.end
        return None

    def _expire(self) -> None:
        now = self._loop.time()
        while self._ends and next(iter(self._ends.values())).until <= now:
            self._ends.popitem(last=False)


class Processes:
    """The table."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._live: dict[int, Process] = {}
        self._ends = _Ends()
        # Starts outlive the call that asked for them, see the module's docstring.
        self._starting: set[asyncio.Task[tuple[Process, Mailbox[Piece]]]] = set()
        self._closed = False

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._live.values()))

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str
    ) -> tuple[Process, Mailbox[Piece]]:
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

    def attach(self, selector: Selector) -> Process | tuple[int, End]:
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
    ) -> tuple[Process, Mailbox[Piece]]:
        # A user without files of its own shares the agent's id, which owns new terminals already.
        owner = account.uid if account.uid != os.geteuid() and self._launcher.switches_users else None
        streams = _Streams.open(command, owner)
        try:
            child = await self._launcher.launch(
                account,
                Program(
                    argv=[command.cmd, *command.args],
                    env=env,
                    cwd=cwd,
                    fds=streams.theirs,
                    terminal=command.size is not None,
                ),
            )
        except BaseException:
            streams.close_ours()
            raise
        return self._register(command, child, streams)

    def _register(self, command: Command, child: Child, streams: _Streams) -> tuple[Process, Mailbox[Piece]]:
        output = Output(streams.outputs)
        process = Process(command, child, output=output, stdin=streams.stdin, terminal=streams.terminal)
        self._ends.drop(pid=process.pid, tag=command.tag)
        self._live[process.pid] = process
        process.ended.add_done_callback(lambda ended: self._retire(process, ended.result()))
        process.starter = output.follow()
        process.run()
        return process, process.starter

    def _retire(self, process: Process, end: End) -> None:
        if self._live.get(process.pid) is process:
            del self._live[process.pid]
            self._ends.keep(process, end)


def _leave(task: asyncio.Task[tuple[Process, Mailbox[Piece]]]) -> None:
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
