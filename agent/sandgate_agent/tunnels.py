"""Byte tunnels to the ports of the sandbox: from a call to a TCP connection on the loopback (behaviour.md R5, R7).

A tunnel ends one side after the other, as TCP does, and has no deadline: a web socket may be silent for hours. Nothing is
buffered beyond one piece each way, so a slow reader slows the writer. Their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

from sandgate_agent.listeners import LOOPBACK, Listeners
from sandgate_errors import DataLoss, InvalidArgument, ResourceExhausted, SandboxUnreachable

__all__ = ["Admission", "Tunnel", "Tunnels"]

#: Each takes one descriptor here and one in the program that listens.
_MOST_TUNNELS = 1024
#: Before each further try at a port where nothing listens yet (R5).
_PAUSES = (0.05, 0.15, 0.3, 0.5)
#: A connection on the loopback is made at once, unless the listener's queue is full.
_CONNECT_SECONDS = 5.0
_PIECE_BYTES = 256 * 1024
_LARGEST_PORT = 65535


class Admission:
    """Which ports may be connected to, and by how many at once."""

    def __init__(self, closed: frozenset[int], *, most: int = _MOST_TUNNELS) -> None:
        """Ports that are ``closed`` are to callers as if nothing listened on them."""
        self._closed = closed
        self._most = most
        self._open = 0

    @contextlib.contextmanager
    def to(self, port: int) -> Iterator[None]:
        """For as long as the connection is there. Raises SandboxUnreachable, InvalidArgument, ResourceExhausted."""
        if not 0 < port <= _LARGEST_PORT:
            raise InvalidArgument("a port is a number from 1 to 65535")
        if port in self._closed:
            raise SandboxUnreachable(f"nothing listens on port {port}")
        if self._open >= self._most:
            raise ResourceExhausted(f"there are {self._most} connections to ports of this sandbox already")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class Tunnels:
    """All tunnels of this agent. ``listeners`` where other sandboxes share the network; None where it is our own."""

    def __init__(
        self, listeners: Listeners | None, *, closed: frozenset[int] = frozenset(), most: int = _MOST_TUNNELS
    ) -> None:
        self._listeners = listeners
        self._admission = Admission(closed, most=most)

    @contextlib.asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[Tunnel]:
        """A tunnel, closed at the end.

        Raises SandboxUnreachable when nothing of this sandbox listens on the port, InvalidArgument, ResourceExhausted.
        """
        with self._admission.to(port), await self._connected(port) as sock:
            yield Tunnel(sock)

    async def _connected(self, port: int) -> socket.socket:
        for pause in (*_PAUSES, None):
            for address in LOOPBACK:
                if (sock := await self._try(address, port)) is not None:
                    return sock
            if pause is not None:
                await asyncio.sleep(pause)
        raise SandboxUnreachable(f"nothing listens on port {port}")

    async def _try(self, address: str, port: int) -> socket.socket | None:
        if self._listeners is None:
            return await _connect(address, port)
        met = await asyncio.to_thread(self._listeners.ours, address, port)
        sock = await _connect(address, port) if met else None
        if sock is None:
            return None
        try:
            caller = sock.getsockname()[1]
            if await asyncio.to_thread(self._listeners.still_ours, met, address, port, caller=caller):
                return sock
        except BaseException:
            sock.close()
            raise
        # It changed hands meanwhile. Nothing was sent.
        sock.close()
        return None


class Tunnel:
    """One connection. Either side may end before the other. Raises DataLoss when it breaks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        """The next bytes; none: the port's side has ended."""
        with _breaking():
            return await self._loop.sock_recv(self._socket, _PIECE_BYTES)

    async def write(self, data: bytes) -> None:
        """Returns once the kernel has taken all."""
        with _breaking():
            await self._loop.sock_sendall(self._socket, data)

    def end(self) -> None:
        """The port's side sees the end of ours."""
        with contextlib.suppress(OSError):
            # It may have gone: reading tells.
            self._socket.shutdown(socket.SHUT_WR)


async def _connect(address: str, port: int) -> socket.socket | None:
    """None when nothing listens. Raises SandboxUnreachable when what listens takes nobody."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(_CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
        if sock.getsockname() == sock.getpeername():
            # The kernel gave us the very port as our own, and TCP lets a socket connect to itself.
            sock.close()
            return None
    except TimeoutError:
        sock.close()
        raise SandboxUnreachable(f"what listens on port {port} takes no connection") from None
    except OSError:
        # Refused; or this machine has no such address.
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataLoss(f"the connection broke: {error.strerror or 'failed'}") from None
