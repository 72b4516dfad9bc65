"""The user's side of a command in a sandbox: terminal, standard input, signals.

The main thread reads the command's output and nothing else, because gRPC's blocking streams cannot be waited for together
with anything. Input has a thread of its own, which a full pipe in the sandbox may hold up; what signals ask for has
another, so that Ctrl-C still works then. Handlers of signals only leave a note, since they may interrupt anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from types import FrameType
from typing import Self

from sandgate.client.records import PtySize

__all__ = [
    "InputPump",
    "hold_standard_descriptors",
    "notes_of_signals",
    "raw_terminal",
    "stdin_is_terminal",
    "terminal_size",
    "write_all",
]

_READ_BYTES = 64 * 1024
#: Seconds that the end waits for a thread; one that is inside a call gets its answer when the command ends.
_FAREWELL = 2.0


def hold_standard_descriptors() -> None:
    """Give 0, 1 and 2 a meaning where the caller closed them, before a connection takes their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def stdin_is_terminal() -> bool:
    return os.isatty(0)


def terminal_size() -> PtySize:
    """Of the terminal on standard input; the usual one where it does not say."""
    try:
        rows, cols, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return PtySize()
    return PtySize(rows=rows, cols=cols) if rows and cols else PtySize()


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Every key goes to the sandbox as it is; the terminal is as before at the end, however that comes."""
    before = termios.tcgetattr(0)
    try:
        # Not the default, which throws away what was typed ahead.
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def write_all(descriptor: int, data: bytes) -> None:
    """Raises BrokenPipeError when nobody reads any more."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            # Somebody shares the other end and made it so.
            select.select([], [descriptor], [])


@contextlib.contextmanager
def notes_of_signals(actions: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """While the block runs, each signal has its action carried out in a thread, one after the other."""
    notes: SimpleQueue[int | None] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        notes.put(number)

    def carry_out() -> None:
        while (number := notes.get()) is not None:
            actions[signal.Signals(number)]()

    before = {number: signal.signal(number, note) for number in actions}
    worker = threading.Thread(target=carry_out, name="signals", daemon=True)
    worker.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        notes.put(None)
        worker.join(_FAREWELL)


class InputPump:
    """Passes standard input on, in a thread, until its end or :meth:`stop`."""

    def __init__(self, *, send: Callable[[bytes], bool], at_end: Callable[[], None]) -> None:
        """``send`` says whether it wants more; ``at_end`` is called at the end of file."""
        self._send = send
        self._at_end = at_end
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake_writer)
        self._thread.join(_FAREWELL)
        if not self._thread.is_alive():
            os.close(self._wake_reader)

    def _run(self) -> None:
        while self._wait():
            data = _read_stdin()
            if not data:
                self._at_end()
                return
            if not self._send(data):
                return

    def _wait(self) -> bool:
        """Until there is input; False when the pump was stopped."""
        waiting = select.poll()
        waiting.register(self._wake_reader, select.POLLIN)
        waiting.register(0, select.POLLIN)
        return all(descriptor != self._wake_reader for descriptor, _ in waiting.poll())


def _read_stdin() -> bytes:
    try:
        return os.read(0, _READ_BYTES)
    except BlockingIOError:
        # Somebody who shares it made it so and was faster.
        select.select([0], [], [])
        return _read_stdin()
    except OSError:
        # A terminal that is gone, or a directory: there is no more to come.
        return b""
