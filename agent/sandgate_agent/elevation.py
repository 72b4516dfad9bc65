"""Running commands as other accounts for whoever asks: the agent's side of ``sudo`` (behaviour.md U9).

Every process of the sandbox can reach the socket, and none needs a password: that is what a sandbox's ``sudo`` is. So the
border that this holds is not between accounts but around the agent: whatever is sent, the agent neither stalls nor grows,
and the command runs in the sandbox, through the launcher, like any other.

One connection is one command. Messages (see :mod:`sandgate_agent.frames`):

=========  ============================================================================================
request    ``{"user", "argv", "env", "cwd"}`` with stdin, stdout and stderr; ``"terminal": true`` makes the first
           the controlling terminal
then       ``{"signal": number}``, for the command's process group
answer     ``{"exit": wait status}``, or ``{"refused": text}``
=========  ============================================================================================

A connection that ends before its command ends it: a killed ``sudo`` must not leave behind what nobody sees any more. The
command bears the mark of the one that asked, so that it is of its family.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import struct
from typing import Any

from sandgate_agent import frames, sudo
from sandgate_agent.accounts import Account, Accounts
from sandgate_agent.interpreter import interpreter_command
from sandgate_agent.launcher import Child, Launcher, Program
from sandgate_agent.marks import mark_of
from sandgate_errors import InvalidArgument, SandgateError

__all__ = ["Elevation"]

log = logging.getLogger(__name__)

#: Commands at once. Each is a socket and a process; what waits to be accepted beyond that waits.
_MOST_SESSIONS = 256
#: The kernel takes no more arguments and variables than this.
_LARGEST_REQUEST = 6 * 1024 * 1024
_MOST_FDS = 3
#: A ``sudo`` asks at once. One that does not holds a place that others need.
_REQUEST_SECONDS = 10
#: Messages that wait while the command is being started.
_MOST_WAITING = 64
_SIGNALS = frozenset(signal.valid_signals())
_CREDENTIALS = struct.Struct("3i")
_WRAPPER = """\
#!/bin/sh
{libraries}exec {interpreter} -I -S -X utf8 {program} {socket} "$@"
"""
_LIBRARIES = """\
export {saved}="${{LD_LIBRARY_PATH-}}"
export LD_LIBRARY_PATH={path}
"""
#: Libraries of the sandbox's system do not belong into an interpreter that brings its own. The usual sudo passes no such
#: variable on either.
_NO_LIBRARIES = "unset LD_PRELOAD LD_AUDIT\n"


class Elevation:
    """Listens in ``folder`` and keeps the program there, in ``bin``."""

    def __init__(self, folder: str, *, accounts: Accounts, launcher: Launcher) -> None:
        self._folder = folder
        self._accounts = accounts
        self._launcher = launcher
        self._socket = socket.socket(socket.AF_UNIX)
        # A command lasts as long as it likes, and whoever asked for it is not a call: the agent owns them all.
        self._sessions: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def programs(self) -> str:
        """The folder for PATH."""
        return f"{self._folder}/bin"

    def open(self) -> None:
        """Raises OSError."""
        address = f"{self._folder}/sudo.sock"
        os.makedirs(self.programs, mode=0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        self._socket.setblocking(False)
        self._socket.bind(address)
        # Connecting takes the right to write.
        os.chmod(address, 0o666)  # noqa: S103
        self._socket.listen(_MOST_SESSIONS)
        _write_program(f"{self.programs}/sudo", address)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """The commands themselves end with everything else that the launcher started."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for session in self._sessions:
            session.cancel()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            # The caller left, or this process has no descriptor for it now: the next look comes soon enough.
            if not isinstance(error, BlockingIOError):
                self._pause()
            return
        session = asyncio.create_task(self._serve(sock))
        self._sessions.add(session)
        session.add_done_callback(self._left)
        if len(self._sessions) >= _MOST_SESSIONS:
            self._loop.remove_reader(self._socket)

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.call_later(1, self._go_on)

    def _left(self, session: asyncio.Task[None]) -> None:
        self._sessions.discard(session)
        self._go_on()

    def _go_on(self) -> None:
        if self._socket.fileno() >= 0 and len(self._sessions) < _MOST_SESSIONS:
            self._loop.add_reader(self._socket, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(sock)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                received = await connection.receive()
            if received is None:
                connection.send({"refused": "the request is too large or broken"})
                return
            child = await self._start(*received, mark=_mark_of_peer(sock))
            await _attend(connection, child)
        except SandgateError as error:
            connection.send({"refused": error.message})
        except TimeoutError:
            connection.send({"refused": "the request did not come"})
        except Exception:
            log.exception("a request for another account failed")
            connection.send({"refused": "internal error"})
        finally:
            connection.close()

    async def _start(self, message: frames.Message, fds: list[int], *, mark: int) -> Child:
        try:
            account, program = self._read(message, fds, mark)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return await self._launcher.launch(account, program)

    def _read(self, message: frames.Message, fds: list[int], mark: int) -> tuple[Account, Program]:
        """Raises InvalidArgument for anything but a request, Unauthenticated for an account that does not exist."""
        argv, env, cwd, user = (message.get(name) for name in ("argv", "env", "cwd", "user"))
        if not isinstance(argv, list) or not argv or not all(_is_text(word) for word in argv) or not argv[0]:
            raise InvalidArgument("there is no command")
        if not isinstance(env, dict) or not all(
            name and "=" not in name and _is_text(name) and _is_text(value) for name, value in env.items()
        ):
            raise InvalidArgument("the variables are not valid")
        if not _is_text(cwd) or not isinstance(cwd, str) or not isinstance(user, str) or len(fds) != _MOST_FDS:
            raise InvalidArgument("the request is not complete")
        program = Program(argv=argv, env=env, cwd=cwd, fds=fds, terminal=message.get("terminal") is True, mark=mark)
        return self._accounts.find(user), program


def _is_text(value: object) -> bool:
    """Whether a program can be given it: text without NUL that can be made bytes again."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def _mark_of_peer(sock: socket.socket) -> int:
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return mark_of(pid) or 0


async def _attend(connection: _Connection, child: Child) -> None:
    """Until the command has ended, which it is made to when nobody waits for it any more."""
    listening = asyncio.ensure_future(_pass_signals(connection, child))
    try:
        waited: tuple[asyncio.Future[Any], ...] = (listening, child.ended)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not child.ended.done():
            with contextlib.suppress(PermissionError):
                child.signal_group(signal.SIGKILL)
        connection.send({"exit": await child.ended})
    finally:
        # Owned here. What it would still raise is that the connection broke, which is an end like any other.
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        child.close()


async def _pass_signals(connection: _Connection, child: Child) -> None:
    """Returns when the connection ends."""
    while (received := await connection.receive()) is not None:
        message, fds = received
        for fd in fds:
            os.close(fd)
        number = message.get("signal")
        if isinstance(number, int) and number in _SIGNALS:
            with contextlib.suppress(PermissionError):
                child.signal_group(number)


class _Connection:
    """Messages from one caller, who may be hostile: everything that is kept for it is bounded."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = frames.Decoder(largest=_LARGEST_REQUEST, most_fds=_MOST_FDS)
        self._received: list[tuple[frames.Message, list[int]]] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    async def receive(self) -> tuple[frames.Message, list[int]] | None:
        """The next message with its descriptors, which are the caller's to close; None at the end."""
        while not self._received and not self._ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._received.pop(0) if self._received else None

    def send(self, message: frames.Message) -> None:
        """Answers are few and small: who has no room for them does not read them."""
        with contextlib.suppress(OSError):
            self._sock.send(frames.encode(message))

    def close(self) -> None:
        self._stop()
        self._sock.close()
        self._decoder.close()
        for _, fds in self._received:
            for fd in fds:
                os.close(fd)
        self._received.clear()

    def _readable(self) -> None:
        try:
            alive = frames.read(self._sock, self._decoder)
            for message, fds in self._decoder.messages():
                self._received.append((message, [fd for fd in fds if fd is not None]))
            alive = alive and len(self._received) < _MOST_WAITING
        except BlockingIOError:
            return
        except (OSError, frames.BadFrame):
            alive = False
        if not alive:
            self._stop()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._sock)


def _write_program(path: str, address: str) -> None:
    """The wrapper: the interpreter of the agent is not always found, or not whole, without help."""
    interpreter = interpreter_command()
    text = _WRAPPER.format(
        libraries=_libraries(through_loader=len(interpreter) > 1),
        interpreter=shlex.join(interpreter),
        program=shlex.quote(os.path.realpath(sudo.__file__)),
        socket=shlex.quote(address),
    )
    # Made anew and not written in place: what stands there may be a link that the sandbox's code made.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _libraries(*, through_loader: bool) -> str:
    if through_loader:
        return _NO_LIBRARIES
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return _LIBRARIES.format(saved=sudo.LIBRARIES_OF_CALLER, path=shlex.quote(path)) if path else ""
