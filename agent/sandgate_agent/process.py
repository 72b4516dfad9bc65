"""One process that was started through the agent: its life (behaviour.md 3-6).

Between the table (:mod:`sandgate_agent.processes`) and the launcher, which has programs started. What was asked for is a
:class:`sandgate_agent.command.Command`. A process is *live* from
its start to its end event. The end event is due when the program was reaped and its pipes are at their end (O8), or when
it was reaped after a signal or the time limit (O9), or, on a terminal, when it was reaped: what a child writes to the
terminal later has no reader (as with any terminal whose shell is gone). While something is being ended it is not due yet,
so that after the end event nothing of it is left.

How far signals and the time limit reach is said there, too; who is reached is for :mod:`sandgate_agent.family` to find.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping

from sandgate_agent.command import Command
from sandgate_agent.countdown import Countdown
from sandgate_agent.ends import End
from sandgate_agent.family import Family, Reaching
from sandgate_agent.journal import Recorder
from sandgate_agent.launcher import Child
from sandgate_agent.output import Follower, Output
from sandgate_agent.pty import Terminal
from sandgate_agent.retention import Stream
from sandgate_agent.stdin import Stdin
from sandgate_errors import DeadlineExceeded, PermissionDenied, SandgateError

__all__ = ["Process"]

log = logging.getLogger(__name__)

#: How often is looked whether all of a command obeyed the SIGTERM at its time limit.
_GRACE_LOOK_SECONDS = 0.05
#: SIGKILL works in microseconds, except on a process that hangs in the kernel: its limit is reported all the same.
_DEATH_SECONDS = 2.0


class Process:
    """One live process."""

    def __init__(
        self,
        command: Command,
        child: Child,
        *,
        family: Family,
        families: Reaching,
        sources: Mapping[Stream, int],
        stdin: Stdin | None,
        terminal: Terminal | None,
        on_end: Callable[[Process, End], None],
        recorder: Recorder | None = None,
    ) -> None:
        """``on_end`` is called in the moment of the end: who attaches after it must not find a live process (A8)."""
        self.command = command
        self.pid = child.pid
        #: Drawn for this process alone; pids come round again.
        self.incarnation = int.from_bytes(os.urandom(8), "big") or 1
        self._recorder = recorder
        self.output = Output(
            sources,
            on_stall=self._give_up if command.strict_output else None,
            tap=None if recorder is None else recorder.write,
        )
        #: None when the program reads the null device.
        self.stdin = stdin
        self.terminal = terminal
        self.end: End | None = None
        #: The follower that started it: its stream ends with an error when the limit passes.
        self.starter: Follower | None = None
        self._child = child
        child.on_trouble = self.output.fail_all
        self._on_end = on_end
        self.family = family
        self._families = families
        # Signals outlive the call that asked for them, and the limit nobody waits for: they live as long as the process.
        self._ending: set[asyncio.Task[None]] = set()
        self._hasty = False
        self._expired = False
        self._truncated = False
        self._limit: Countdown | None = None

    def run(self) -> None:
        """Begin to read, to count the time limit and to wait for the end."""
        self.output.start(on_end=self.consider_end)
        if self.command.limit is not None:
            self._limit = Countdown(self.command.limit, self._expire)
        self._child.ended.add_done_callback(lambda _: self._reaped())

    async def signal(self, number: int) -> None:
        """To all that the command's reach covers; the end will not wait for pipes any more (O9).

        SIGKILL returns when nothing is left of it. Goes on when the caller leaves.
        """
        await asyncio.shield(self._own(self._kill() if number == signal.SIGKILL else self._send(number)))

    def consider_end(self) -> None:
        """The end is due: tell followers and let go of everything."""
        if self.end is not None or not self._child.ended.done() or self._ending:
            return
        if not (self._hasty or self.terminal is not None or self.output.at_end):
            return
        self.end = End.of(self._child.ended.result(), timed_out=self._expired, truncated=self._truncated)
        if self._limit is not None:
            self._limit.cancel()
        self.output.finish(self._failure_for)
        if self._recorder is not None:
            self._recorder.end()
        if self.stdin is not None:
            self.stdin.close()
        if self.terminal is not None:
            self.terminal.close()
        self._child.close()
        self._on_end(self, self.end)

    def abandon(self, failure: SandgateError) -> None:
        """The agent ends: so does everything it started."""
        self.output.fail_all(failure)
        try:
            self._child.signal_group(signal.SIGKILL)
        except PermissionError:
            # The root spawner's sweep meets the same refusal; whoever ends the sandbox has the rights.
            pass

    def _reaped(self) -> None:
        self.family.leader_reaped = True
        self.consider_end()

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending_over)
        return task

    def _ending_over(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandgateError):
            log.error("process %d could not be ended", self.pid, exc_info=error)
        self.consider_end()

    async def _send(self, number: int) -> None:
        await self._reach(number, self._families.signal(self.family, number))
        self._hasty = True

    async def _kill(self) -> None:
        await self._reach(signal.SIGKILL, self._families.end(self.family))
        self._hasty = True
        # A dead process answers `kill -0` until it was reaped (A27).
        await asyncio.wait([self._child.ended], timeout=_DEATH_SECONDS)

    async def _reach(self, number: int, work: Coroutine[None, None, None]) -> None:
        try:
            try:
                await work
            except PermissionError:
                raise
            except OSError as error:
                log.warning("what belongs to process %d is not known, its group gets the signal: %s", self.pid, error)
                self._child.signal_group(number)
        except PermissionError:
            raise PermissionDenied(f"the agent may not signal process {self.pid}") from None

    def _give_up(self) -> None:
        """Nobody reads what strict output has to say."""
        self._truncated = True
        self._own(self._kill())

    def _expire(self) -> None:
        self._expired = True
        self._own(self._enforce_limit())

    async def _enforce_limit(self) -> None:
        try:
            if self.command.term_grace:
                await self._send(signal.SIGTERM)
                await self._grace()
            await self._kill()
        finally:
            if self.starter is not None and not self._child.ended.done():
                # It hangs in the kernel, or may not be signalled.
                self.starter.end(self._limit_passed())

    async def _grace(self) -> None:
        """Wait until all have obeyed, at most as long as is granted (X1, X5)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.command.term_grace):
                # Only of the command itself does anybody tell that it ended.
                while await self._families.alive(self.family):  # noqa: ASYNC110
                    await asyncio.sleep(_GRACE_LOOK_SECONDS)

    def _limit_passed(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the command ran into its time limit of {self.command.limit:g} s")

    def _failure_for(self, follower: Follower) -> SandgateError | None:
        return self._limit_passed() if self._expired and follower is self.starter else None
