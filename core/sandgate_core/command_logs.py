"""What commands write, kept for the logs of their sandbox, where the setting `log_commands` asks for it.

The agents make lines of the output (``Agent.FollowLogs``); one task follows each agent that is awake, and once a second all
new lines go into the store in one transaction. Lines outlive pauses, restarts and their sandbox's end, as its record
does. They are bounded by size for each sandbox, and by age. Agents keep the last of them too, so neither a restart of the
core nor a store that is slow for a while loses or doubles a line; an agent that is too fast for us leaves some out and says so.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile

import grpc
import structlog

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_core import clock
from sandgate_core.agents import AGENT_TOKEN, Agents
from sandgate_core.chores import Pause, running
from sandgate_core.command_log_table import CommandLogTable, Line, Piece, Position
from sandgate_core.store import KEEP_ENDED
from sandgate_plugin_api import AgentAddress

__all__ = ["ROOM", "CommandLogs", "Line"]

#: Bytes of text kept of one sandbox, before compression.
ROOM = 4 * 1024 * 1024
#: Bytes of one piece: small enough that the oldest piece to go is not much of the whole.
_PIECE = 64 * 1024
#: So many of the last pieces in a row that are smaller than this are put together: a line each second makes no row each.
_SMALL = 8 * 1024
_MANY = 32
#: Bytes of a sandbox that wait for the store; its agent is not read further until they are written, a second later. So
#: this is also the rate that an agent cannot pass, which has one of its own and may have been tampered with.
_WAITING = 128 * 1024
#: Bytes of one message of an agent, which sends a quarter of it.
_LARGEST_MESSAGE = 1024 * 1024
_LARGEST_NUMBER = 2**63 - 1
#: What a line costs besides its text.
_OVERHEAD = 64
#: Seconds between two writes, two looks for agents that are not followed, two tries with one, two removals of old lines.
_FLUSH = 1.0
_LOOK = 1.0
_RETRY = 5.0
_FORGET = 3600.0
#: Microseconds between two lines at least: a page of 1,000 lines never lies within one millisecond, by which clients page.
_SPACING = 2
#: Microseconds for which a new line is held back from readers: one who pages by time must not have been past it.
_SETTLING = 20_000
_STREAMS = {
    agent_pb2.CommandLine.STREAM_STDOUT: "stdout",
    agent_pb2.CommandLine.STREAM_STDERR: "stderr",
    agent_pb2.CommandLine.STREAM_PTY: "pty",
}
_log = structlog.get_logger(__name__)

#: The sandboxes that are awake, with their agents.
Awake = Callable[[], Iterable[tuple[str, AgentAddress]]]


@dataclass
class _Kept:
    """What is known of one sandbox's lines."""

    #: Of what was taken, whether it is stored or not.
    position: Position
    #: Number and size of the pieces that are stored, oldest first.
    stored: list[tuple[int, int]]
    waiting: list[Line] = field(default_factory=list)
    waiting_size: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def next_number(self) -> int:
        return self.stored[-1][0] + 1 if self.stored else 1


class CommandLogs:
    """Follows agents while :meth:`following` lasts; answers questions always."""

    def __init__(self, table: CommandLogTable, agents: Agents) -> None:
        self._table = table
        self._agents = agents
        self._kept: dict[str, _Kept] = {}
        self._tasks: dict[str, tuple[AgentAddress, asyncio.Task[None]]] = {}
        #: Agents of an earlier version, which have no lines.
        self._without: set[AgentAddress] = set()
        #: Held over every change of what is stored.
        self._storing = asyncio.Lock()

    @asynccontextmanager
    async def forgetting(self) -> AsyncIterator[None]:
        """While the block runs, old lines go."""
        async with running(self._forget):
            yield

    @asynccontextmanager
    async def following(self, awake: Awake) -> AsyncIterator[None]:
        """While the block runs, lines are taken from all agents that are awake."""

        async def look(pause: Pause) -> None:
            while await pause(_LOOK):
                self._look(dict(awake()))

        async with running(look, self._flush):
            self._agents.on_init = self.follow
            try:
                yield
            finally:
                self._agents.on_init = None
                tasks = [task for _, task in self._tasks.values()]
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)
        await self._write()

    def follow(self, sandbox_id: str, address: AgentAddress) -> None:
        """Begin with a new agent at once: its sandbox may not live until the next look."""
        task = asyncio.create_task(self._follow(sandbox_id, address), name=f"logs of {sandbox_id}")
        earlier = self._tasks.pop(sandbox_id, None)
        if earlier is not None:
            earlier[1].cancel()
        self._tasks[sandbox_id] = (address, task)

    async def lines(
        self, sandbox_id: str, *, since: int | None, until: int | None, backward: bool
    ) -> AsyncIterator[Line]:
        """The lines of this time, both inclusive, in the order asked for."""
        latest = clock.now() - _SETTLING
        until = latest if until is None else min(until, latest)
        kept = self._kept.get(sandbox_id)
        waiting = [] if kept is None else list(kept.waiting)
        if backward:
            for line in _within(reversed(waiting), since, until):
                yield line
        async for piece in self._table.pieces(sandbox_id, since=since, until=until, backward=backward):
            for line in _within(piece, since, until):
                # What was waiting may have been written meanwhile.
                if not waiting or line.at < waiting[0].at:
                    yield line
        if not backward:
            for line in _within(waiting, since, until):
                yield line

    # Taking lines

    def _look(self, awake: dict[str, AgentAddress]) -> None:
        for sandbox_id, (_, task) in list(self._tasks.items()):
            if task.done():
                del self._tasks[sandbox_id]
        for sandbox_id, address in awake.items():
            followed = self._tasks.get(sandbox_id)
            if address not in self._without and (followed is None or followed[0] != address):
                self.follow(sandbox_id, address)
        self._without &= set(awake.values())

    async def _follow(self, sandbox_id: str, address: AgentAddress) -> None:
        """Until the agent ends. A sandbox that is paused with its memory is silent, and goes on afterwards."""
        try:
            kept = await self._known(sandbox_id)
            async with self._agents.channel(address.target) as channel:
                call = agent_pb2_grpc.AgentStub(channel).FollowLogs(
                    agent_pb2.FollowLogsRequest(journal=kept.position.journal, after=kept.position.number),
                    metadata=((AGENT_TOKEN, address.token),),
                )
                async for answer in call:
                    if answer.ByteSize() > _LARGEST_MESSAGE:
                        _log.warning("an agent sends no proper lines and is not followed", sandbox=sandbox_id)
                        self._without.add(address)
                        return
                    await self._take(kept, answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._without.add(address)
                return
            _log.debug("an agent's lines ended", sandbox=sandbox_id, code=error.code().name)
        except Exception:
            _log.exception("an agent's lines could not be followed", sandbox=sandbox_id)
        # It may have ended, as in a pause that keeps the files alone: then nobody else has its last lines.
        await self._write()
        # Whoever looks for agents that are not followed finds this one again after a while.
        await asyncio.sleep(_RETRY)

    async def _known(self, sandbox_id: str) -> _Kept:
        kept = self._kept.get(sandbox_id)
        if kept is None:
            position, stored = await self._table.end_of(sandbox_id)
            kept = self._kept.setdefault(sandbox_id, _Kept(position=position, stored=stored))
        return kept

    async def _take(self, kept: _Kept, answer: agent_pb2.FollowLogsResponse) -> None:
        known = kept.position
        journal = min(answer.journal, _LARGEST_NUMBER)
        number = known.number if known.journal == journal else 0
        at = known.at
        for line in answer.lines:
            if not number < line.number <= _LARGEST_NUMBER:
                continue
            # What comes from a sandbox is not to be trusted with the order of things.
            at = max(at + _SPACING, min(line.time.seconds * clock.MICROSECONDS + line.time.nanos // 1000, clock.now()))
            if line.number > number + 1:
                _wait(kept, Line(at, 0, "", "", f"{line.number - number - 1} lines were left out"))
                at += _SPACING
            text = line.text[:_PIECE]
            _wait(kept, Line(at, line.pid, line.tag[:256], _STREAMS.get(line.stream, ""), text))
            number = line.number
        kept.position = Position(journal=journal, number=number, at=at)
        while kept.waiting_size > _WAITING:
            kept.written.clear()
            await kept.written.wait()

    # Keeping them

    async def _flush(self, pause: Pause) -> None:
        while await pause(_FLUSH):
            await self._write()

    async def _write(self) -> None:
        async with self._storing:
            await self._store_waiting()

    async def _store_waiting(self) -> None:
        pieces: list[Piece] = []
        taken: dict[str, int] = {}
        for sandbox_id, kept in self._kept.items():
            if kept.waiting:
                made = list(_pieces_of(sandbox_id, kept))
                pieces += made
                taken[sandbox_id] = sum(len(piece.lines) for piece in made)
        if pieces:
            try:
                await self._table.add(pieces)
            except Exception:
                # They wait on, and once there are too many their agents are not read.
                _log.exception("lines of commands could not be written")
                return
        by_sandbox: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_sandbox[piece.sandbox_id].append(piece)
        for sandbox_id, written in by_sandbox.items():
            kept = self._kept[sandbox_id]
            del kept.waiting[: taken[sandbox_id]]
            kept.waiting_size = sum(map(_size, kept.waiting))
            kept.stored += [(piece.number, piece.size) for piece in written]
            kept.written.set()
            await self._tidy(sandbox_id, kept)
        for sandbox_id in [name for name, kept in self._kept.items() if name not in self._tasks and not kept.waiting]:
            del self._kept[sandbox_id]

    async def _tidy(self, sandbox_id: str, kept: _Kept) -> None:
        small = list(takewhile(lambda piece: piece[1] < _SMALL, reversed(kept.stored)))
        if len(small) >= _MANY:
            first, last = small[-1][0], small[0][0]
            try:
                await self._table.merge(sandbox_id, first=first, last=last)
            except Exception:
                _log.exception("lines of commands could not be put together", sandbox=sandbox_id)
                return
            kept.stored[-len(small) :] = [(last, sum(size for _, size in small))]
        await self._shorten(sandbox_id, kept)

    async def _shorten(self, sandbox_id: str, kept: _Kept) -> None:
        size = sum(size for _, size in kept.stored)
        gone = None
        while size > ROOM and len(kept.stored) > 1:
            gone, freed = kept.stored.pop(0)
            size -= freed
        if gone is not None:
            try:
                await self._table.drop(sandbox_id, up_to=gone)
            except Exception:
                # Dropped with the next one, which has a greater number.
                _log.exception("old lines of commands could not be removed", sandbox=sandbox_id)

    async def _forget(self, pause: Pause) -> None:
        while True:
            try:
                async with self._storing:
                    await self._table.forget(before=clock.now() - KEEP_ENDED)
                    for sandbox_id, kept in list(self._kept.items()):
                        _, kept.stored = await self._table.end_of(sandbox_id)
            except Exception:
                _log.exception("old lines of commands could not be removed")
            if not await pause(_FORGET):
                return


def _wait(kept: _Kept, line: Line) -> None:
    kept.waiting.append(line)
    kept.waiting_size += _size(line)


def _size(line: Line) -> int:
    return len(line.text) + _OVERHEAD


def _pieces_of(sandbox_id: str, kept: _Kept) -> Iterator[Piece]:
    """All that waits. Only the last piece says up to where the journal is known; an earlier one alone is never stored."""
    number = kept.next_number
    lines: list[Line] = []
    size = 0
    for line in kept.waiting:
        lines.append(line)
        size += _size(line)
        if size >= _PIECE:
            yield Piece(sandbox_id=sandbox_id, number=number, lines=lines, size=size, end=kept.position)
            number, lines, size = number + 1, [], 0
    if lines:
        yield Piece(sandbox_id=sandbox_id, number=number, lines=lines, size=size, end=kept.position)


def _within(lines: Iterable[Line] | Sequence[Line], since: int | None, until: int) -> Iterator[Line]:
    return (line for line in lines if (since is None or line.at >= since) and line.at <= until)
