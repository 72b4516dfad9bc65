"""What a handle is without its reading: the state that sync and async handles share."""

from __future__ import annotations

from sandgate.client.following import Following
from sandgate.client.process_calls import Target
from sandgate.client.transcript import Transcript

__all__ = ["Handle"]


class Handle:
    """One process that is followed, as far as it was read."""

    def __init__(self, target: Target, *, terminal: bool, max_output_bytes: int) -> None:
        self._target = target
        self._following = Following(target)
        self._terminal = terminal
        self._transcript = Transcript(max_output_bytes)
        self._flushed = False

    @property
    def pid(self) -> int:
        """The process id inside the sandbox."""
        return self._following.pid

    @property
    def stdout(self) -> str:
        """What was read so far, as far as it is kept."""
        return self._transcript.stdout

    @property
    def stderr(self) -> str:
        """What was read so far, as far as it is kept."""
        return self._transcript.stderr

    @property
    def stdout_bytes(self) -> bytes:
        """As ``stdout``, for output that is not text."""
        return self._transcript.stdout_bytes

    @property
    def stderr_bytes(self) -> bytes:
        """As ``stderr``, for output that is not text."""
        return self._transcript.stderr_bytes

    @property
    def pty_bytes(self) -> bytes:
        """What a terminal has written, as ``stdout_bytes``; its process has no other output."""
        return self._transcript.pty_bytes

    @property
    def truncated(self) -> bool:
        """Whether earlier output was left out for ``max_output_bytes``."""
        return self._transcript.truncated

    @property
    def exit_code(self) -> int | None:
        """None while the end was not read; -1 after death by a signal."""
        return None if self._following.end is None else self._following.end.exit_code

    @property
    def error(self) -> str | None:
        """Why it did not end well, for example ``exit status 3`` or ``signal: killed``."""
        return None if self._following.end is None else self._following.end.error

    @property
    def reconnects(self) -> int:
        """How often it attached again."""
        return self._following.reconnects

    @property
    def last_seq(self) -> int:
        """The number of the last piece of output that was read; ``connect(pid, from_seq=last_seq + 1)`` goes on there."""
        return self._following.last_seq

    def disconnect(self) -> None:
        """Stop following; the process goes on, and whoever is reading sees the end of the output."""
        self._following.disconnect()
