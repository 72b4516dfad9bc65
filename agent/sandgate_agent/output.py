"""Output of one process: read as it comes, numbered, fanned out to whoever follows (behaviour.md 4).

Bytes are never decoded, joined or split by lines. A follower who reads slowly fills its queue; a full queue pauses the
reading, so the pipe fills and the process waits (O15). Without followers everything is read and thrown away, so that
the process never waits for nobody (O16). The last pieces stay for replay and hold nothing up.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sandgate_agent.mailbox import Mailbox
from sandgate_errors import SandgateError

__all__ = ["Output", "Piece", "Stream", "output_pipe"]

#: Pieces for one follower, and pieces kept for replay.
QUEUE_PIECES = 64
#: Pieces taken in one turn of the event loop: enough that a turn's cost does not count, few enough to be fair.
_TURN_PIECES = 16
#: Fewer switches between agent and process than the default of 64 KiB, and within what an unprivileged user may have.
_PIPE_SIZE = 256 * 1024
#: What one descriptor can still hold when its process is dead: the largest pipe a sandbox's user may make of it.
_DRAIN_BYTES = 1024 * 1024


class Stream(enum.IntEnum):
    """Where a piece was written to; the numbers are those of the event's fields."""

    STDOUT = 1
    STDERR = 2
    PTY = 3

    @property
    def piece_size(self) -> int:
        return 16 * 1024 if self is Stream.PTY else 32 * 1024


class Piece(NamedTuple):
    """Bytes of one stream, never empty."""

    seq: int
    stream: Stream
    data: bytes


def output_pipe() -> tuple[int, int]:
    """A pipe for a program's output: our end, which does not block, and the program's."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    except OSError:
        # The user has used up its pipe memory: the default size works, only slower.
        pass
    return reader, writer


class Output:
    """Owns the reading ends of one process's streams."""

    def __init__(self, sources: Mapping[Stream, int]) -> None:
        self._open = dict(sources)
        self._on_end: Callable[[], None] = lambda: None
        self._followers: list[Mailbox[Piece]] = []
        self._loop = asyncio.get_running_loop()
        self._next_seq = 1
        self._reading = False
        self.retained: deque[Piece] = deque(maxlen=QUEUE_PIECES)

    @property
    def at_end(self) -> bool:
        return not self._open

    def start(self, *, on_end: Callable[[], None]) -> None:
        """Begin to read; ``on_end`` is called once, when every stream is at its end."""
        self._on_end = on_end
        self._resume()

    def follow(self) -> Mailbox[Piece]:
        """A new follower: gets every piece from now on."""
        mailbox: Mailbox[Piece] = Mailbox(QUEUE_PIECES, on_room=self._resume)
        self._followers.append(mailbox)
        return mailbox

    def leave(self, mailbox: Mailbox[Piece]) -> None:
        """A follower left; if it was the one that held the process up, reading goes on at once."""
        mailbox.close()
        if mailbox in self._followers:
            self._followers.remove(mailbox)
            self._resume()

    def finish(self, failure_for: Callable[[Mailbox[Piece]], SandgateError | None]) -> None:
        """Pass on what the descriptors hold now, close them and end every follower's stream."""
        self._pause()
        for stream in list(self._open):
            self._drain(stream)
        for mailbox in self._followers:
            mailbox.end(failure_for(mailbox))
        self._followers.clear()

    def fail_all(self, failure: SandgateError) -> None:
        """End every follower's stream now. Reading goes on."""
        for mailbox in self._followers:
            mailbox.fail(failure)
        self._followers.clear()
        self._resume()

    def _resume(self) -> None:
        if not self._reading and self._open and not self._held_up():
            self._reading = True
            for stream, fd in self._open.items():
                self._loop.add_reader(fd, self._readable, stream, fd)

    def _pause(self) -> None:
        self._reading = False
        for fd in self._open.values():
            self._loop.remove_reader(fd)

    def _held_up(self) -> bool:
        return any(mailbox.full for mailbox in self._followers)

    def _readable(self, stream: Stream, fd: int) -> None:
        size = stream.piece_size
        for _ in range(_TURN_PIECES):
            data = _read(fd, size)
            if data is None:
                return
            if not data:
                self._ended(stream)
                return
            self._publish(stream, data)
            if self._held_up():
                self._pause()
                return
            if len(data) < size and stream is not Stream.PTY:
                # A short read of a pipe emptied it.
                return

    def _publish(self, stream: Stream, data: bytes) -> None:
        piece = Piece(self._next_seq, stream, data)
        self._next_seq += 1
        self.retained.append(piece)
        for mailbox in self._followers:
            mailbox.put(piece)

    def _ended(self, stream: Stream) -> None:
        self._close(stream)
        if not self._open:
            self._on_end()

    def _close(self, stream: Stream) -> None:
        fd = self._open.pop(stream)
        self._loop.remove_reader(fd)
        # A terminal's descriptor belongs to the terminal.
        if stream is not Stream.PTY:
            os.close(fd)

    def _drain(self, stream: Stream) -> None:
        left = _DRAIN_BYTES
        while left > 0 and (data := _read(self._open[stream], stream.piece_size)):
            left -= len(data)
            self._publish(stream, data)
        self._close(stream)


def _read(fd: int, size: int) -> bytes | None:
    """Bytes; none at the end of file; None when there is nothing now."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
    except OSError as error:
        # How a terminal says that nobody has its other side open any more.
        if error.errno == errno.EIO:
            return b""
        raise
