"""What a process to be reads and writes: its pipes or its terminal, our ends and the program's.

Opened by :mod:`sandgate_agent.processes` before the launcher has the program started.
"""

from __future__ import annotations

import errno
import os

from sandgate_agent.output import output_pipe
from sandgate_agent.pty import Size, Terminal
from sandgate_agent.retention import Stream
from sandgate_agent.stdin import Stdin
from sandgate_errors import ResourceExhausted

__all__ = ["Descriptors"]


class Descriptors:
    """Open descriptors. ``theirs`` are the program's, and the launcher closes them; the others are ours."""

    #: What writes into a pipe.
    input_pipe: type[Stdin] = Stdin

    def __init__(self) -> None:
        self.theirs: list[int] = []
        self.outputs: dict[Stream, int] = {}
        self.stdin: Stdin | None = None
        self.terminal: Terminal | None = None

    @classmethod
    def open(cls, size: Size | None, *, stdin: bool, owner: int | None) -> Descriptors:
        """A terminal of ``size`` that belongs to ``owner``, or pipes; without ``stdin`` the program reads the null device.

        Raises ResourceExhausted where there is no room for more.
        """
        descriptors = cls()
        try:
            if size is not None:
                descriptors._open_terminal(size, owner)
            else:
                descriptors._open_pipes(stdin)
        except BaseException as error:
            for fd in descriptors.theirs:
                os.close(fd)
            descriptors.close_ours()
            if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise ResourceExhausted(f"no room for another process: {error.strerror}") from None
            raise
        return descriptors

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
            self.stdin = self.input_pipe(writer, owned=True)
        else:
            self.theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for stream in (Stream.STDOUT, Stream.STDERR):
            self.outputs[stream], writer = output_pipe()
            self.theirs.append(writer)
