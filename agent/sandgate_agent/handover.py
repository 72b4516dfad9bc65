"""Handing open files over to a caller on the same machine, which then reads them past the agent and past gRPC.

A second socket lies beside the one that gRPC listens on: its path has :data:`SUFFIX` behind it (docs/architecture.md, "Large
downloads"). Who may connect is decided as for the first one, by the folder and the mode; who may ask, by the token.

One connection (SOCK_SEQPACKET) is one file. The question is one packet: token, name of the acting user (empty: the default
user) and path, with a NUL between them. The answer is one packet: a ``ReadFileResponse.Header``, with the descriptor of a
regular file that was opened as ``ReadFile`` opens it. Where there is no answer the connection ends; ``ReadFile`` says why.

The connection then stays until the caller has enough. Its end tells the caller that the sandbox is gone: what a killed
sandbox had in its files is not handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from sandgate_agent.content import Reader
from sandgate_errors import SandgateError

__all__ = ["SUFFIX", "Handover", "Opener"]

log = logging.getLogger(__name__)

SUFFIX = ".files"
#: Path and acting user to the open file and the answer that describes it. Raises errors of the taxonomy.
Opener = Callable[[str, str | None], Awaitable[tuple[Reader, bytes]]]

#: Files at once. A caller beyond that is sent away, and takes the other road.
_MOST_SESSIONS = 64
#: A caller asks at once. One that does not holds a place that others need.
_QUESTION_SECONDS = 5
#: A token, the longest name and the longest path.
_LARGEST_QUESTION = 16 * 1024
_PARTS = 3


class Handover:
    """Listens beside ``path``. A connection is owned here, as no gRPC call belongs to it."""

    def __init__(self, path: str, *, token: bytes, opener: Opener) -> None:
        self._path = path + SUFFIX
        self._token = token
        self._opener = opener
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._sessions: set[asyncio.Task[None]] = set()

    def open(self, *, mode: int) -> None:
        """Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener.bind(self._path)
        os.chmod(self._path, mode)
        self._listener.listen(_MOST_SESSIONS)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        # As gRPC does with its own. Not possible where the folder is out of the agent's reach by then.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for session in self._sessions:
            session.cancel()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left for it, or the caller has gone: in the first case it would be tried without a pause.
            log.warning("files cannot be handed over for a while: %s", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1, self._go_on)
            return
        if len(self._sessions) >= _MOST_SESSIONS:
            sock.close()
            return
        sock.setblocking(False)
        session = asyncio.create_task(self._serve(sock))
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)

    def _go_on(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                async with asyncio.timeout(_QUESTION_SECONDS):
                    question = await self._loop.sock_recv(sock, _LARGEST_QUESTION)
                if await self._answer(sock, question):
                    # Nothing more is said; what comes is the end.
                    await self._loop.sock_recv(sock, 1)
            except (SandgateError, TimeoutError, OSError):
                return
            except Exception:
                log.exception("a file could not be handed over")

    async def _answer(self, sock: socket.socket, question: bytes) -> bool:
        """Whether there is an answer."""
        token, *words = question.split(b"\0", _PARTS - 1)
        if not hmac.compare_digest(token, self._token) or len(words) < _PARTS - 1:
            return False
        try:
            user, path = (word.decode() for word in words)
        except UnicodeDecodeError:
            return False
        reader, header = await self._opener(path, user or None)
        try:
            reader.hand_over(sock, header)
        finally:
            reader.close()
        return True
