"""The table of processes that were started through the agent: starting them, finding them, their end with the agent's.

Between the service, which speaks protobuf, and the launcher, which has programs started. The life of each is in
:mod:`sandgate_agent.process`; what is still known of those that have ended in :mod:`sandgate_agent.remembered`.

Start is finished even if its caller leaves half way: otherwise a program could run that no list shows (T8).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sandgate_agent.accounts import Account
from sandgate_agent.command import Command, Reach
from sandgate_agent.descriptors import Descriptors
from sandgate_agent.ends import End
from sandgate_agent.family import Family, Reaching
from sandgate_agent.journal import Journal
from sandgate_agent.launcher import Child
from sandgate_agent.marks import MARKS
from sandgate_agent.output import Follower
from sandgate_agent.process import Process
from sandgate_agent.remembered import Ended, Remembered
from sandgate_agent.stdin import Stdin
from sandgate_errors import Internal, NotFound, ResourceExhausted, SandgateError, Unavailable

__all__ = ["Processes", "Programs", "Selector"]

MOST_PROCESSES = 1024


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which process a call is for."""

    pid: int | None = None
    tag: str | None = None

    def missing(self) -> NotFound:
        if self.pid is not None:
            return NotFound(f"process with pid {self.pid} not found")
        return NotFound(f"process with tag '{self.tag}' not found")


class Programs(Protocol):
    """Who starts programs: the spawners of this sandbox, or whatever else can where the agent is not in it."""

    @property
    def families(self) -> Reaching:
        """Whom signals reach."""

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str, mark: int
    ) -> tuple[Child, Descriptors]:
        """Start it, and what it reads and writes. ``mark`` is what its processes may be recognized by."""


class Processes:
    """The table. Its tasks are starts, which outlive the call that asked for them (see the module's docstring)."""

    def __init__(self, programs: Programs, journal: Journal) -> None:
        self._programs = programs
        self._journal = journal
        self._live: dict[int, Process] = {}
        self._remembered = Remembered()
        self._starting: set[asyncio.Task[tuple[Process, Follower]]] = set()
        self._marks = itertools.cycle(MARKS)
        self._closed = False

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._live.values()))

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str
    ) -> tuple[Process, Follower]:
        """Start a process and follow it from its first byte. The caller leaves through ``process.output.leave``."""
        command.check()
        if self._closed:
            raise Unavailable("the sandbox is ending")
        if len(self._live) + len(self._starting) >= MOST_PROCESSES:
            raise ResourceExhausted(f"more than {MOST_PROCESSES} processes at once")
        task = asyncio.create_task(self._start(command, account, env=env, cwd=cwd))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_leave)
            raise

    def adopt(self, command: Command, child: Child, descriptors: Descriptors) -> None:
        """Take up a program that runs already. Nobody follows it so far."""
        process, follower = self._register(command, child, mark=0, descriptors=descriptors)
        process.output.leave(follower)

    def find(self, selector: Selector) -> Process:
        """A live process. Of several with one tag, the newest."""
        process = self._find(selector)
        if process is None:
            raise selector.missing()
        return process

    def attach(self, selector: Selector) -> Process | Ended:
        """A live process, or what is still known of one that ended."""
        found = self._find(selector) or self._remembered.find(pid=selector.pid, tag=selector.tag)
        if found is None:
            raise selector.missing()
        return found

    def stdin_of(self, selector: Selector, *, terminal: bool) -> Stdin:
        """Where to write. Raises Internal with the reason when there is no such input (A17)."""
        process = self.find(selector)
        if terminal and process.terminal is None:
            raise Internal(f"process {process.pid} has no terminal; send stdin instead")
        if not terminal and process.terminal is not None:
            raise Internal(f"process {process.pid} runs on a terminal; send pty input instead")
        if process.stdin is None:
            raise Internal(f"stdin of process {process.pid} is disabled")
        return process.stdin

    async def close(self, failure: SandgateError) -> None:
        """End every process and every stream; starts under way included."""
        self._closed = True
        for process in self:
            process.abandon(failure)
        if self._starting:
            await asyncio.wait(self._starting, timeout=0.5)
            for process in self:
                process.abandon(failure)

    def _find(self, selector: Selector) -> Process | None:
        if selector.pid is not None:
            return self._live.get(selector.pid)
        return next((found for found in reversed(self._live.values()) if found.command.tag == selector.tag), None)

    async def _start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str
    ) -> tuple[Process, Follower]:
        mark = self._free_mark()
        child, descriptors = await self._programs.start(command, account, env=env, cwd=cwd, mark=mark)
        return self._register(command, child, mark=mark, descriptors=descriptors)

    def _free_mark(self) -> int:
        used = {process.family.mark for process in self._live.values()}
        return next(mark for mark in self._marks if mark not in used)

    def _register(
        self, command: Command, child: Child, *, mark: int, descriptors: Descriptors
    ) -> tuple[Process, Follower]:
        process = Process(
            command,
            child,
            family=Family(pid=child.pid, mark=mark, group_only=command.reach is Reach.GROUP),
            families=self._programs.families,
            sources=descriptors.outputs,
            stdin=descriptors.stdin,
            terminal=descriptors.terminal,
            on_end=self._retire,
            recorder=self._journal.recorder(pid=child.pid, tag=command.tag),
        )
        self._remembered.drop(pid=process.pid, tag=command.tag)
        self._live[process.pid] = process
        process.starter = process.output.follow()
        process.run()
        return process, process.starter

    def _retire(self, process: Process, end: End) -> None:
        if self._live.get(process.pid) is process:
            del self._live[process.pid]
            self._remembered.keep(process, end)


def _leave(task: asyncio.Task[tuple[Process, Follower]]) -> None:
    if not task.cancelled() and task.exception() is None:
        process, mailbox = task.result()
        process.output.leave(mailbox)
