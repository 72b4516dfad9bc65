"""Input of one process: whole writes, one caller at a time (A15-A23), never blocking the event loop."""

from __future__ import annotations

import asyncio
import os

from sandgate_errors import Internal

__all__ = ["Stdin"]


class Stdin:
    """The writing end of a pipe, or the master of a terminal."""

    def __init__(self, fd: int, *, owned: bool) -> None:
        self._fd = fd
        self._owned = owned
        self._open = True
        # Fair: callers write in the order they came, and the bytes of one call stay together (A23).
        self._turn = asyncio.Lock()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)

    async def write(self, data: bytes) -> None:
        """Return when the last byte is in the pipe. Raises Internal when the pipe is or gets closed.

        Cancelled, it may have written a part, as any writer to a pipe may; the next caller's bytes follow that part.
        """
        async with self._turn:
            rest = memoryview(data)
            while rest:
                self._check()
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    await self._writable()
                except (BrokenPipeError, OSError) as error:
                    raise Internal(f"the process does not read its input any more: {error.strerror}") from None
            self._check()

    async def close_in_turn(self) -> None:
        """Close after the writes that came before; a second time does nothing."""
        async with self._turn:
            self.close()

    def close(self) -> None:
        """Close now; a writer that waits gets its error."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_writer(self._fd)
        if self._owned:
            os.close(self._fd)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if not self._open:
            raise Internal("stdin of the process is closed")

    async def _writable(self) -> None:
        self._waiter = self._loop.create_future()
        self._loop.add_writer(self._fd, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._open:
                self._loop.remove_writer(self._fd)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
