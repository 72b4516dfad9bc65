"""One command that execd runs: its session, and the socket that carries its bytes as they are.

The session goes on when its socket is cut: it is attached again where the output stopped, as far as execd has kept it. What
execd gives once more has stdout and stderr in one, and is passed on as stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import aiohttp

from sandgate_agent.command import Command
from sandgate_agent.launcher import Child
from sandgate_agent.pty import Size
from sandgate_errors import DataLoss, Internal, NotFound, SandboxUnreachable, SandgateError
from sandgate_plugin_opensandbox.by_execd.bridges import Bridges, FarTerminal, read_some, write_all, write_some
from sandgate_plugin_opensandbox.by_execd.client import Client

__all__ = ["FarChild", "Session"]

_log = logging.getLogger(__name__)

#: The first byte of a frame.
_STDIN, _STDOUT, _STDERR, _REPLAY = range(4)
_OFFSET_BYTES = 8
#: Seconds.
_CONNECTED_LIMIT = 20.0
_SIGNAL_LIMIT = 10.0
#: From SIGKILL to its effect, which is milliseconds.
_DEATH_LIMIT = 1.0
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
#: Bytes. A replay is one mebibyte.
_MOST_EARLY = 8 * 1024 * 1024
_REST_LIMIT = 10.0


class FarChild(Child):
    """A program in the sandbox, under a number of ours."""

    def __init__(self, number: int) -> None:
        super().__init__(number, None)

    def signal_group(self, number: int) -> None:
        """Nothing: so ends what an agent started when the agent ends, and a gateway leaves its commands to the next one."""


class Session:
    """A session, with the ends of its descriptors that a program would have."""

    def __init__(self, client: Client, session: str, *, number: int, command: Command) -> None:
        self._client = client
        self.id = session
        self.child = FarChild(number)
        self.descriptors = Bridges.open(command.size, stdin=command.stdin, owner=None)
        self._fds = self.descriptors.theirs
        for fd in self._fds:
            os.set_blocking(fd, False)
        self._is_terminal = command.size is not None
        self._takes_input = self._is_terminal or command.stdin
        #: What is told again at every new socket.
        self._size = command.size
        if isinstance(self.descriptors.terminal, FarTerminal):
            self.descriptors.terminal.on_resize = self._resize
        #: Bytes of output so far, as execd counts them.
        self._offset = 0
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        #: Output that came before the socket was said to be connected.
        self._early: list[bytes] = []
        self._attached = asyncio.Event()
        self._signal = 0
        self._signal_waits = False
        self._writing: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def attach(self, *, since: int = 0) -> None:
        """Return when the process runs: with the first socket it starts.

        Raises Internal for one that cannot, NotFound when there is no such session, SandboxUnreachable.
        """
        self._offset = since
        opened = await self._client.open_session(self.id, terminal=self._is_terminal, since=since)
        try:
            async with self._client.bounded(_CONNECTED_LIMIT):
                early = await _connected(opened)
        except BaseException:
            await _hang_up(opened)
            raise
        self._early = early
        self._socket = opened
        self._attached.set()
        if self._size is not None:
            self._resize(self._size)
        if self._signal_waits:
            self._tell_soon(_signal_message(self._signal))

    async def run(self) -> None:
        """Until the process has ended, which its child then says."""
        feeding = asyncio.create_task(self._feed()) if self._takes_input else None
        try:
            status = await self._until_ended()
        finally:
            own = [task for task in (feeding, self._writing, *self._telling) if task is not None]
            for task in own:
                task.cancel()
            if own:
                await asyncio.wait(own)
            await self._detach()
        self.close()
        self.child.finish(status)

    def close(self) -> None:
        """Its outputs are at their end."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    async def signal(self, number: int) -> None:
        """To the session's processes. Raises SandboxUnreachable; the signal is then sent as soon as it can be."""
        self._signal, self._signal_waits = number, True
        if number == signal.SIGKILL and self._writing is not None:
            # Its end stands behind output that nobody reads.
            self._writing.cancel()
        async with self._client.bounded(_SIGNAL_LIMIT):
            await self._send(_signal_message(number))
        self._signal_waits = False
        if number == signal.SIGKILL:
            await asyncio.wait({self.child.ended}, timeout=_DEATH_LIMIT)
            if not self.child.ended.done():
                # execd hears no signal while it waits for the command to take its input.
                await self._client.ask("DELETE", f"pty/{self.id}", what="the command")

    # Output, and the end of it.

    async def _until_ended(self) -> int | None:
        """The wait status; None when nobody knows it any more."""
        while True:
            status = await self._pump()
            if status is not None:
                return status
            await self._detach()
            if not await self._attached_again():
                return self._signal or None

    async def _pump(self) -> int | None:
        """Pass on what comes until the socket is cut; the wait status when it told the end."""
        opened = self._socket
        if opened is None:
            return None
        early, self._early = self._early, []
        try:
            for frame in early:
                await self._output(frame)
            async for message in opened:
                if message.type is aiohttp.WSMsgType.BINARY:
                    await self._output(message.data)
                elif (about := _told(message)).get("type") == "exit":
                    status = self._wait_status(about.get("exit_code"))
                    await self._detach()
                    await self._fetch_rest()
                    return status
                elif about.get("type") == "error":
                    _log.warning("execd has trouble with a session: %s", _words(about))
        except (aiohttp.ClientError, OSError) as error:
            _log.info("the socket of a session was cut: %s", error)
        return None

    async def _fetch_rest(self) -> None:
        """Output that execd had not passed on when it told of the end; it keeps that.

        It starts the command once more for whoever comes for that, which then ends at once (``Records.begun``).
        """
        try:
            state = await self._client.ask("GET", f"pty/{self.id}", what="the session")
            missing = int(state["output_offset"]) - self._offset
        except (SandgateError, LookupError, TypeError, ValueError) as error:
            _log.info("whether all output of a command has come cannot be known: %s", error)
            return
        if missing <= 0:
            return
        end = self._offset + missing
        with contextlib.suppress(SandgateError):
            opened = await self._client.open_session(self.id, terminal=self._is_terminal, since=self._offset)
            try:
                async with self._client.bounded(_REST_LIMIT):
                    for frame in await _connected(opened):
                        await self._output(frame)
                    while self._offset < end and (message := await opened.receive()).type is aiohttp.WSMsgType.BINARY:
                        await self._output(message.data)
            finally:
                await _hang_up(opened)
        if self._offset < end:
            self.child.on_trouble(DataLoss(f"the last {end - self._offset} bytes of the output were lost"))

    async def _output(self, frame: bytes) -> None:
        kind, data = (frame[0], memoryview(frame)[1:]) if frame else (None, memoryview(b""))
        if kind == _REPLAY:
            begin = int.from_bytes(data[:_OFFSET_BYTES], "big")
            if begin > self._offset:
                self.child.on_trouble(DataLoss(f"{begin - self._offset} bytes of the output were lost at a cut"))
                self._offset = begin
            data = data[_OFFSET_BYTES + self._offset - begin :]
        elif kind not in {_STDOUT, _STDERR}:
            return
        self._offset += len(data)
        fd = self._fds[-1] if self._is_terminal or kind == _STDERR else self._fds[-2]
        # A command that was given up, or that ended here, has nobody who reads.
        with contextlib.suppress(BrokenPipeError):
            if rest := write_some(fd, data):
                await self._write_rest(fd, rest)

    async def _write_rest(self, fd: int, rest: memoryview) -> None:
        if self._signal == signal.SIGKILL:
            return
        writing = self._writing = asyncio.ensure_future(write_all(fd, rest))
        try:
            await asyncio.wait({writing})
        finally:
            self._writing = None
            writing.cancel()
        if not writing.cancelled():
            writing.result()

    def _wait_status(self, code: object) -> int:
        """Of the exit code that execd tells: for one that a signal ended it is -1, or 128 and the signal's number."""
        code = code if isinstance(code, int) else -1
        if code < 0:
            return self._signal or signal.SIGKILL
        if self._signal and code == 128 + self._signal:
            return self._signal
        return (code & 0xFF) << 8

    async def _attached_again(self) -> bool:
        """False when there is no such session any more, or nothing runs in it."""
        pause = _PAUSE
        while True:
            try:
                # execd starts the command of a session that has ended again for whoever comes.
                state = await self._client.ask("GET", f"pty/{self.id}", what="the session")
                if not isinstance(state, dict) or state.get("running") is not True:
                    return False
                await self.attach(since=self._offset)
            except NotFound:
                return False
            except SandgateError as error:
                _log.debug("a session cannot be attached yet: %s", error)
            else:
                return True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _detach(self) -> None:
        self._attached.clear()
        opened, self._socket = self._socket, None
        if opened is not None:
            await _hang_up(opened)

    # Input and orders.

    async def _feed(self) -> None:
        while data := await read_some(self._fds[0]):
            await self._send(bytes((_STDIN,)) + data)

    def _resize(self, size: Size) -> None:
        self._size = size
        if self._socket is not None:
            self._tell_soon(json.dumps({"type": "resize", "cols": size.cols, "rows": size.rows}))

    def _tell_soon(self, text: str) -> None:
        task = asyncio.ensure_future(self._send(text))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _send(self, frame: bytes | str) -> None:
        """Returns once it is on its way; waits for a socket where there is none."""
        while True:
            await self._attached.wait()
            opened = self._socket
            try:
                if opened is not None:
                    await (opened.send_str(frame) if isinstance(frame, str) else opened.send_bytes(frame))
                    return
            except (aiohttp.ClientError, OSError):
                pass
            # The reading side meets the same, and attaches again.
            if self._socket is opened:
                self._attached.clear()


async def _connected(opened: aiohttp.ClientWebSocketResponse) -> list[bytes]:
    """Output that came first, as a replay does. Raises Internal for a program that cannot run, SandboxUnreachable."""
    early: list[bytes] = []
    while (message := await opened.receive()).type is aiohttp.WSMsgType.BINARY:
        early.append(message.data)
        if sum(map(len, early)) > _MOST_EARLY:
            raise SandboxUnreachable("execd does not open the session", retry_after=1)
    about = _told(message)
    if about.get("type") == "error":
        raise Internal(f"the program could not be started: {_words(about)}")
    if about.get("type") != "connected":
        raise SandboxUnreachable("execd does not open the session", retry_after=1)
    return early


async def _hang_up(opened: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        await opened.close()


def _signal_message(number: int) -> str:
    return json.dumps({"type": "signal", "signal": signal.Signals(number).name})


def _told(message: aiohttp.WSMessage) -> Mapping[str, Any]:
    """A text of execd's; nothing for what is none."""
    if message.type is aiohttp.WSMsgType.TEXT:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(message.data)
            if isinstance(found, dict):
                return found
    return {}


def _words(about: Mapping[str, Any]) -> str:
    return str(about.get("message") or about.get("error") or about.get("text") or "execd does not say why")[:500]
