"""Where a container's first program meets the backend, on the engine's own machine.

A socket in a folder that is mounted read-only into the container and closed when the agent runs. Through it the program
(``enter.py``) gets its settings, which no ``docker inspect`` and no command's environment then shows, and the folder in
which the agent makes its socket, as a descriptor. So no folder of the host in which anything could be written, removed or
replaced is ever mounted into a sandbox, and not even root in it can put something else in the socket's place: neither in
its own, nor in those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from sandgate_errors import Internal
from sandgate_plugin_docker.boxes import Box

__all__ = ["INNER_FOLDER", "INNER_PATH", "START_LIMIT_SECONDS", "Meeting", "check", "meeting", "parse_answer"]

_log = logging.getLogger(__name__)

INNER_FOLDER = "/run/sandgate/meet"
INNER_PATH = f"{INNER_FOLDER}/start"
#: From the container's start to the agent's ready line. A first start on a cold disk reads the interpreter and gRPC.
START_LIMIT_SECONDS = 45.0
#: How often a container that says nothing is asked whether it runs at all.
_LOOK_SECONDS = 1.0
_LONGEST_ANSWER = 64 * 1024


class Meeting:
    """One socket, for one start."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._bound = False

    def open(self) -> None:
        path = self._box.meeting / "start"
        self._listener.bind(str(path))
        # Only then is what is there ours: the box of that name may be another call's.
        self._bound = True
        # Root of the container may be nobody out here; who can enter the folder is decided by the folder around it.
        path.chmod(0o666)
        self._listener.listen(1)

    def close(self) -> None:
        self._listener.close()
        if self._bound:
            (self._box.meeting / "start").unlink(missing_ok=True)

    async def introduce(self, line: Mapping[str, object], *, lives: Callable[[], Awaitable[bool]]) -> None:
        """Tell the first program who it is, and return when its agent accepts calls.

        ``lives`` says whether the container still runs. Raises Internal when it does not come up; why is for the log.
        """
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                with await self._accept(lives) as program:
                    await self._hand_over(program, line)
                    answer = await _answer(program)
        except TimeoutError:
            answer = {"error": "it did not come up in time"}
        except OSError as error:
            answer = {"error": f"it hung up: {error}"}
        check(answer)

    async def _accept(self, lives: Callable[[], Awaitable[bool]]) -> socket.socket:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(loop.sock_accept(self._listener))
        try:
            while not (await asyncio.wait({accepting}, timeout=_LOOK_SECONDS))[0]:
                if not await lives():
                    raise OSError("it ended at once")
        except BaseException:
            accepting.cancel()
            await asyncio.wait({accepting})
            if not accepting.cancelled() and accepting.exception() is None:
                accepting.result()[0].close()
            raise
        program, _ = accepting.result()
        program.setblocking(False)
        return program

    async def _hand_over(self, program: socket.socket, line: Mapping[str, object]) -> None:
        folder = os.open(self._box.sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            socket.send_fds(program, [b"\0"], [folder])
        finally:
            os.close(folder)
        await asyncio.get_running_loop().sock_sendall(program, json.dumps(line).encode() + b"\n")


@asynccontextmanager
async def meeting(box: Box, *, anew: bool) -> AsyncIterator[Meeting]:
    """The box's folders, with a socket for one start; ``anew`` is for a box that was there before."""
    place = Meeting(box)
    try:
        await asyncio.to_thread(box.make, anew=anew)
        place.open()
        yield place
    finally:
        with contextlib.suppress(OSError):
            place.close()


async def _answer(program: socket.socket) -> object:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_ANSWER:
        if not (piece := await asyncio.get_running_loop().sock_recv(program, 4096)):
            break
        line += piece
    return parse_answer(line)


def parse_answer(line: bytes) -> object:
    """What an agent says of its start."""
    try:
        return json.loads(line) if line else {"error": "it ended"}
    except ValueError:
        return {"error": f"it said {line[:200]!r}"}


def check(answer: object) -> None:
    """Raises Internal unless the agent is ready."""
    if isinstance(answer, dict) and answer.get("ready") is True:
        return
    reason = answer.get("error") if isinstance(answer, dict) else answer
    _log.error("a sandbox's agent did not start: %s", reason)
    raise Internal("the sandbox could not be started")
