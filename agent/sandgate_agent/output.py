"""Output of one process: read as it comes, numbered, fanned out to whoever follows (behaviour.md 4, X11-X14).

Bytes are never decoded, joined or split by lines. A follower who reads slowly fills its queue; a full queue pauses the
reading, so the pipe fills and the process waits (O15). Without followers everything is read and thrown away, so that
the process never waits for nobody (O16). The last pieces stay for replay and hold nothing up.

*Strict* output is never thrown away unread: without followers it waits like a full queue does, until somebody attaches
or the patience with that is over (X13).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Mapping

from sandgate_agent.countdown import Countdown
from sandgate_agent.mailbox import Mailbox
from sandgate_agent.retention import Past, Piece, Retention, Stream
from sandgate_errors import SandgateError

__all__ = ["Follower", "Output", "output_pipe"]

#: Pieces for one follower.
QUEUE_PIECES = 64
#: Bytes kept for replay: as many full pieces (X13).
RETAINED_BYTES = QUEUE_PIECES * Stream.STDOUT.piece_size
#: Bytes of strict output that are kept besides though somebody took them: transports hold megabytes that a cut connection
#: loses.
_IN_FLIGHT_BYTES = 8 * 1024 * 1024
#: How long strict output waits for a reader before the process is given up (X13).
STALL_SECONDS = 30.0
#: Pieces taken in one turn of the event loop: enough that a turn's cost does not count, few enough to be fair.
_TURN_PIECES = 16
#: Fewer switches between agent and process than the default of 64 KiB, and within what an unprivileged user may have.
_PIPE_SIZE = 256 * 1024
#: What one descriptor can still hold when its process is dead: the largest pipe a sandbox's user may make of it.
_DRAIN_BYTES = 1024 * 1024


class Follower(Mailbox[Piece]):
    """The queue of one stream: what it gets of the past, then every piece from now on."""

    def __init__(self, past: Past, on_room: Callable[[], None]) -> None:
        super().__init__(QUEUE_PIECES, on_room=on_room)
        #: The number of the piece that the stream begins with.
        self.first_seq = past.first_seq
        self._past = past
        #: Bytes that the reader has not taken yet.
        self.lag = past.weight

    @property
    def waiting(self) -> int:
        return self._past.left + super().waiting

    def put(self, item: Piece) -> None:
        if not self._ended:
            self.lag += item.weight
        super().put(item)

    def _pop(self) -> Piece:
        piece = next(self._past) if self._past.left else super()._pop()
        self.lag -= piece.weight
        return piece


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

    def __init__(
        self,
        sources: Mapping[Stream, int],
        *,
        on_stall: Callable[[], None] | None = None,
        tap: Callable[[Stream, bytes], None] | None = None,
    ) -> None:
        """``on_stall`` makes it strict, and is called once when nobody has read for too long; ``tap`` sees every piece."""
        self._tap = tap
        self._open = dict(sources)
        self._on_end: Callable[[], None] = lambda: None
        self._on_stall = on_stall
        self._followers: list[Follower] = []
        self._loop = asyncio.get_running_loop()
        #: The number that the next piece will have.
        self.next_seq = 1
        #: Up to here somebody took it.
        self._taken_seq = 0
        self._reading = False
        self._stall: Countdown | None = None
        self._stalled_with = 0
        #: The end of it all, for who attaches.
        self.retained = Retention(RETAINED_BYTES + (0 if on_stall is None else _IN_FLIGHT_BYTES))

    @property
    def at_end(self) -> bool:
        return not self._open

    def start(self, *, on_end: Callable[[], None]) -> None:
        """Begin to read; ``on_end`` is called once, when every stream is at its end."""
        self._on_end = on_end
        self._resume()

    def follow(self, from_seq: int | None = None) -> Follower:
        """A new follower: gets what is retained from there on, if asked for, and every piece from now on."""
        follower = Follower(self.retained.since(from_seq, self.next_seq), self._resume)
        self._followers.append(follower)
        self._resume()
        return follower

    def leave(self, follower: Follower) -> None:
        """A follower left; if it was the one that held the process up, reading goes on at once."""
        self._taken_seq = max(self._taken_seq, self.next_seq - 1 - follower.waiting)
        follower.close()
        if follower in self._followers:
            self._followers.remove(follower)
            self._resume()
            if self._held_up():
                self._count_stall()

    def finish(self, failure_for: Callable[[Follower], SandgateError | None]) -> None:
        """Pass on what the descriptors hold now, close them and end every follower's stream."""
        self._pause()
        self._end_stall()
        for stream in list(self._open):
            self._drain(stream)
        for follower in self._followers:
            follower.end(failure_for(follower))
        self._followers.clear()

    def fail_all(self, failure: SandgateError) -> None:
        """End every follower's stream now. Reading goes on."""
        for follower in self._followers:
            follower.fail(failure)
        self._followers.clear()
        self._resume()

    def _resume(self) -> None:
        if not self._reading and self._open and not self._held_up():
            self._reading = True
            self._end_stall()
            for stream, fd in self._open.items():
                self._loop.add_reader(fd, self._readable, stream, fd)

    def _pause(self) -> None:
        self._reading = False
        for fd in self._open.values():
            self._loop.remove_reader(fd)

    def _held_up(self) -> bool:
        if self._on_stall is not None and not self._followers:
            return self.next_seq - 1 - self._taken_seq >= QUEUE_PIECES
        return any(follower.full for follower in self._followers)

    def _count_stall(self) -> None:
        if self._on_stall is not None and self._stall is None:
            self._stalled_with = self._waiting()
            self._stall = Countdown(STALL_SECONDS, self._stall_over)

    def _stall_over(self) -> None:
        self._stall = None
        if self._waiting() < self._stalled_with:
            # Somebody reads, only so slowly that there is no room yet.
            self._count_stall()
        elif self._on_stall is not None:
            self._on_stall()

    def _waiting(self) -> int:
        return sum(follower.waiting for follower in self._followers)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

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
                self._count_stall()
                return
            if len(data) < size and stream is not Stream.PTY:
                # A short read of a pipe emptied it.
                return

    def _publish(self, stream: Stream, data: bytes) -> None:
        piece = Piece(self.next_seq, stream, data)
        self.next_seq += 1
        self.retained.add(piece)
        if self._tap is not None:
            self._tap(stream, data)
        for follower in self._followers:
            follower.put(piece)
        # What a follower has not taken yet is kept besides: who is cut off while it lags can have it all again.
        self.retained.forget_old(besides=max((follower.lag for follower in self._followers), default=0))

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
