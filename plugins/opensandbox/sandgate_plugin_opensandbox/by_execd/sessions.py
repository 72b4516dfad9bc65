"""Commands that execd runs, each one in a session of its own.

In the place that the agent's launcher has inside a sandbox (``sandgate_agent.processes``): what is above it, from the table of
processes to replay, time limits and logs, is the agent's own and does not know the difference. Different is what execd has no
word for. A command has a number and no pid; signals reach the processes of its session and not what left it; its input
cannot be closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sandgate_agent.accounts import Account
from sandgate_agent.command import Command, Reach
from sandgate_agent.descriptors import Descriptors
from sandgate_agent.family import Family
from sandgate_agent.launcher import Child
from sandgate_agent.pty import Size
from sandgate_errors import Internal, InvalidArgument, NotFound, SandgateError, Unimplemented
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.records import Records
from sandgate_plugin_opensandbox.by_execd.session import Session

__all__ = ["Sessions"]

_log = logging.getLogger(__name__)

#: Bytes of one argument that Linux passes to a program, the closing NUL included: the whole command is one here.
_LONGEST_LINE = 128 * 1024 - 1


class Sessions:
    """All commands of one sandbox (``sandgate_agent.processes.Programs``, ``sandgate_agent.family.Reaching``)."""

    def __init__(self, client: Client, records: Records) -> None:
        self._client = client
        self._records = records
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def families(self) -> Sessions:
        return self

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str, mark: int
    ) -> tuple[Child, Descriptors]:
        """Raises InvalidArgument, Internal, Unimplemented, SandboxUnreachable."""
        if command.reach is Reach.TREE:
            raise Unimplemented("'kill_tree' takes an agent in the sandbox, which this backend does without")
        number = next(self._numbers)
        line = f"mkdir {self._records.begun(number)} 2> /dev/null || exit; {_line(command, env)}"
        if len(line.encode(errors="replace")) > _LONGEST_LINE:
            raise InvalidArgument(
                f"the command and its variables are longer than execd can start: {_LONGEST_LINE} bytes"
            )
        await self._check_cwd(cwd)
        made = await self._client.ask("POST", "pty", body={"cwd": cwd, "command": line}, what="the command")
        session = Session(self._client, _session_id(made), number=number, command=command)
        try:
            # Before it runs: one that nobody knew of could not be ended.
            await self._records.keep_command(session.child.pid, _record(session, command))
            await session.attach()
        except BaseException:
            session.close()
            session.descriptors.close_ours()
            await self._forget(session)
            raise
        self._take(session)
        return session.child, session.descriptors

    async def adopt(self) -> Sequence[tuple[Command, Session]]:
        """What an earlier gateway started, and still runs."""
        found = []
        for number, about in (await self._records.commands()).items():
            self._numbers = itertools.count(max(number + 1, next(self._numbers)))
            adopted = await self._adopt(number, about)
            if adopted is None:
                await self._records.forget_command(number)
            else:
                found.append(adopted)
        return found

    async def _adopt(self, number: int, about: Mapping[str, Any]) -> tuple[Command, Session] | None:
        try:
            command, name = _recorded(about), _session_id(about)
            state = await self._client.ask("GET", f"pty/{name}", what="the session")
            since = int(state["output_offset"])
        except (NotFound, Internal, LookupError, TypeError, ValueError, AttributeError):
            return None
        if state.get("running") is not True:
            return None
        session = Session(self._client, name, number=number, command=command)
        try:
            await session.attach(since=since)
        except BaseException as error:
            session.close()
            session.descriptors.close_ours()
            if isinstance(error, NotFound):
                return None
            raise
        self._take(session)
        return command, session

    def _take(self, session: Session) -> None:
        self._sessions[session.child.pid] = session
        task = asyncio.create_task(self._follow(session), name=f"session {session.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            del self._sessions[session.child.pid]
            session.close()
        # Not when this is cancelled: a gateway that ends leaves its commands to the next one.
        await self._forget(session)

    async def _forget(self, session: Session) -> None:
        """Nothing of an ended command stays in the sandbox; what cannot be told now, the next adoption finds."""
        with contextlib.suppress(SandgateError):
            await self._client.ask("DELETE", f"pty/{session.id}", what="the session")
            await self._records.forget_command(session.child.pid)

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
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

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
    line = shlex.join(["exec", "env", "-i", *(f"{name}={value}" for name, value in env.items()), *argv])
    if command.size is None and not command.stdin:
        line += " < /dev/null"
    return line


def _session_id(about: object) -> str:
    name = about.get("session_id") if isinstance(about, dict) else None
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
        _log.error("execd does not say which session it has made: %s", str(about)[:200])
        raise Internal("execd does not say which session it has made")
    return name


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
    }


def _recorded(about: Mapping[str, Any]) -> Command:
    terminal, until = about["terminal"], about["until"]
    return Command(
        cmd=str(about["cmd"]),
        args=[str(each) for each in about["args"]],
        envs={str(name): str(value) for name, value in about["envs"].items()},
        cwd=None if about["cwd"] is None else str(about["cwd"]),
        tag=None if about["tag"] is None else str(about["tag"]),
        stdin=about["stdin"] is True,
        size=None if terminal is None else Size(cols=int(terminal[0]), rows=int(terminal[1])),
        limit=None if until is None else max(0.001, float(until) - time.time()),
        reach=Reach.GROUP if about["group"] is True else Reach.FAMILY,
        term_grace=float(about["term_grace"]),
    )
