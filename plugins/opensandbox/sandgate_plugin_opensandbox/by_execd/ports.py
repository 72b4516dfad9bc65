"""Ports of the sandbox at the endpoints that the server reports: relays that let HTTP and WebSocket pass, and nothing else.

What comes is one request of HTTP/1.1, as the edge sends it. Its head is addressed to the relay: the path gets the relay's in
front, and the headers that the relay asks for. Everything after it passes as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import unquote_to_bytes, urlsplit

from sandgate_agent.tunnels import Admission
from sandgate_errors import DataLoss, InvalidArgument, SandboxUnreachable
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.server import Endpoint

__all__ = ["FarPorts", "FarTunnel"]

#: Seconds.
_CONNECT_LIMIT = 10.0
_PIECE = 256 * 1024
#: Bytes. The edge lets no longer head pass.
_LONGEST_HEAD = 256 * 1024
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.1")


class FarPorts:
    """All ports of one sandbox (``sandgate_agent.services.agent.Ports``)."""

    def __init__(self, client: Client, *, closed: frozenset[int], tls: Callable[[], ssl.SSLContext]) -> None:
        self._client = client
        self._admission = Admission(closed)
        self._tls = tls

    @contextlib.asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[FarTunnel]:
        """A tunnel, closed at the end. Raises SandboxUnreachable, InvalidArgument, ResourceExhausted."""
        with self._admission.to(port):
            endpoint = await self._client.endpoint(port)
            reader, writer = await self._connected(endpoint)
            try:
                yield FarTunnel(reader, writer, endpoint)
            finally:
                writer.transport.abort()

    async def _connected(self, endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(endpoint.base)
        tls = self._tls() if parts.scheme == "https" else None
        port = parts.port or (80 if tls is None else 443)
        try:
            async with asyncio.timeout(_CONNECT_LIMIT):
                return await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=_PIECE)
        except (OSError, TimeoutError) as error:
            self._client.moved()
            raise SandboxUnreachable("the sandbox's ports cannot be reached", retry_after=1) from error


class FarTunnel:
    """One exchange with a server in the sandbox. Raises DataLoss when the connection breaks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: Endpoint) -> None:
        self._reader = reader
        self._writer = writer
        self._endpoint = endpoint
        #: Of the request; None once it has passed.
        self._head: bytearray | None = bytearray()

    async def read(self) -> bytes:
        with _breaking():
            return await self._reader.read(_PIECE)

    async def write(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _LONGEST_HEAD:
                    raise DataLoss("what was sent to the port is no HTTP request")
                return
            data = addressed(bytes(self._head[:end]), self._endpoint) + bytes(self._head[end:])
            self._head = None
        with _breaking():
            self._writer.write(data)
            await self._writer.drain()

    def end(self) -> None:
        # Not told on: a relay takes half a connection that has ended for a client who has left. The head says to both
        # sides where the request ends.
        return


def addressed(head: bytes, endpoint: Endpoint) -> bytes:
    """A request's head without its last line ends, for a relay. Raises DataLoss for what is none, InvalidArgument."""
    line, *fields = head.split(b"\r\n")
    if (found := _REQUEST_LINE.fullmatch(line)) is None:
        raise DataLoss("what was sent to the port is no HTTP/1.1 request")
    method, target = found.groups()
    if _leads_out(target):
        # Between us and the sandbox somebody may walk it, and the next sandbox has its ports beside this one's.
        raise InvalidArgument("the path leads out of the port")
    parts = urlsplit(endpoint.base)
    target = parts.path.rstrip("/").encode() + (target if target.startswith(b"/") else b"/" + target)
    if parts.query:
        target += (b"&" if b"?" in target else b"?") + parts.query.encode()
    # Our own come in place of what the client sent under their names.
    own = {name.lower(): (name, value) for name, value in endpoint.headers.items()}
    if not _is_address(parts.hostname or ""):
        # An ingress finds the sandbox by it.
        own["host"] = ("Host", parts.netloc.rpartition("@")[2])
    kept = [field for field in fields if field.partition(b":")[0].strip().decode("latin-1").lower() not in own]
    added = [f"{name}: {value}".encode("latin-1", errors="replace") for name, value in own.values()]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method, target), *kept, *added])


def _leads_out(target: bytes) -> bool:
    """Whether the path climbs above its root for whoever takes any of it literally, once or twice decoded."""
    path = target.partition(b"?")[0].partition(b"#")[0]
    return any(map(_climbs, (path, once := unquote_to_bytes(path), unquote_to_bytes(once))))


def _climbs(path: bytes) -> bool:
    depth = 0
    for name in path.replace(b"\\", b"/").split(b"/"):
        # Some leave what comes after a semicolon out.
        name = name.partition(b";")[0]
        depth += (name not in {b"", b"."}) - 2 * (name == b"..")
        if depth < 0:
            return True
    return False


def _is_address(host: str) -> bool:
    """Nobody chooses among sandboxes by an address, so the client's own Host passes."""
    return host == "localhost" or ":" in host or host.replace(".", "").isdecimal()


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataLoss(f"the connection broke: {error.strerror or 'failed'}") from None
