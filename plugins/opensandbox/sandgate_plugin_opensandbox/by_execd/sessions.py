"""Commands that execd runs, each one in a session of its own.

In the place that the agent's launcher has inside a sandbox (``sandgate_agent.processes``): what is above it, from the table of
processes to replay, time limits and logs, is the agent's own and does not know the difference. Different is what execd has no
word for. A command has a number and no pid; signals reach the processes of its session and not what left it; its input
cannot be closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import shlex
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from sandgate_agent.accounts import Account
from sandgate_agent.command import Command, Reach
from sandgate_agent.descriptors import Descriptors
from sandgate_agent.family import Family
from sandgate_agent.launcher import Child
from sandgate_agent.pty import Size
from sandgate_errors import (
    Internal,
    InvalidArgument,
    NotFound,
    SandboxUnreachable,
    SandgateError,
    Unavailable,
    Unimplemented,
)
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.records import LARGEST_NUMBER, MOST_COMMANDS, Records
from sandgate_plugin_opensandbox.by_execd.session import Session, offset_in

__all__ = ["Sessions"]

_log = logging.getLogger(__name__)

_SESSION_ID = re.compile(r"[0-9A-Za-z_-]{1,128}", re.ASCII)

#: Bytes of one argument that Linux passes to a program, the closing NUL included: the whole command is one here.
_LONGEST_LINE = 128 * 1024 - 1
#: Seconds. To end what failed to start, and to forget what ended.
_FORGET_LIMIT = 10.0
#: For all that an earlier gateway left.
_ADOPT_LIMIT = 60.0
#: Sessions that are taken up, or forgotten, at the same time.
_AT_ONCE = 16


class Sessions:
    """All commands of one sandbox (``sandgate_agent.processes.Programs``, ``sandgate_agent.family.Reaching``)."""

    def __init__(self, client: Client, records: Records, *, on_taken: Callable[[], None] = lambda: None) -> None:
        """``on_taken`` is called once another gateway has taken a session."""
        self._client = client
        self._records = records
        self._on_taken = on_taken
        self._last_number = 0
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[Session]] = set()
        self._forgetting = asyncio.Semaphore(_AT_ONCE)
        self._closed = False

    @property
    def families(self) -> Sessions:
        return self

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str, mark: int
    ) -> tuple[Child, Descriptors]:
        """Raises InvalidArgument, Internal, Unimplemented, SandboxUnreachable."""
        if command.reach is Reach.TREE:
            raise Unimplemented("'kill_tree' takes an agent in the sandbox, which this backend does without")
        number = self._number()
        line = f"mkdir {self._records.begun(number)} 2> /dev/null || exit; {_line(command, env)}"
        if len(line.encode(errors="replace")) > _LONGEST_LINE:
            raise InvalidArgument(
                f"the command and its variables are longer than execd can start: {_LONGEST_LINE} bytes"
            )
        await self._check_cwd(cwd)
        self._check_open()
        task = asyncio.create_task(self._started(command, line, number=number, cwd=cwd), name=f"start {number}")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        try:
            session = await task
        except asyncio.CancelledError:
            self._check_open()
            raise
        if self._closed:
            await session.give_up()
            await self._forget(number, session.id)
            self._check_open()
        # Not earlier: whoever follows it must be there before it says anything.
        self._take(session)
        return session.child, session.descriptors

    async def _started(self, command: Command, line: str, *, number: int, cwd: str) -> Session:
        made = await self._client.ask("POST", "pty", body={"cwd": cwd, "command": line}, what="the command")
        name = _session_id(made)
        session = None
        try:
            session = Session(self._client, name, number=number, command=command)
            # Before it runs: one that nobody knew of could not be ended.
            await self._records.keep_command(number, _record(session, command))
            await session.attach()
        except BaseException:
            if session is not None:
                await session.give_up()
            await self._forget(number, name)
            raise
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the gateway lets go of the sandbox", retry_after=1)

    def _number(self) -> int:
        while True:
            self._last_number = self._last_number % LARGEST_NUMBER + 1
            if self._last_number not in self._sessions:
                return self._last_number

    async def adopt(self, register: Callable[[Command, Session], None]) -> None:
        """Register what an earlier gateway started, and still runs: all of it or nothing."""
        taken: dict[int, tuple[Command, Session]] = {}
        try:
            async with self._client.bounded(_ADOPT_LIMIT):
                records = await self._records.commands()
                await self._attach_all(records, taken)
        except BaseException:
            for _, session in taken.values():
                await session.give_up()
            raise
        self._last_number = max(records, default=0)
        for _, (command, session) in sorted(taken.items()):
            self._take(session)
            register(command, session)
        for number, about in records.items():
            if number not in taken:
                self._own(self._forget(number, _session_name(about)), name=f"forgetting {number}")

    async def _attach_all(
        self, records: Mapping[int, Mapping[str, Any] | None], taken: dict[int, tuple[Command, Session]]
    ) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def take(number: int, about: Mapping[str, Any]) -> None:
            async with turns:
                if len(taken) < MOST_COMMANDS and (adopted := await self._adopt(number, about)) is not None:
                    taken[number] = adopted

        try:
            async with asyncio.TaskGroup() as group:
                for number, about in records.items():
                    if about is not None:
                        group.create_task(take(number, about))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _adopt(self, number: int, about: Mapping[str, Any]) -> tuple[Command, Session] | None:
        """None for what does not run, or never was a command. Raises SandboxUnreachable, ResourceExhausted."""
        try:
            command, name = _recorded(about), _session_id(about)
            state = await self._client.ask("GET", f"pty/{name}", what="the session")
            if not isinstance(state, dict) or state.get("running") is not True:
                return None
            since = offset_in(state)
        except SandboxUnreachable:
            raise
        except (SandgateError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        session = Session(self._client, name, number=number, command=command)
        try:
            await session.attach(since=since)
        except BaseException as error:
            await session.give_up()
            if isinstance(error, SandgateError) and not isinstance(error, SandboxUnreachable):
                return None
            raise
        return command, session

    def _take(self, session: Session) -> None:
        self._sessions[session.child.pid] = session
        session.on_taken = self._on_taken
        self._own(self._follow(session), name=f"session {session.id}")

    def _own(self, work: Coroutine[None, None, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, session: Session) -> None:
        try:
            await session.run()
        except Exception:
            _log.exception("a session cannot be followed any more")
        finally:
            del self._sessions[session.child.pid]
            session.close()
            # Whatever happened: who waits for its end must not wait for ever, and what is open here must be closed.
            session.child.finish(None)
        # Not when this is cancelled: a gateway that ends leaves its commands to the next one.
        await self._forget(session.child.pid, session.id)

    async def _forget(self, number: int, name: str | None) -> None:
        """Nothing of an ended command stays in the sandbox; what cannot be told now, the next adoption finds."""
        with contextlib.suppress(SandgateError):
            async with self._forgetting, self._client.bounded(_FORGET_LIMIT):
                if name is not None:
                    with contextlib.suppress(NotFound):
                        await self._client.ask("DELETE", f"pty/{name}", what="the session")
                await self._records.forget_command(number)

    async def _check_cwd(self, cwd: str) -> None:
        try:
            found = await self._client.ask("GET", "files/info", query=[("path", cwd)], what=f"cwd '{cwd}'")
        except NotFound:
            raise InvalidArgument(f"cwd '{cwd}' does not exist") from None
        about = found.get(cwd) if isinstance(found, dict) else None
        # What a link leads to, the shell finds out.
        if isinstance(about, dict) and about.get("type") not in {"directory", "symlink"}:
            raise InvalidArgument(f"cwd '{cwd}' is not a directory")

    async def close(self) -> None:
        """Let go of all; they go on."""
        self._closed = True
        # A start that is given up ends what it has started.
        own = self._tasks | self._starting
        for task in own:
            task.cancel()
        if own:
            await asyncio.wait(own)

    # Whom signals reach.

    async def signal(self, family: Family, number: int) -> None:
        if (session := self._sessions.get(family.pid)) is not None:
            await session.signal(number)

    async def end(self, family: Family) -> None:
        await self.signal(family, signal.SIGKILL)

    async def alive(self, family: Family) -> bool:
        return family.pid in self._sessions


def _line(command: Command, env: Mapping[str, str]) -> str:
    """What execd's shell becomes: the program, with nothing of execd's own variables, among which is its token."""
    argv = [command.cmd, *command.args]
    if "=" in command.cmd:
        # env would take it for a variable.
        argv = ["/bin/sh", "-c", 'exec "$0" "$@"', *argv]
    line = shlex.join(["exec", "env", "-i", "--", *(f"{name}={value}" for name, value in env.items()), *argv])
    if command.size is None and not command.stdin:
        line += " < /dev/null"
    return line


def _session_id(about: object) -> str:
    name = about.get("session_id") if isinstance(about, dict) else None
    if not isinstance(name, str) or _SESSION_ID.fullmatch(name) is None:
        _log.error("execd does not say which session it has made: %s", str(about)[:200])
        raise Internal("execd does not say which session it has made")
    return name


def _session_name(about: object) -> str | None:
    try:
        return _session_id(about)
    except Internal:
        return None


def _record(session: Session, command: Command) -> Mapping[str, object]:
    """All by which another gateway can take the command up."""
    return {
        "session_id": session.id,
        "cmd": command.cmd,
        "args": list(command.args),
        "envs": dict(command.envs),
        "cwd": command.cwd,
        "tag": command.tag,
        "stdin": command.stdin,
        "terminal": None if command.size is None else [command.size.cols, command.size.rows],
        "until": None if command.limit is None else time.time() + command.limit,
        "term_grace": command.term_grace,
        "group": command.reach is Reach.GROUP,
        "strict_output": command.strict_output,
    }


def _size(cols: object, rows: object) -> Size:
    if not isinstance(cols, int) or not isinstance(rows, int) or min(cols, rows) < 0:
        raise ValueError("no terminal has this size")
    return Size(cols=cols, rows=rows)


def _recorded(about: Mapping[str, Any]) -> Command:
    """Raises InvalidArgument and what comes of a value of another kind."""
    terminal, until = about["terminal"], about["until"]
    if until is not None and not math.isfinite(until):
        raise ValueError
    command = Command(
        cmd=str(about["cmd"]),
        args=[str(each) for each in about["args"]],
        envs={str(name): str(value) for name, value in about["envs"].items()},
        cwd=None if about["cwd"] is None else str(about["cwd"]),
        tag=None if about["tag"] is None else str(about["tag"]),
        stdin=about["stdin"] is True,
        size=None if terminal is None else _size(*terminal),
        limit=None if until is None else max(0.001, float(until) - time.time()),
        reach=Reach.GROUP if about["group"] is True else Reach.FAMILY,
        term_grace=float(about["term_grace"]),
        strict_output=about["strict_output"] is True,
    )
    command.check()
    return command
