"""Terminals: a pair of devices, of which the agent keeps the master (P29, A29)."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from dataclasses import dataclass

from sandgate_errors import InvalidArgument

__all__ = ["Size", "Terminal"]

_LARGEST = 0xFFFF


@dataclass(frozen=True, kw_only=True)
class Size:
    """Columns and rows of a terminal."""

    cols: int
    rows: int

    def check(self) -> None:
        if self.cols > _LARGEST or self.rows > _LARGEST:
            raise InvalidArgument(f"a terminal has at most {_LARGEST} columns and rows")


class Terminal:
    """The master side."""

    def __init__(self, master: int) -> None:
        self.master = master
        os.set_blocking(master, False)

    @classmethod
    def open(cls, size: Size, *, owner: int | None) -> tuple[Terminal, int]:
        """A terminal and its other side, which belongs to ``owner`` so that programs can open it by name."""
        try:
            master, slave = os.openpty()
        except OSError as error:
            raise InvalidArgument(f"the system gives no terminal: {error.strerror}") from None
        try:
            if owner is not None:
                os.fchown(slave, owner, -1)
            terminal = cls(master)
            terminal.resize(size)
        except BaseException:
            os.close(master)
            os.close(slave)
            raise
        return terminal, slave

    def resize(self, size: Size) -> None:
        """Set the size; the kernel tells the foreground program with SIGWINCH."""
        size.check()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.cols, 0, 0))

    def close(self) -> None:
        os.close(self.master)
