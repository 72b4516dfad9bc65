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
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from sandgate_agent.command import Command
from sandgate_agent.launcher import Child
from sandgate_agent.pty import Size
from sandgate_errors import DataLoss, Internal, NotFound, SandboxUnreachable, SandgateError, Unavailable
from sandgate_plugin_opensandbox.by_execd.bridges import Bridges, FarTerminal, read_some, write_all, write_some
from sandgate_plugin_opensandbox.by_execd.client import Client

__all__ = ["FarChild", "Session", "offset_in"]

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
#: A socket that lived so long was none of those that are cut at once.
_STEADY = 10.0
#: Bytes. A replay is one mebibyte; a frame costs something, too, however short it is.
_MOST_EARLY = 8 * 1024 * 1024
_FRAME_COST = 128
_REST_LIMIT = 10.0
_HANG_UP_LIMIT = 2.0
#: How execd closes the socket of one whose place another takes.
_TAKEN_OVER = 4001
_LARGEST_OFFSET = 2**63 - 1


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
        #: Signals that are to be told, and who waits for it.
        self._untold: dict[int, asyncio.Event] = {}
        self._writing: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._untold_size = False
        self._complained = False
        #: Called once another gateway has the session, which it then has to itself.
        self.on_taken: Callable[[], None] = lambda: None

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
        self._untold_size = self._size is not None
        self._tell_soon()

    async def run(self) -> None:
        """Until the process has ended, which its child then says."""
        feeding = asyncio.create_task(self._feed()) if self._takes_input else None
        try:
            status = await self._until_ended()
        finally:
            own = [task for task in (feeding, self._writing, self._telling) if task is not None]
            for task in own:
                task.cancel()
            if own:
                await asyncio.wait(own)
            await self._detach()
        self.close()
        self.child.finish(status)

    async def give_up(self) -> None:
        """Free everything of one that was attached, or not even that, and is never run."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        self.close()
        self.descriptors.close_ours()
        await self._detach()

    def close(self) -> None:
        """Its outputs are at their end."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    async def signal(self, number: int) -> None:
        """To the session's processes. Raises SandboxUnreachable; the signal is then sent as soon as it can be."""
        self._signal = number
        said = self._untold.setdefault(number, asyncio.Event())
        self._tell_soon()
        if number == signal.SIGKILL:
            if self._writing is not None:
                # Its end stands behind output that nobody reads.
                self._writing.cancel()
            await asyncio.wait({self.child.ended}, timeout=_DEATH_LIMIT)
            if not self.child.ended.done():
                # execd hears no signal while it waits for the command to take its input.
                await self._client.ask("DELETE", f"pty/{self.id}", what="the command")
                self._untold.pop(number, None)
            return
        waiting = asyncio.ensure_future(said.wait())
        try:
            async with self._client.bounded(_SIGNAL_LIMIT):
                either: set[asyncio.Future[Any]] = {waiting, self.child.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    # Output, and the end of it.

    async def _until_ended(self) -> int | None:
        """The wait status; None when nobody knows it any more."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            began = loop.time()
            status = await self._pump()
            if status is not None:
                return status
            if self._socket is not None and self._socket.close_code == _TAKEN_OVER:
                # To take it back would only begin a quarrel.
                self.child.on_trouble(Unavailable("another gateway has taken the sandbox over"))
                self.on_taken()
                pause = _LONGEST_PAUSE
            await self._detach()
            # One that is cut as soon as it is there must not keep both sides busy.
            await asyncio.sleep(pause)
            pause = 0.0 if loop.time() - began > _STEADY else _longer(pause)
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
                elif about.get("type") == "error" and not self._complained:
                    # Once: it costs execd nothing to say it again and again.
                    self._complained = True
                    _log.warning("execd has trouble with a session: %r", _words(about))
        except (aiohttp.ClientError, OSError) as error:
            _log.info("the socket of a session was cut: %s", error)
        return None

    async def _fetch_rest(self) -> None:
        """Output that execd had not passed on when it told of the end; it keeps that.

        It starts the command once more for whoever comes for that, which then ends at once (``Records.begun``).
        """
        try:
            state = await self._client.ask("GET", f"pty/{self.id}", what="the session")
            missing = offset_in(state) - self._offset
        except (SandgateError, ValueError) as error:
            _log.info("whether all output of a command has come cannot be known: %s", error)
            return
        if missing <= 0:
            return
        end = self._offset + missing
        with contextlib.suppress(SandgateError):
            opened = await self._client.open_session(self.id, terminal=self._is_terminal, since=self._offset)
            try:
                # Execd's time is bounded, and not that of whoever reads the output.
                async with self._client.bounded(_CONNECTED_LIMIT):
                    early = await _connected(opened)
                for frame in early:
                    await self._output(frame)
                until = asyncio.get_running_loop().time() + _REST_LIMIT
                while self._offset < end:
                    async with self._client.bounded(until - asyncio.get_running_loop().time()):
                        message = await opened.receive()
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    await self._output(message.data)
            finally:
                await _hang_up(opened)
        if self._offset < end:
            self.child.on_trouble(DataLoss(f"the last {end - self._offset} bytes of the output were lost"))

    async def _output(self, frame: bytes) -> None:
        kind, data = (frame[0], memoryview(frame)[1:]) if frame else (None, memoryview(b""))
        if kind == _REPLAY:
            begin = min(int.from_bytes(data[:_OFFSET_BYTES], "big"), _LARGEST_OFFSET)
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
            pause = _longer(pause)

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
        self._untold_size = True
        if self._socket is not None:
            self._tell_soon()

    def _tell_soon(self) -> None:
        # One at a time, however many sizes come while execd takes none.
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        while self._untold or (self._untold_size and self._size is not None):
            if self._untold:
                number = next(iter(self._untold))
                await self._send(_signal_message(number))
                if (said := self._untold.pop(number, None)) is not None:
                    said.set()
            elif self._size is not None:
                self._untold_size = False
                size = {"type": "resize", "cols": self._size.cols, "rows": self._size.rows}
                await self._send(json.dumps(size))

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
    cost = 0
    while (message := await opened.receive()).type is aiohttp.WSMsgType.BINARY:
        early.append(message.data)
        cost += len(message.data) + _FRAME_COST
        if cost > _MOST_EARLY:
            raise SandboxUnreachable("execd does not open the session", retry_after=1)
    about = _told(message)
    if about.get("type") == "error":
        raise Internal(f"the program could not be started: {_words(about)}")
    if about.get("type") != "connected":
        raise SandboxUnreachable("execd does not open the session", retry_after=1)
    return early


async def _hang_up(opened: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        # It waits for the other side's farewell after each frame anew, and that may never stop sending others.
        async with asyncio.timeout(_HANG_UP_LIMIT):
            await opened.close()


def _longer(pause: float) -> float:
    return min(max(2 * pause, _PAUSE), _LONGEST_PAUSE)


def offset_in(state: object) -> int:
    """How much output execd says a session has had. Raises ValueError."""
    found = state.get("output_offset") if isinstance(state, dict) else None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _LARGEST_OFFSET:
        raise ValueError("execd does not say how much output there is")
    return found


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
