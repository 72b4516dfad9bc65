"""What a start of the core finds, put in order before the first call is served.

Sandboxes do not depend on the gateway's processes, so after a stop or a crash the store and the world may differ. Each
backend is asked what exists. What is known and there is adopted; what nobody knows is destroyed; a record whose sandbox
is gone ends; what was under way is finished: a half-made sandbox is freed, one that was being killed is killed, one
between running and paused is paused.

Where several cores share the store, what belongs to a sandbox of another core is left alone, and what a core takes over from
one that died is put in order in the same way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import structlog

from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.live import Live, LiveTable
from sandgate_core.pausing import Pausing
from sandgate_core.states import State
from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api import Backend, Survivor

__all__ = ["Recovery"]

#: Sandboxes looked at side by side; each may read a few files or ask a daemon.
_AT_ONCE = 16
#: Seconds. Long enough for a loaded machine, short enough that a start which hangs says so.
_PATIENCE = 60.0
_GONE = "it was gone when the core started"
_HALF_MADE = "the core stopped while it was being made"
_log = structlog.get_logger(__name__)


class Recovery:
    """Puts sandboxes in order that nobody has looked after for a while."""

    def __init__(
        self,
        *,
        table: LiveTable,
        backends: Mapping[str, Backend],
        ending: Ending,
        pausing: Pausing,
        errands: Errands,
        theirs: Callable[[Collection[str]], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """``theirs``: which of these ids are sandboxes of other cores; None where there are none."""
        self._table = table
        self._backends = backends
        self._ending = ending
        self._pausing = pausing
        self._errands = errands
        self._theirs = theirs

    async def run(self) -> None:
        """At the start. Raises FailedPrecondition when it would lose track of sandboxes."""
        self._check_backends()
        existing: set[str] = set()
        for name, backend in self._backends.items():
            survivors = await _surveyed(name, backend)
            existing |= {survivor.sandbox_id for survivor in survivors}
            for survivor in await self._strangers(name, survivors):
                self._errands.post(_destroy_stranger(backend, survivor), "an unknown sandbox could not be destroyed")
        await self._settle_all(self._table, existing)

    async def take_up(self, lives: Collection[Live]) -> None:
        """What was another core's and is this one's now; not in the table yet."""
        existing: set[str] = set()
        for name in {live.record.backend for live in lives}:
            try:
                existing |= {survivor.sandbox_id for survivor in await _surveyed(name, self._backends[name])}
            except FailedPrecondition as error:
                _log.error("what was taken over cannot be looked at", backend=name, reason=error.message)
                # Better one that is gone than one that is given up: whoever resumes it finds out.
                existing |= {live.record.id for live in lives if live.record.backend == name}
        await self._settle_all(lives, existing)

    async def _settle_all(self, lives: Iterable[Live], existing: Collection[str]) -> None:
        places = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._settle(live, places, existing) for live in lives))

    async def _strangers(self, name: str, survivors: Sequence[Survivor]) -> list[Survivor]:
        """Those that are no sandbox of any core's."""
        unknown: list[Survivor] = []
        for survivor in survivors:
            live = self._table.get(survivor.sandbox_id)
            if live is None or live.record.backend != name:
                unknown.append(survivor)
        if not unknown or self._theirs is None:
            return unknown
        # Asked after the survey: a record is written before its sandbox is made.
        theirs = await self._theirs([survivor.sandbox_id for survivor in unknown])
        return [survivor for survivor in unknown if survivor.sandbox_id not in theirs]

    def _check_backends(self) -> None:
        orphans = Counter(live.record.backend for live in self._table if live.record.backend not in self._backends)
        if orphans:
            held = ", ".join(f"{count} in backend '{name}'" for name, count in sorted(orphans.items()))
            raise FailedPrecondition(
                f"there are live sandboxes whose backend is not configured ({held}): configure it again and kill them first"
            )

    async def _settle(self, live: Live, places: asyncio.Semaphore, existing: Collection[str]) -> None:
        async with places, live.lock:
            match live.record.state:
                case State.CREATING:
                    await self._ending.free(live, final=State.FAILED, note=_HALF_MADE)
                case State.KILLING:
                    await self._ending.free(live, final=State.KILLED, note="killed before the core stopped")
                case State.PAUSED:
                    if live.record.id not in existing:
                        await self._bury(live)
                case State.PAUSING | State.RESUMING:
                    await self._pausing.settle(live)
                case State.RUNNING | State.SNAPSHOTTING:
                    await self._adopt(live)

    async def _adopt(self, live: Live) -> None:
        record = live.record
        try:
            async with asyncio.timeout(_PATIENCE):
                placement = await self._backends[record.backend].locate(record.handle)
        except Exception:
            # One sandbox that cannot be judged must not keep all others from being served. It keeps its record and
            # its deadline; whoever asks for it makes the core look again.
            _log.exception("a sandbox could not be located", sandbox=record.id, backend=record.backend)
            return
        if placement is None:
            await self._bury(live)
            return
        live.agent = placement.agent
        if record.state is not State.RUNNING:
            await self._table.move(
                live, State.RUNNING, note="the core stopped during an operation", handle=dict(placement.handle)
            )
        elif dict(placement.handle) != dict(record.handle):
            await self._table.amend(live, handle=dict(placement.handle))
        _log.info("sandbox adopted", sandbox=record.id, backend=record.backend)

    async def _bury(self, live: Live) -> None:
        await self._ending.end(live, final=State.FAILED, note=_GONE)


async def _surveyed(name: str, backend: Backend) -> list[Survivor]:
    try:
        async with asyncio.timeout(_PATIENCE):
            return list(await backend.survey())
    except SandgateError as error:
        raise FailedPrecondition(f"backend '{name}' cannot say which sandboxes exist: {error.message}") from error
    except TimeoutError:
        raise FailedPrecondition(
            f"backend '{name}' does not say which sandboxes exist within {_PATIENCE:g} s"
        ) from None


async def _destroy_stranger(backend: Backend, survivor: Survivor) -> None:
    _log.warning("destroying a sandbox that nobody knows", sandbox=survivor.sandbox_id, backend=backend.name)
    await backend.destroy(survivor.handle)
