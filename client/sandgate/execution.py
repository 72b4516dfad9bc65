"""``sandgate sandbox exec`` and ``attach``: a command in a sandbox as if it ran here.

Its output goes to ours byte by byte, our input to its, and its exit status becomes ours, so failures of sandgate itself
have statuses of their own that a shell's users know: 124 for the time limit (as ``timeout``), 125 for everything else (as
``docker exec``), 128 + n for a command that died of signal n. Ctrl-C and SIGTERM are passed on as SIGTERM; a second one
kills the command, a third one leaves it.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from sandgate.client.address import of_gateway
from sandgate.client.blocking import Core
from sandgate.client.commands import CommandHandle
from sandgate.client.exceptions import SandboxException, TimeoutException
from sandgate.client.process_calls import Program
from sandgate.client.records import Output, ProcessKind
from sandgate.client.sandbox import Sandbox
from sandgate.console import InputPump, notes_of_signals, raw_terminal, stdin_is_terminal, terminal_size, write_all
from sandgate.core_client import expect_gateway
from sandgate_errors import Internal, NotFound, SandgateError

__all__ = ["FAILED", "TIMED_OUT", "attach", "execute", "opened"]

TIMED_OUT = 124
FAILED = 125
_SIGNALLED = 128
_INTERRUPTED = _SIGNALLED + signal.SIGINT
_BROKEN_PIPE = _SIGNALLED + signal.SIGPIPE
#: Ctrl-], as telnet has it: rare in what is typed, and not a key that ends things.
_DETACH = b"\x1d"
#: As the agent words them, which is how the Go standard library does (behaviour.md O12).
_SIGNAL_TEXTS = {
    "hangup": signal.SIGHUP,
    "interrupt": signal.SIGINT,
    "quit": signal.SIGQUIT,
    "illegal instruction": signal.SIGILL,
    "trace/breakpoint trap": signal.SIGTRAP,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "killed": signal.SIGKILL,
    "user defined signal 1": signal.SIGUSR1,
    "segmentation fault": signal.SIGSEGV,
    "user defined signal 2": signal.SIGUSR2,
    "broken pipe": signal.SIGPIPE,
    "alarm clock": signal.SIGALRM,
    "terminated": signal.SIGTERM,
    "CPU time limit exceeded": signal.SIGXCPU,
    "file size limit exceeded": signal.SIGXFSZ,
    "virtual timer expired": signal.SIGVTALRM,
    "profiling timer expired": signal.SIGPROF,
    "I/O possible": signal.SIGIO,
    "power failure": signal.SIGPWR,
    "bad system call": signal.SIGSYS,
}


class _TimedOut(click.ClickException):
    exit_code = TIMED_OUT


class _Failed(click.ClickException):
    exit_code = FAILED


@contextlib.contextmanager
def opened(state_dir: Path, sandbox_id: str) -> Iterator[Sandbox]:
    """One sandbox of the gateway that runs on a state directory, whoever owns it. Raises SandgateError only."""
    expect_gateway(state_dir)
    with contextlib.closing(Sandbox(sandbox_id, connection=Core(of_gateway(state_dir)))) as sandbox:
        try:
            yield sandbox
        except SandboxException as error:
            raise _cause_of(error) from error


def execute(
    state_dir: Path, sandbox_id: str, program: Program, *, background: bool, tty: bool, forward_input: bool
) -> int:
    """Run a program and return the exit status to leave with. Raises click.ClickException that carries that of a failure."""
    if tty and not stdin_is_terminal():
        raise click.UsageError("--tty needs a terminal on standard input")
    with _failing(), opened(state_dir, sandbox_id) as sandbox:
        handle = sandbox.commands.start(program, max_output_bytes=0)
        if background:
            handle.disconnect()
            click.echo(handle.pid)
            return 0
        return _Session(sandbox, handle, terminal=tty, owns=True).run(forward_input=forward_input)


def attach(state_dir: Path, sandbox_id: str, pid: int, *, from_seq: int | None) -> int:
    """Follow a process that runs. Leaving it, by Ctrl-C or on a terminal by Ctrl-], does nothing to it."""
    with _failing(), opened(state_dir, sandbox_id) as sandbox:
        kinds = {process.pid: process.kind for process in sandbox.commands.list()}
        terminal = kinds.get(pid) is ProcessKind.TERMINAL and stdin_is_terminal()
        connect = sandbox.pty.connect if terminal else sandbox.commands.connect
        handle = connect(pid, from_seq, max_output_bytes=0)
        if terminal:
            click.echo(f"attached to terminal {pid}; Ctrl-] leaves it", err=True)
        return _Session(sandbox, handle, terminal=terminal, owns=False).run(forward_input=terminal)


def _cause_of(error: SandboxException) -> SandgateError:
    """The error of the taxonomy behind an exception of the client, which the command line speaks in."""
    return error.__cause__ if isinstance(error.__cause__, SandgateError) else Internal(error.message)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Our own failures leave with a status that is told from the command's."""
    try:
        yield
    except SandgateError as error:
        raise _Failed(error.message) from error


class _Session:
    """One command at the user's terminal or pipes."""

    def __init__(self, sandbox: Sandbox, handle: CommandHandle, *, terminal: bool, owns: bool) -> None:
        self._sandbox = sandbox
        self._handle = handle
        self._terminal = terminal
        #: Whether the command is ours to end; one that was attached to is not.
        self._owns = owns
        self._interrupts = 0
        #: Set when the session ends before the command; the status to leave with.
        self._left: int | None = None
        self._failure: SandboxException | None = None

    def run(self, *, forward_input: bool) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(self._handle.disconnect)
            stack.enter_context(notes_of_signals(self._actions()))
            if self._terminal:
                stack.enter_context(raw_terminal())
                # What it became before the signals were caught; and one that is attached to has another's size.
                self._resized()
            if forward_input:
                stack.enter_context(InputPump(send=self._send, at_end=self._close_input))
            try:
                while (output := self._handle.read()) is not None:
                    _pass_on(output)
            except BrokenPipeError:
                self._end()
                return _BROKEN_PIPE
            except OSError as error:
                self._end()
                raise _Failed(f"the output could not be written: {error.strerror}") from error
            except TimeoutException as error:
                raise _TimedOut(error.message) from error
        if self._failure is not None:
            raise self._failure
        return self._status()

    def _status(self) -> int:
        if self._handle.exit_code is None:
            return FAILED if self._left is None else self._left
        return self._handle.exit_code if self._handle.exit_code >= 0 else _status_of_signal(self._handle.error or "")

    def _end(self) -> None:
        """Nothing takes our output: its reader left, as ``head`` does, or the disk is full. A command that ran here would
        get SIGPIPE, or an error that it may mind or not.
        """
        if self._owns:
            self._quietly(lambda: self._sandbox.commands.terminate(self._handle.pid))

    def _actions(self) -> dict[signal.Signals, Callable[[], None]]:
        actions = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._interrupted)
        return {**actions, signal.SIGWINCH: self._resized} if self._terminal else actions

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._owns and self._interrupts == 1:
            self._quietly(lambda: self._sandbox.commands.terminate(self._handle.pid))
        elif self._owns and self._interrupts == 2:
            self._quietly(self._handle.kill)
        else:
            self._leave(_INTERRUPTED)

    def _resized(self) -> None:
        self._quietly(lambda: self._sandbox.pty.resize(self._handle.pid, terminal_size()))

    def _leave(self, status: int) -> None:
        self._left = status
        self._handle.disconnect()

    def _quietly(self, act: Callable[[], object]) -> None:
        # A command that has ended meanwhile is no failure, and a connection that broke shows in its output.
        with contextlib.suppress(SandboxException):
            act()

    def _send(self, data: bytes) -> bool:
        if self._terminal and not self._owns and _DETACH in data:
            self._leave(0)
            return False
        try:
            # A program may read its input as slowly as it likes.
            self._handle.send_stdin(data, request_timeout=0)
        except SandboxException as error:
            self._input_refused(error)
            return False
        return True

    def _close_input(self) -> None:
        if self._terminal:
            return
        try:
            self._handle.close_stdin()
        except SandboxException as error:
            self._input_refused(error)

    def _input_refused(self, error: SandboxException) -> None:
        """A command that ended or closed its input wants no more; anything else has cost it input that it waits for."""
        if not isinstance(error.__cause__, NotFound | Internal):
            self._failure = error
            self._handle.disconnect()


def _pass_on(output: Output) -> None:
    if output.stderr is not None:
        write_all(2, output.stderr)
    else:
        write_all(1, output.stdout or output.pty or b"")


def _status_of_signal(error: str) -> int:
    found = re.match(r"signal: (?:signal (\d+)|([^(]*?))(?: \(core dumped\))?$", error)
    if found is None or (found[2] and found[2] not in _SIGNAL_TEXTS):
        return FAILED
    return _SIGNALLED + (int(found[1]) if found[1] else _SIGNAL_TEXTS[found[2]])
