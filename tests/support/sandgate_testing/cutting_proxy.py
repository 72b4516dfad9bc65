"""A TCP connection that can be cut: a proxy between a client and a server, which passes bytes until it is told otherwise.

A wrapper and no mock: what it passes it does not read. Everything it holds ends with the ``with`` block.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

__all__ = ["CuttingProxy"]

_PIECE = 64 * 1024
#: Closing sends a reset, so that the other side learns of it at once and not at its next write.
_RESET = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Listens on a free port of this machine and passes every connection on to ``target``."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        #: Ends of connections on which nothing is passed any more.
        self._silent: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        self._closed = False
        #: Connections that were accepted so far.
        self.accepted = 0

    @property
    def address(self) -> str:
        """For a gRPC target."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Break off every connection there is. New ones are passed on as before."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for ends in pairs:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with contextlib.suppress(OSError):
                    # Wakes the thread that reads from it; only then does the last close below reset the connection.
                    end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Swallow what comes on every connection there is, as a network does that is gone. New ones are passed on."""
        with self._lock:
            self._silent = {end for ends in self._pairs for end in ends}

    def refuse(self) -> None:
        """Break off every connection, and break each new one off as well."""
        self._passing.clear()
        self.cut()

    def resume(self) -> None:
        """Pass on what comes from now on."""
        self._passing.set()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._passing.set()
        # Closing alone does not wake a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if not self._passing.is_set() or not self._join(near):
                near.close()

    def _join(self, near: socket.socket) -> bool:
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            return False
        far.settimeout(None)
        with self._lock:
            self._pairs.add((near, far))
        # Cut or closed meanwhile: the threads below see it at their first read.
        if self._closed or not self._passing.is_set():
            self.cut()
        done = threading.Barrier(2, action=lambda: self._close(near, far))
        self._start(self._pass_on, near, far, done)
        self._start(self._pass_on, far, near, done)
        return True

    def _pass_on(self, source: socket.socket, sink: socket.socket, done: threading.Barrier) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if source not in self._silent:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        done.wait(10)

    def _close(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._pairs.discard((near, far))
        near.close()
        far.close()
