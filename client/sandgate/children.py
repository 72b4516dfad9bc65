"""One child process of the gateway, from its settings line to its end.

The protocol is that of ``docs/architecture.md``, "Processes of `sandgate serve`": one line of JSON to standard input, one
back when it is ready, the log on standard error, and the end of standard input as the order to stop. The kernel closes
that pipe when the front dies, so even SIGKILL of the front ends its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandgate.config import PREFIX
from sandgate.logs import Lines, Log, printable
from sandgate_errors import Unavailable

__all__ = ["Child", "Kind", "Refused"]

#: A ready line is short; more than this without a line feed is not one.
_READY_LIMIT = 64 * 1024
#: For a child that is stopped before it was ready.
_START_GRACE = 5.0
#: Output of a child that has ended: what it started may still hold the pipe, and is not waited for.
_LAST_WORDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What there is to know about a kind of child before one starts."""

    name: str
    module: str
    #: Inherited descriptors.
    pass_fds: Sequence[int] = ()
    #: Shows the operator (``ps e``) which gateway a process belongs to.
    state_dir: str = ""
    #: Seconds until it is ready.
    ready_within: float


class _Pipes(asyncio.subprocess.SubprocessStreamProtocol):
    """The child's pipes as streams, and its end as an event of its own.

    ``asyncio.subprocess.Process.wait`` is no use here: it also waits for the pipes, which a grandchild may hold open for
    as long as it likes.
    """

    def __init__(self) -> None:
        super().__init__(limit=_READY_LIMIT, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class Refused(Unavailable):
    """A child said why it does not start, and ended by itself."""


class Child:
    """A started and ready process. ``start`` is the way to one; ``stop`` ends it, however it is."""

    def __init__(self, kind: Kind, transport: asyncio.SubprocessTransport, pipes: _Pipes, log: Log) -> None:
        self.kind = kind
        self.pid: int = transport.get_pid()
        #: What its ready line said.
        self.ready: Mapping[str, object] = {}
        #: On the monotonic clock.
        self.ready_since = 0.0
        self._transport = transport
        self._pipes = pipes
        self._log = log
        self._pumps: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, kind: Kind, settings: Mapping[str, object], *, log: Log, tasks: asyncio.TaskGroup) -> Child:
        """A child that is ready. ``tasks`` owns the readers of its output, and must outlive it.

        Raises Unavailable when it does not come up, and Refused with the child's own line where that is how it ended;
        nothing of it is left then, nor after a cancellation.
        """
        child = cls(kind, *await _spawn(kind), log)
        try:
            child._pumps.append(tasks.create_task(child._pump(child._stream(2))))
            async with asyncio.timeout(kind.ready_within):
                # Not awaited: one that has no wish to read may still say why, or end.
                child._input.write(json.dumps(settings).encode() + b"\n")
                child.ready = await child._ready_line()
            child.ready_since = time.monotonic()
        except TimeoutError:
            await child.stop(grace=_START_GRACE)
            raise Unavailable(f"{kind.name} was not ready within {kind.ready_within:g} s") from None
        except Refused as refusal:
            if await child.stop(grace=_START_GRACE):
                raise
            raise Unavailable(refusal.message) from None
        except BaseException:
            # Also when it was called off half-way: it is asked before it is killed, since it may have begun to make things.
            await child.stop(grace=_START_GRACE)
            raise
        child._pumps.append(tasks.create_task(child._pump(child._stream(1))))
        return child

    async def ended(self) -> None:
        """Wait for its end."""
        await self._pipes.exited.wait()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._pipes.exited.is_set()

    @property
    def manner_of_end(self) -> str:
        """How it ended, for the log."""
        return _manner(self._transport.get_returncode())

    async def stop(self, *, grace: float, hurry: asyncio.Event | None = None, hurried_grace: float = 0) -> bool:
        """Order it to stop, and make sure. True if it obeyed in time; ``hurry`` shortens the time that is left."""
        self._input.close()
        obeyed = await self._ends_within(grace, hurry)
        if not obeyed and hurry is not None and hurry.is_set():
            obeyed = await self._ends_within(hurried_grace, None)
        if not obeyed:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()
        await self.ended()
        await self._close()
        return obeyed

    async def _ends_within(self, grace: float, hurry: asyncio.Event | None) -> bool:
        events = [self._pipes.exited, *([hurry] if hurry is not None else [])]
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._pipes.exited.is_set()

    async def _close(self) -> None:
        """Log its last words, then close our ends, whoever still holds the others."""
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=_LAST_WORDS)
        self._transport.close()
        for pump in self._pumps:
            pump.cancel()

    @property
    def _input(self) -> asyncio.StreamWriter:
        assert self._pipes.stdin is not None  # noqa: S101 - a pipe was asked for
        return self._pipes.stdin

    async def _ready_line(self) -> Mapping[str, object]:
        raw = await self._first_line()
        if not raw:
            await self.ended()
            raise Unavailable(f"{self.kind.name} ended before it was ready ({self.manner_of_end})")
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or "ready" not in answer:
            raise Unavailable(
                f"{self.kind.name} did not say that it is ready but: {printable(raw[:200].decode('utf-8', 'replace'))}"
            )
        if answer["ready"] is not True:
            raise Refused(printable(str(answer.get("error") or f"{self.kind.name} could not start")))
        return answer

    async def _first_line(self) -> bytes:
        try:
            return await self._stream(1).readline()
        except ValueError:  # longer than the limit
            raise Unavailable(f"{self.kind.name} did not say that it is ready") from None

    def _stream(self, number: int) -> asyncio.StreamReader:
        stream = self._pipes.stdout if number == 1 else self._pipes.stderr
        assert stream is not None  # noqa: S101 - a pipe was asked for
        return stream

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        """Empty a pipe into the log for as long as it is open, so that the child never blocks on it."""
        lines = Lines()
        while data := await stream.read(64 * 1024):
            for line in lines.feed(data):
                self._log.line(line, process=self.kind.name)
        self._log.line(lines.end(), process=self.kind.name)


async def _spawn(kind: Kind) -> tuple[asyncio.SubprocessTransport, _Pipes]:
    return await asyncio.get_running_loop().subprocess_exec(
        _Pipes,
        sys.executable,
        "-P",  # "-m" would put the working directory first on the path, where anything may lie
        "-m",
        kind.module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=tuple(kind.pass_fds),
        env=_environment(kind),
        # Ctrl-C in a terminal goes to the whole group; the order in which children stop is the front's to choose.
        start_new_session=True,
    )


def _environment(kind: Kind) -> dict[str, str]:
    """Settings travel by the settings line; the variables hold secrets, and sandboxes without isolation could read them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**kept, "SANDGATE_STATE_DIR": kind.state_dir}


def _manner(status: int | None) -> str:
    if status is not None and status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"
