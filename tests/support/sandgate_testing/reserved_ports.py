"""Ports of this machine that stay a test's own, also while nobody listens on them.

One that was free a moment ago may be somebody's by now: the kernel has a few thousand numbers for all who ask it for one. A
number that is bound and not listened on is given to nobody, and a server that sets SO_REUSEADDR, as they do, may listen
there all the same, as often as it is started.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

__all__ = ["ReservedPort"]


class ReservedPort:
    """One port of 127.0.0.1, until it is closed."""

    def __init__(self) -> None:
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.number: int = self._holder.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others have it; whoever listens there goes on."""
        self._holder.close()
