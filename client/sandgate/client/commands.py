"""``Sandbox.commands`` and ``Sandbox.pty``: processes of a sandbox, for callers that may block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Literal, Self, overload

from sandgate.client.blocking import Core
from sandgate.client.exceptions import SandboxException
from sandgate.client.handle import Handle
from sandgate.client.process_calls import Program, Target, shell, terminal_program
from sandgate.client.records import CommandResult, Output, OutputText, ProcessInfo, PtySize
from sandgate.client.retained import DEFAULT_MAX_OUTPUT_BYTES

__all__ = ["CommandHandle", "Commands", "Pty"]

OnText = Callable[[str], object]
OnBytes = Callable[[bytes], object]


class CommandHandle(Handle):
    """One process that is followed. What it writes is read in :meth:`wait`, in iteration and in :meth:`read`, and only
    there: a process whose handle nobody reads is held up by its full pipe after some megabytes, unless the handle is
    :meth:`disconnect`-ed.

    When the connection breaks, the next read attaches again by itself and goes on with the byte after the last, also over
    a pause of the sandbox and a restart of the gateway. Where output was lost it raises SandboxException. One thread reads
    at a time; the other methods may be called from any.
    """

    def __init__(
        self,
        core: Core,
        target: Target,
        *,
        terminal: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_pty: OnBytes | None = None,
    ) -> None:
        super().__init__(target, terminal=terminal, max_output_bytes=max_output_bytes)
        self._core = core
        self._on_stdout, self._on_stderr, self._on_pty = on_stdout, on_stderr, on_pty

    def start(self, program: Program, request_timeout: float | None) -> Self:
        """Begin to follow a new process; called once, by who makes the handle."""
        self._core.run(self._following.start(program, request_timeout))
        return self

    def connect(self, pid: int, from_seq: int | None, request_timeout: float | None) -> Self:
        """Begin to follow a running process; called once, by who makes the handle."""
        self._core.run(self._following.connect(pid, from_seq, request_timeout))
        return self

    def read(self) -> Output | None:
        """The next piece of output as bytes; None at the end. Callbacks are not called, but the output is kept."""
        output = self._core.run(self._following.next())
        if output is not None:
            self._transcript.add(output)
        return output

    def __iter__(self) -> Iterator[OutputText]:
        """Pieces of output as text, as they come; callbacks are called too."""
        while (output := self._core.run(self._following.next())) is not None:
            text = self._transcript.add(output)
            if text is not None:
                self._tell(text)
                yield text
        if not self._flushed:
            self._flushed = True
            for text in self._transcript.finish():
                self._tell(text)
                yield text

    def wait(
        self, on_stdout: OnText | None = None, on_stderr: OnText | None = None, on_pty: OnBytes | None = None
    ) -> CommandResult:
        """Read to the end. Callbacks that are given here replace those of before.

        Raises CommandExitException when the command did not end well, TimeoutException when its time limit passed,
        SandboxException when the handle was disconnected.
        """
        self._on_stdout = on_stdout or self._on_stdout
        self._on_stderr = on_stderr or self._on_stderr
        self._on_pty = on_pty or self._on_pty
        for _ in self:
            pass
        if self._following.end is None:
            raise SandboxException(f"the handle of process {self.pid} was disconnected before its end")
        return self._transcript.result(self._following.end)

    def kill(self, request_timeout: float | None = None) -> bool:
        """SIGKILL; False when the process is gone."""
        return self._core.run(self._target.kill(self.pid, request_timeout))

    def send_stdin(self, data: str | bytes, request_timeout: float | None = None) -> None:
        """Write to its standard input, or to its terminal; returns when the process's pipe has taken it."""
        self._core.run(self._target.send_input(self.pid, data, request_timeout, terminal=self._terminal))

    def close_stdin(self, request_timeout: float | None = None) -> None:
        """End of file on its standard input. A second time does nothing."""
        self._core.run(self._target.close_stdin(self.pid, request_timeout))

    def _tell(self, text: OutputText) -> None:
        if text.stdout is not None and self._on_stdout is not None:
            self._on_stdout(text.stdout)
        if text.stderr is not None and self._on_stderr is not None:
            self._on_stderr(text.stderr)
        if text.pty is not None and self._on_pty is not None:
            self._on_pty(text.pty)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()


class Commands:
    """Runs and finds the processes of one sandbox.

    ``request_timeout`` is the time for one answer, in seconds (None: 60; 0: no limit). Every method raises
    SandboxException or one of its kinds: NotFoundException when the sandbox is gone.
    """

    def __init__(self, core: Core, sandbox_id: str) -> None:
        self._core = core
        self._target = Target(sandbox_id=sandbox_id)

    @overload
    def run(
        self,
        cmd: str,
        background: Literal[False] = False,
        *,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        request_timeout: float | None = None,
        tag: str | None = None,
        kill_tree: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandResult: ...

    @overload
    def run(
        self,
        cmd: str,
        background: Literal[True],
        *,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        request_timeout: float | None = None,
        tag: str | None = None,
        kill_tree: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandHandle: ...

    def run(
        self,
        cmd: str,
        background: bool = False,
        *,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        request_timeout: float | None = None,
        tag: str | None = None,
        kill_tree: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandResult | CommandHandle:
        """Run a command line with ``/bin/bash -l -c``, to its end or in the background.

        ``timeout`` is the command's time limit in seconds, kept in the sandbox also while nobody is attached (None or 0:
        none): SIGTERM to its process group, SIGKILL after 5 s, then TimeoutException. ``kill_tree`` lets that, and
        ``kill``, reach descendants that left the group. ``stdin`` keeps standard input open for ``send_stdin``; otherwise
        it is empty. ``user`` None is the sandbox's default user, ``cwd`` None that user's home. ``max_output_bytes`` is
        how much of each stream is kept: the end of it; callbacks get everything. An interrupted call leaves the command
        running.

        Raises CommandExitException when it did not end well, InvalidArgumentException for a ``cwd`` that does not exist,
        RateLimitException when the sandbox has as many processes as it may.
        """
        program = Program(
            argv=shell(cmd),
            envs=envs or {},
            user=user,
            cwd=cwd,
            stdin=stdin,
            timeout=timeout,
            tag=tag,
            kill_tree=kill_tree,
        )
        handle = self.start(
            program,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            request_timeout=request_timeout,
            max_output_bytes=max_output_bytes,
        )
        if background:
            return handle
        # An exception on the way must not leave a stream that nobody reads: it would hold the command up.
        with handle:
            return handle.wait()

    def start(
        self,
        program: Program,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_pty: OnBytes | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandHandle:
        """Start a program without a shell, and return once it runs."""
        handle = CommandHandle(
            self._core,
            self._target,
            terminal=program.size is not None,
            max_output_bytes=max_output_bytes,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_pty=on_pty,
        )
        return handle.start(program, request_timeout)

    def connect(
        self,
        pid: int,
        from_seq: int | None = None,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandHandle:
        """Follow a running command from now on, or replay what is retained from the piece ``from_seq`` on (0: from the
        first that is).

        Raises NotFoundException when there is no such process, SandboxException when ``from_seq`` is not retained.
        """
        handle = CommandHandle(
            self._core,
            self._target,
            max_output_bytes=max_output_bytes,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )
        return handle.connect(pid, from_seq, request_timeout)

    def list(self, request_timeout: float | None = None) -> list[ProcessInfo]:
        """The live commands and terminals."""
        return self._core.run(self._target.list(request_timeout))

    def kill(self, pid: int, request_timeout: float | None = None) -> bool:
        """SIGKILL to the process group, and to the tree of one that was started so; False when it is gone."""
        return self._core.run(self._target.kill(pid, request_timeout))

    def terminate(self, pid: int, request_timeout: float | None = None) -> bool:
        """SIGTERM, which the program may catch; False when it is gone."""
        return self._core.run(self._target.terminate(pid, request_timeout))

    def send_stdin(self, pid: int, data: str | bytes, request_timeout: float | None = None) -> None:
        """Write to the standard input of a command that was started with ``stdin``."""
        self._core.run(self._target.send_input(pid, data, request_timeout, terminal=False))

    def close_stdin(self, pid: int, request_timeout: float | None = None) -> None:
        """End of file on its standard input. A second time does nothing."""
        self._core.run(self._target.close_stdin(pid, request_timeout))


class Pty:
    """Terminals of one sandbox."""

    def __init__(self, core: Core, sandbox_id: str) -> None:
        self._core = core
        self._target = Target(sandbox_id=sandbox_id)
        self._commands = Commands(core, sandbox_id)

    def create(
        self,
        size: PtySize | None = None,
        *,
        on_data: OnBytes | None = None,
        user: str | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = 60,
        request_timeout: float | None = None,
    ) -> CommandHandle:
        """A login shell on a terminal. Its output is ``pty`` of what the handle reads."""
        program = terminal_program(size or PtySize(), user=user, cwd=cwd, envs=envs or {}, timeout=timeout)
        return self._commands.start(program, on_pty=on_data, request_timeout=request_timeout)

    def connect(
        self,
        pid: int,
        from_seq: int | None = None,
        *,
        on_data: OnBytes | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandHandle:
        """Follow a terminal; as :meth:`Commands.connect`."""
        handle = CommandHandle(
            self._core, self._target, terminal=True, max_output_bytes=max_output_bytes, on_pty=on_data
        )
        return handle.connect(pid, from_seq, request_timeout)

    def send_stdin(self, pid: int, data: str | bytes, request_timeout: float | None = None) -> None:
        """What a person would type."""
        self._core.run(self._target.send_input(pid, data, request_timeout, terminal=True))

    def resize(self, pid: int, size: PtySize, request_timeout: float | None = None) -> None:
        """The terminal's new size; programs on it are told."""
        self._core.run(self._target.resize(pid, size, request_timeout))

    def kill(self, pid: int, request_timeout: float | None = None) -> bool:
        """End the shell and what runs on its terminal; False when it is gone."""
        return self._core.run(self._target.kill(pid, request_timeout))
