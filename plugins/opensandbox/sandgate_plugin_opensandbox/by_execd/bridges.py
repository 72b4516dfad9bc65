"""Between a descriptor of ours and a socket of execd: bytes on their way, no faster than they are taken.

The agent's own parts read and write descriptors, as those of a program are. Here these are pipes, or a pair of sockets for a
terminal, whose other ends this module serves.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from sandgate_agent.descriptors import Descriptors
from sandgate_agent.pty import Size, Terminal
from sandgate_agent.retention import Stream
from sandgate_agent.stdin import Stdin
from sandgate_errors import Unimplemented

__all__ = ["Bridges", "FarTerminal", "read_some", "write_all", "write_some"]

_PIECE = 64 * 1024


class _OpenStdin(Stdin):
    """One whose end nobody can tell the program of."""

    async def close_in_turn(self) -> None:
        raise Unimplemented("execd cannot close the standard input of a command: kill it, or start it without input")


class FarTerminal(Terminal):
    """A terminal in the sandbox; here is one of a pair of sockets."""

    def __init__(self, master: int) -> None:
        super().__init__(master)
        self.on_resize: Callable[[Size], None] = lambda _: None

    def resize(self, size: Size) -> None:
        size.check()
        self.on_resize(size)


class Bridges(Descriptors):
    """The descriptors of a command that execd runs; ``theirs`` are stdin, stdout and stderr, or one socket."""

    input_pipe = _OpenStdin

    def _open_terminal(self, size: Size, owner: int | None) -> None:
        ours, theirs = socket.socketpair()
        self.theirs.append(theirs.detach())
        self.terminal = FarTerminal(ours.detach())
        self.outputs[Stream.PTY] = self.terminal.master
        self.stdin = Stdin(self.terminal.master, owned=False)


async def read_some(fd: int) -> bytes:
    """The next bytes; none at the end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, _PIECE)
        except BlockingIOError:
            await _ready(fd, loop.add_reader, loop.remove_reader)
        except ConnectionResetError:
            return b""


def write_some(fd: int, data: memoryview) -> memoryview:
    """What there is no room for now. Raises BrokenPipeError when nobody reads any more."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            break
    return data


async def write_all(fd: int, data: memoryview) -> None:
    """Returns once the reader's side has room for all. Raises BrokenPipeError when nobody reads any more."""
    loop = asyncio.get_running_loop()
    while rest := write_some(fd, data):
        data = rest
        await _ready(fd, loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _wake, ready)
    try:
        await ready
    finally:
        remove(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
