"""``AsyncSandbox.commands`` and ``AsyncSandbox.pty``: processes of a sandbox, for an event loop."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Literal, Self, overload

from sandgate.client.exceptions import SandboxException
from sandgate.client.handle import Handle
from sandgate.client.process_calls import Program, Target, shell, terminal_program
from sandgate.client.records import CommandResult, Output, OutputText, ProcessInfo, PtySize
from sandgate.client.retained import DEFAULT_MAX_OUTPUT_BYTES
from sandgate.client.waiting import AsyncCore

__all__ = ["AsyncCommandHandle", "AsyncCommands", "AsyncPty"]

OnText = Callable[[str], object]
OnBytes = Callable[[bytes], object]


class AsyncCommandHandle(Handle):
    """One process that is followed. What it writes is read in :meth:`wait`, in iteration and in :meth:`read`, and only
    there: a process whose handle nobody reads is held up by its full pipe after some megabytes, unless the handle is
    :meth:`disconnect`-ed.

    When the connection breaks, the next read attaches again by itself and goes on with the byte after the last, also over
    a pause of the sandbox and a restart of the gateway. Where output was lost it raises SandboxException. One task reads
    at a time.
    """

    def __init__(
        self,
        core: AsyncCore,
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

    async def start(self, program: Program, request_timeout: float | None) -> Self:
        """Begin to follow a new process; called once, by who makes the handle."""
        await self._core.run(self._following.start(program, request_timeout))
        return self

    async def connect(self, pid: int, from_seq: int | None, request_timeout: float | None) -> Self:
        """Begin to follow a running process; called once, by who makes the handle."""
        await self._core.run(self._following.connect(pid, from_seq, request_timeout))
        return self

    async def read(self) -> Output | None:
        """The next piece of output as bytes; None at the end. Callbacks are not called, but the output is kept."""
        output = await self._core.run(self._following.next())
        if output is not None:
            self._transcript.add(output)
        return output

    async def __aiter__(self) -> AsyncIterator[OutputText]:
        """Pieces of output as text, as they come; callbacks are called too."""
        while (output := await self._core.run(self._following.next())) is not None:
            text = self._transcript.add(output)
            if text is not None:
                await self._tell(text)
                yield text
        if not self._flushed:
            self._flushed = True
            for text in self._transcript.finish():
                await self._tell(text)
                yield text

    async def wait(
        self, on_stdout: OnText | None = None, on_stderr: OnText | None = None, on_pty: OnBytes | None = None
    ) -> CommandResult:
        """Read to the end. Callbacks that are given here replace those of before.

        Raises CommandExitException when the command did not end well, TimeoutException when its time limit passed,
        SandboxException when the handle was disconnected.
        """
        self._on_stdout = on_stdout or self._on_stdout
        self._on_stderr = on_stderr or self._on_stderr
        self._on_pty = on_pty or self._on_pty
        async for _ in self:
            pass
        if self._following.end is None:
            raise SandboxException(f"the handle of process {self.pid} was disconnected before its end")
        return self._transcript.result(self._following.end)

    async def kill(self, request_timeout: float | None = None) -> bool:
        """SIGKILL; False when the process is gone."""
        return await self._core.run(self._target.kill(self.pid, request_timeout))

    async def send_stdin(self, data: str | bytes, request_timeout: float | None = None) -> None:
        """Write to its standard input, or to its terminal; returns when the process's pipe has taken it."""
        await self._core.run(self._target.send_input(self.pid, data, request_timeout, terminal=self._terminal))

    async def close_stdin(self, request_timeout: float | None = None) -> None:
        """End of file on its standard input. A second time does nothing."""
        await self._core.run(self._target.close_stdin(self.pid, request_timeout))

    async def _tell(self, text: OutputText) -> None:
        if text.stdout is not None and self._on_stdout is not None:
            await _called(self._on_stdout(text.stdout))
        if text.stderr is not None and self._on_stderr is not None:
            await _called(self._on_stderr(text.stderr))
        if text.pty is not None and self._on_pty is not None:
            await _called(self._on_pty(text.pty))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()


class AsyncCommands:
    """Runs and finds the processes of one sandbox.

    ``request_timeout`` is the time for one answer, in seconds (None: 60; 0: no limit). Every method raises
    SandboxException or one of its kinds: NotFoundException when the sandbox is gone.
    """

    def __init__(self, core: AsyncCore, sandbox_id: str) -> None:
        self._core = core
        self._target = Target(sandbox_id=sandbox_id)

    @overload
    async def run(
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
    async def run(
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
    ) -> AsyncCommandHandle: ...

    async def run(
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
    ) -> CommandResult | AsyncCommandHandle:
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
        handle = await self.start(
            program,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            request_timeout=request_timeout,
            max_output_bytes=max_output_bytes,
        )
        if background:
            return handle
        # An exception on the way must not leave a stream that nobody reads: it would hold the command up.
        async with handle:
            return await handle.wait()

    async def start(
        self,
        program: Program,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_pty: OnBytes | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> AsyncCommandHandle:
        """Start a program without a shell, and return once it runs."""
        handle = AsyncCommandHandle(
            self._core,
            self._target,
            terminal=program.size is not None,
            max_output_bytes=max_output_bytes,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_pty=on_pty,
        )
        return await handle.start(program, request_timeout)

    async def connect(
        self,
        pid: int,
        from_seq: int | None = None,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> AsyncCommandHandle:
        """Follow a running command from now on, or replay what is retained from the piece ``from_seq`` on (0: from the
        first that is).

        Raises NotFoundException when there is no such process, SandboxException when ``from_seq`` is not retained.
        """
        handle = AsyncCommandHandle(
            self._core,
            self._target,
            max_output_bytes=max_output_bytes,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )
        return await handle.connect(pid, from_seq, request_timeout)

    async def list(self, request_timeout: float | None = None) -> list[ProcessInfo]:
        """The live commands and terminals."""
        return await self._core.run(self._target.list(request_timeout))

    async def kill(self, pid: int, request_timeout: float | None = None) -> bool:
        """SIGKILL to the process group, and to the tree of one that was started so; False when it is gone."""
        return await self._core.run(self._target.kill(pid, request_timeout))

    async def terminate(self, pid: int, request_timeout: float | None = None) -> bool:
        """SIGTERM, which the program may catch; False when it is gone."""
        return await self._core.run(self._target.terminate(pid, request_timeout))

    async def send_stdin(self, pid: int, data: str | bytes, request_timeout: float | None = None) -> None:
        """Write to the standard input of a command that was started with ``stdin``."""
        await self._core.run(self._target.send_input(pid, data, request_timeout, terminal=False))

    async def close_stdin(self, pid: int, request_timeout: float | None = None) -> None:
        """End of file on its standard input. A second time does nothing."""
        await self._core.run(self._target.close_stdin(pid, request_timeout))


class AsyncPty:
    """Terminals of one sandbox."""

    def __init__(self, core: AsyncCore, sandbox_id: str) -> None:
        self._core = core
        self._target = Target(sandbox_id=sandbox_id)
        self._commands = AsyncCommands(core, sandbox_id)

    async def create(
        self,
        size: PtySize | None = None,
        *,
        on_data: OnBytes | None = None,
        user: str | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = 60,
        request_timeout: float | None = None,
    ) -> AsyncCommandHandle:
        """A login shell on a terminal. Its output is ``pty`` of what the handle reads."""
        program = terminal_program(size or PtySize(), user=user, cwd=cwd, envs=envs or {}, timeout=timeout)
        return await self._commands.start(program, on_pty=on_data, request_timeout=request_timeout)

    async def connect(
        self,
        pid: int,
        from_seq: int | None = None,
        *,
        on_data: OnBytes | None = None,
        request_timeout: float | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> AsyncCommandHandle:
        """Follow a terminal; as :meth:`AsyncCommands.connect`."""
        handle = AsyncCommandHandle(
            self._core, self._target, terminal=True, max_output_bytes=max_output_bytes, on_pty=on_data
        )
        return await handle.connect(pid, from_seq, request_timeout)

    async def send_stdin(self, pid: int, data: str | bytes, request_timeout: float | None = None) -> None:
        """What a person would type."""
        await self._core.run(self._target.send_input(pid, data, request_timeout, terminal=True))

    async def resize(self, pid: int, size: PtySize, request_timeout: float | None = None) -> None:
        """The terminal's new size; programs on it are told."""
        await self._core.run(self._target.resize(pid, size, request_timeout))

    async def kill(self, pid: int, request_timeout: float | None = None) -> bool:
        """End the shell and what runs on its terminal; False when it is gone."""
        return await self._core.run(self._target.kill(pid, request_timeout))


async def _called(outcome: object) -> None:
    """A callback may be a coroutine function: it is waited for, so that a slow one slows the command."""
    if inspect.isawaitable(outcome):
        await outcome
