"""How long sandboxes live: their ends are moved by callers, and acted on when they come (C28 to C33).

An end is an absolute time in the record; :mod:`sandgate_core.expiry` says when it has come. Then the sandbox is killed, or
paused where that was asked for. What cannot be done then is done as soon as it can.
"""

from __future__ import annotations

import structlog

from sandgate_core import clock
from sandgate_core.ending import Ending
from sandgate_core.errands import Errands
from sandgate_core.expiry import Expiry
from sandgate_core.live import Live, LiveTable
from sandgate_core.pausing import Pausing
from sandgate_core.quotas import Quotas
from sandgate_core.records import PauseMode, SandboxRecord
from sandgate_core.settling import Settling
from sandgate_core.states import State
from sandgate_errors import Conflict, InvalidArgument, SandboxNotFound, Unavailable

__all__ = ["Lifetimes", "must_be_awake"]

#: Microseconds until a deadline is acted on again that could not be (the store failed).
_RETRY = 2 * clock.MICROSECONDS
_log = structlog.get_logger(__name__)


class Lifetimes:
    """Moves ends and acts on them."""

    def __init__(
        self,
        *,
        table: LiveTable,
        expiry: Expiry,
        errands: Errands,
        ending: Ending,
        pausing: Pausing,
        settling: Settling,
        quotas: Quotas,
        longest: int,
    ) -> None:
        """``longest``: microseconds that any sandbox may live."""
        self._table = table
        self._expiry = expiry
        self._errands = errands
        self._ending = ending
        self._pausing = pausing
        self._settling = settling
        self._quotas = quotas
        self._longest = longest

    def longest(self, owner: str | None) -> int:
        """Microseconds that a sandbox of a team may live; of a caller who sees all teams, any."""
        return self._longest if owner is None else self._quotas.longest_life(owner, most=self._longest)

    async def set_timeout(self, live: Live, *, timeout: int, extend_only: bool) -> SandboxRecord:
        async with live.lock:
            must_be_awake(live.record)
            await self.move_end(live, timeout=timeout, extend_only=extend_only)
            return live.record

    async def extend(self, sandbox_id: str, life: int) -> None:
        """Let a sandbox that is used live for ``life`` microseconds from now at least."""
        live = self._table.get(sandbox_id)
        if live is None:
            return
        async with live.lock:
            if live.record.state is State.RUNNING:
                await self.move_end(live, timeout=life, extend_only=True)

    async def move_end(self, live: Live, *, timeout: int, extend_only: bool) -> None:
        record, now = live.record, clock.now()
        latest = (record.started_at or now) + self.longest(record.owner)
        if timeout > 0 and latest <= now:
            raise InvalidArgument("the longest life of the sandbox is used up")
        end = min(now + max(timeout, 0), latest)
        if extend_only:
            end = max(end, record.end_at or 0)
        if end != record.end_at:
            await self._table.amend(live, end_at=end)
            self._expiry.set(record.id, end)

    def expired(self, sandbox_id: str) -> None:
        live = self._table.get(sandbox_id)
        if live is not None:
            self._errands.post(self._expire(live), "a sandbox could not be ended or paused at its deadline")

    async def _expire(self, live: Live) -> None:
        async with live.lock:
            try:
                # It may not be a deadline but a pause that was left between two states.
                if await self._settling.settle(live):
                    await self._act(live)
            except SandboxNotFound:
                return  # it had died by itself
            except Unavailable as error:
                # Also where another core may have taken it over: then that one acts.
                _log.warning("a deadline could not be kept yet", sandbox=live.record.id, reason=error.message)
                if not live.taken:
                    self._expiry.set(live.record.id, clock.now() + _RETRY)
            except Exception:
                self._expiry.set(live.record.id, clock.now() + _RETRY)
                raise

    async def _act(self, live: Live) -> None:
        record = live.record
        # The deadline may have been moved, and the sandbox ended, while this waited for the lock.
        if record.state is not State.RUNNING or record.end_at is None or record.end_at > clock.now():
            return
        if record.pause_on_timeout:
            mode = PauseMode.FULL if record.pause_memory else PauseMode.FILESYSTEM
            await self._pausing.pause(live, mode=mode, note="its time was up")
        else:
            await self._ending.end(live, final=State.KILLED, note="its time was up")


def must_be_awake(record: SandboxRecord) -> None:
    """Only a sandbox that is awake has an end to move (C31)."""
    if record.state in {State.PAUSING, State.RESUMING}:
        raise Conflict(f"sandbox {record.id} is {record.state.value}")
    if not record.state.awake:
        raise SandboxNotFound.of(record.id)
