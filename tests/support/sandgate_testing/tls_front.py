"""What stands in front of a gateway for clients that speak HTTPS only: it ends TLS and passes bytes, by HTTP/1.1.

Its certificate is for one domain and the names below it. That they lead here is up to the client: no test can make DNS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["TlsFront"]

_PIECE = 64 * 1024
_PATIENCE = 20.0


class TlsFront:
    """Listens on a free port of this machine from the beginning of the ``with`` block to its end."""

    def __init__(self, domain: str, folder: Path) -> None:
        """``folder`` takes certificate and key. Raises CalledProcessError or FileNotFoundError without openssl."""
        #: What clients must trust.
        self.certificate = folder / "front.pem"
        key = folder / "front.key"
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        argv += ["-days", "2", "-subj", f"/CN={domain}", "-addext", f"subjectAltName=DNS:{domain},DNS:*.{domain}"]
        argv += ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(argv, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._context.set_alpn_protocols(["http/1.1"])
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._passing: set[asyncio.Task[None]] = set()

    def lead_to(self, target: tuple[str, int]) -> None:
        """Where connections go from now on."""
        self._target = target

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(_PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()
        if self._passing:
            await asyncio.wait(self._passing)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._pass(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways until one side ends: a response that the gateway breaks off must break off here as well."""
        try:
            with contextlib.suppress(OSError):
                back_reader, back_writer = await asyncio.open_connection(*self._target or ("", 0))
                try:
                    ways = [
                        asyncio.ensure_future(_copy(reader, back_writer)),
                        asyncio.ensure_future(_copy(back_reader, writer)),
                    ]
                    try:
                        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for way in ways:
                            way.cancel()
                        await asyncio.gather(*ways, return_exceptions=True)
                finally:
                    back_writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), _PATIENCE)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
