"""One session of ``/pty``: a process, the ends of its pipes or terminal, and what of its output is kept."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandgate_testing.execd_stand_in import HARSH
from sandgate_testing.execd_stand_in.websocket import BINARY, TEXT, WebSocket

__all__ = ["Ring", "Session"]

_STDOUT, _STDERR, _REPLAY = 1, 2, 3
_RING_BYTES = 1024 * 1024
_PIECE = 32 * 1024
#: No other has a name for execd; the rest is ignored.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL", "SIGQUIT", "SIGHUP")
_ROWS, _COLS = 24, 80
#: Seconds in which a terminal shows what was written to it before its last process ended. A pipe does so at once.
_TERMINAL_DELAY = 1.0
#: Of what is read after the end of the process before that is told: others may go on writing to the same pipes for ever.
_LATE_BYTES = 1024 * 1024


class Ring:
    """The last bytes of a stream, by their offset in all of it."""

    def __init__(self, size: int = _RING_BYTES) -> None:
        self._size = size
        self._kept = bytearray()
        self.total = 0

    def add(self, piece: bytes) -> None:
        self.total += len(piece)
        self._kept += piece
        del self._kept[: -self._size]

    def since(self, offset: int) -> tuple[int, bytes]:
        """What is left of everything from ``offset`` on, and where that begins."""
        first = max(offset, self.total - len(self._kept))
        return first, bytes(self._kept[len(self._kept) - (self.total - first) :]) if first < self.total else b""


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """File descriptors: the process's three, and ours of the same."""

    theirs: tuple[int, int, int]
    stdin: int
    #: By the byte that stands in front of what comes from it.
    outputs: Mapping[int, int]

    @classmethod
    def of_pipes(cls) -> _Ends:
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = (stdin[0], stdout[1], stderr[1])
        return cls(theirs=theirs, stdin=stdin[1], outputs={_STDOUT: stdout[0], _STDERR: stderr[0]})

    @classmethod
    def of_terminal(cls) -> _Ends:
        ours, theirs = os.openpty()
        termios.tcsetwinsize(ours, (_ROWS, _COLS))
        return cls(theirs=(theirs, theirs, theirs), stdin=ours, outputs={_STDOUT: ours})


class Session:
    """What is written is read into the ring at all times; while a socket is attached, only as fast as that takes it."""

    def __init__(self, *, cwd: str | None, command: str) -> None:
        self._cwd = cwd
        self._command = command
        self.ring = Ring()
        self.terminal = False
        self._process: asyncio.subprocess.Process | None = None
        self._socket: WebSocket | None = None
        self._stdin = -1
        self._closed = False
        self._starting = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._exited: asyncio.Task[int] | None = None
        self._ending: asyncio.Task[int] | None = None
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        return self._exited is not None and not self._exited.done()

    async def start(self, *, terminal: bool) -> None:
        """Start the process unless there is one; raises OSError."""
        async with self._starting:
            if self._closed:
                raise OSError("pty session is closing")
            if self._ending is not None:
                if self.running or not HARSH:
                    return
                await self._ending
            ends = _Ends.of_terminal() if terminal else _Ends.of_pipes()
            ours = {ends.stdin, *ends.outputs.values()}
            try:
                self._process = await self._spawn(ends, terminal=terminal)
            except BaseException:
                _close(ours)
                raise
            finally:
                _close(set(ends.theirs))
            for descriptor in ours:
                os.set_blocking(descriptor, False)
            self.terminal, self._stdin = terminal, ends.stdin
            self._exited = asyncio.create_task(self._process.wait())
            drained = [asyncio.Event() for _ in ends.outputs]
            self._pumps = [
                asyncio.create_task(self._pump(stream, descriptor, self._exited, event))
                for (stream, descriptor), event in zip(ends.outputs.items(), drained, strict=True)
            ]
            self._ending = asyncio.create_task(self._end(self._exited, drained))

    async def _spawn(self, ends: _Ends, *, terminal: bool) -> asyncio.subprocess.Process:
        stdin, stdout, stderr = ends.theirs
        return await asyncio.create_subprocess_exec(
            *_shell(self._command),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=self._cwd,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )

    def attach(self, socket: WebSocket, since: int, greeting: Mapping[str, object]) -> None:
        """Send it what it missed, its greeting, and from then on what comes. Nothing can come in between."""
        first, missed = self.ring.since(since)
        if missed:
            socket.post(BINARY, struct.pack("!BQ", _REPLAY, first) + missed)
        socket.post(TEXT, json.dumps(greeting).encode())
        self._socket = socket

    def detach(self, socket: WebSocket) -> None:
        if self._socket is socket:
            self._socket = None

    async def exit_code(self) -> int:
        """Once the process has ended and all it wrote was sent; -1 where a signal ended it, as Go has it."""
        assert self._ending is not None, "it was started"
        return await asyncio.shield(self._ending)

    async def _end(self, exited: asyncio.Task[int], drained: list[asyncio.Event]) -> int:
        code = await exited
        if not HARSH:
            for event in drained:
                await event.wait()
        async with self._writing:
            if self.terminal:
                # Its other processes lose it. What pipes lead to keeps them.
                await _cancelled(self._pumps)
            else:
                os.close(self._stdin)
            self._stdin = -1
        return max(code, -1)

    async def _pump(self, stream: int, descriptor: int, exited: asyncio.Task[int], drained: asyncio.Event) -> None:
        late = 0
        try:
            while True:
                # Reading and sending need not wait for anything, and would let nobody else have a turn.
                await asyncio.sleep(0)
                try:
                    piece = os.read(descriptor, _PIECE)
                except BlockingIOError:
                    await self._wait_for_more(descriptor, exited, drained)
                    continue
                except OSError:
                    # No process has the terminal any more.
                    return
                if not piece:
                    return
                late += len(piece) if exited.done() else 0
                if late > _LATE_BYTES:
                    drained.set()
                await self._emit(stream, piece)
        finally:
            drained.set()
            os.close(descriptor)

    async def _wait_for_more(self, descriptor: int, exited: asyncio.Task[int], drained: asyncio.Event) -> None:
        if not exited.done():
            await _readable(descriptor, exited)
        elif drained.is_set():
            await _readable(descriptor)
        elif not await _readable(descriptor, seconds=_TERMINAL_DELAY if self.terminal else 0):
            drained.set()

    async def _emit(self, stream: int, piece: bytes) -> None:
        self.ring.add(piece)
        told = self._ending is not None and self._ending.done()
        if self._socket is not None and not told:
            with contextlib.suppress(OSError):
                await self._socket.send(BINARY, bytes([stream]) + piece)

    async def write(self, data: bytes, *, until: asyncio.Future[None]) -> None:
        """Give it to the process, however long that takes it; raises OSError when it has closed its input."""
        assert self._exited is not None, "it was started"
        async with self._writing:
            view = memoryview(data)
            while view and not (self._exited.done() or until.done()):
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    await _writable(self._stdin, self._exited, until)

    def signal(self, name: str) -> None:
        """To the group of the process, while that runs. Unknown names are ignored."""
        if self._process is not None and self.running and name in _SIGNALS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.Signals[name])

    def resize(self, *, cols: int, rows: int) -> None:
        if self.terminal and self._stdin >= 0 and cols > 0 and rows > 0:
            termios.tcsetwinsize(self._stdin, (rows & 0xFFFF, cols & 0xFFFF))

    async def end(self) -> None:
        """Kill the group of the process. Whoever is attached is told how it ended, as ever."""
        async with self._starting:
            self._closed = True
        self.signal("SIGKILL")


def _shell(command: str) -> list[str]:
    shell = ["bash", "--norc", "--noprofile"] if shutil.which("bash") else ["sh"]
    return [*shell, "-c", command] if command else shell


def _take_terminal() -> None:
    """In the new process, which leads a session already."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _close(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _readable(descriptor: int, *others: asyncio.Future[int], seconds: float | None = None) -> bool:
    loop = asyncio.get_running_loop()
    try:
        return await _called(lambda call: loop.add_reader(descriptor, call), *others, seconds=seconds)
    finally:
        loop.remove_reader(descriptor)


async def _writable(descriptor: int, *others: asyncio.Future[int] | asyncio.Future[None]) -> bool:
    loop = asyncio.get_running_loop()
    try:
        return await _called(lambda call: loop.add_writer(descriptor, call), *others)
    finally:
        loop.remove_writer(descriptor)


async def _called(
    register: Callable[[Callable[[], None]], None],
    *others: asyncio.Future[int] | asyncio.Future[None],
    seconds: float | None = None,
) -> bool:
    """Whether what was registered got called, rather than one of the others done or the time over."""
    happened = asyncio.Event()
    register(happened.set)
    waiting = asyncio.ensure_future(happened.wait())
    try:
        await asyncio.wait({waiting, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return happened.is_set()
