"""What sandboxes use while they run: told by their backend or else their agents, readable for the sandbox's life (C25).

Every running sandbox is asked every five seconds, a few at a time, so that no call of a client waits behind them all.
Once a minute the new samples go into the store in one transaction: a crash of the core loses a minute at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog

from sandgate_core import clock
from sandgate_core.agents import Agents
from sandgate_core.live import Live, LiveTable
from sandgate_core.samples import Sample, Series, percent
from sandgate_core.states import State
from sandgate_core.store import Piece, Store
from sandgate_errors import SandboxUnreachable, SandgateError
from sandgate_plugin_api import AgentAddress, Backend

__all__ = ["INTERVAL", "Metrics"]

#: Seconds between two samples of a sandbox; what clients expect (C25).
INTERVAL = 5.0
#: Seconds between two writes to the store.
_FLUSH = 60.0
#: Seconds an agent may take for one sample; it is a handful of small reads.
_PATIENCE = 2.0
#: Sandboxes measured at once. More would only wait for one another.
_AT_ONCE = 8
_log = structlog.get_logger(__name__)


class Metrics:
    """The series of all live sandboxes, and the task that fills them."""

    def __init__(
        self,
        *,
        table: LiveTable,
        backends: Mapping[str, Backend],
        agents: Agents,
        store: Store,
        interval: float = INTERVAL,
    ) -> None:
        self._table = table
        self._backends = backends
        self._agents = agents
        self._store = store
        self._interval = interval
        self._series: dict[str, Series] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what the store has; begin to sample. The task lives until :meth:`close`."""
        for sandbox_id, packed in await self._store.measurements():
            if self._table.get(sandbox_id) is not None:
                self._series.setdefault(sandbox_id, Series()).load(packed)
        self._task = asyncio.create_task(self._run(), name="metrics")

    async def take_up(self, sandbox_ids: Iterable[str]) -> None:
        """What the store has of sandboxes that were another core's."""
        for sandbox_id in sandbox_ids:
            series = Series()
            for packed in await self._store.measurements_of(sandbox_id):
                series.load(packed)
            if self._table.get(sandbox_id) is not None:
                self._series.setdefault(sandbox_id, series)

    def forget(self, sandbox_id: str) -> None:
        """Another core measures it now; what the store has is that one's."""
        self._series.pop(sandbox_id, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            await self._write()

    def series(self, sandbox_id: str) -> Series:
        """What is known of a sandbox; empty before its first sample."""
        return self._series.get(sandbox_id) or Series()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        written = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._round(group)
                if loop.time() - written >= _FLUSH:
                    await self._write()
                    written = loop.time()

    async def _round(self, group: asyncio.TaskGroup) -> None:
        """Every running sandbox once, a few at a time: each time wakes this process and whoever measures."""
        running = [live for live in self._table if live.record.state is State.RUNNING and live.agent is not None]
        turns = [running[first : first + _AT_ONCE] for first in range(0, len(running), _AT_ONCE)]
        for turn in turns:
            for live in turn:
                await self._places.acquire()
                group.create_task(self._sample(live))
            await asyncio.sleep(self._interval / len(turns))
        if not turns:
            await asyncio.sleep(min(1.0, self._interval))

    async def _sample(self, live: Live) -> None:
        try:
            if live.agent is None or live.record.state is not State.RUNNING:
                return
            sample = await self._measured(live, live.agent)
            if not live.record.state.ended:
                self._series.setdefault(live.record.id, Series()).add(sample)
        except SandgateError as error:
            # It may be ending just now; whether it lives is found out by those who ask for it.
            _log.debug("a sandbox could not be measured", sandbox=live.record.id, reason=error.message)
        except Exception:
            # One agent's strange answer must not end the measuring of all others.
            _log.exception("a sandbox could not be measured", sandbox=live.record.id)
        finally:
            self._places.release()

    async def _measured(self, live: Live, agent: AgentAddress) -> Sample:
        """By the backend, which the sandbox cannot lie to; where it does not measure, by the agent."""
        backend = self._backends.get(live.record.backend)
        try:
            async with asyncio.timeout(_PATIENCE):
                usage = None if backend is None else await backend.usage(live.record.handle)
        except TimeoutError:
            raise SandboxUnreachable("the backend does not measure") from None
        if usage is None:
            return await self._agents.sample(agent, patience=_PATIENCE)
        return Sample(
            at=clock.now(),
            cpu_count=usage.cpu_count,
            cpu_used_pct=percent(usage.cpu_used_pct),
            mem_total=usage.mem_total,
            mem_used=usage.mem_used,
            mem_cache=usage.mem_cache,
            disk_used=usage.disk_used,
            disk_total=usage.disk_total,
        )

    async def _write(self) -> None:
        gone = {sandbox_id for sandbox_id in self._series if self._table.get(sandbox_id) is None}
        instead = {sandbox_id for sandbox_id in gone if self._series.pop(sandbox_id).in_store}
        pieces: list[Piece] = []
        for sandbox_id, series in self._series.items():
            piece, whole = series.unwritten(sandbox_id)
            if piece is not None:
                pieces.append(piece)
            if whole:
                instead.add(sandbox_id)
        if pieces or instead:
            try:
                await self._store.keep_measurements(pieces, instead=instead)
            except Exception:
                # They are still in memory, where they are asked for; only a restart would miss them.
                _log.exception("measurements could not be written")
