"""Changing where connections from inside a sandbox may go, while it exists (C55).

The record has the new rules before the backend does, with a note that the backend may not know them yet; a crash in between
leaves the note, and the next start of the core tells the backend again. A backend that refuses leaves the old rules on both
sides; one that does not answer leaves the note.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import structlog

from sandgate_core.egress import egress_of
from sandgate_core.ending import Ending
from sandgate_core.live import Live, LiveTable
from sandgate_core.records import NetworkRules
from sandgate_core.states import State
from sandgate_errors import CapabilityMissing, DeadlineExceeded, NotFound, SandboxNotFound
from sandgate_plugin_api import Backend, Capability

__all__ = ["NetworkChanges"]

#: Seconds a backend may take to put rules in place.
_PATIENCE = 30.0
_log = structlog.get_logger(__name__)


class NetworkChanges:
    """Replaces rules of sandboxes whose lock the caller holds."""

    def __init__(self, *, table: LiveTable, backends: Mapping[str, Backend], ending: Ending) -> None:
        self._table = table
        self._backends = backends
        self._ending = ending

    async def replace(self, live: Live, *, allow: tuple[str, ...], deny: tuple[str, ...], internet: bool) -> None:
        """All rules of a running or paused sandbox, which were checked; who may reach its ports stays as it is.

        Raises CapabilityMissing, SandboxNotFound (it had died by itself), DeadlineExceeded, or the backend's reason.
        """
        record = live.record
        rules = replace(record.network or NetworkRules(), allow_out=allow, deny_out=deny)
        network = None if rules == NetworkRules() else rules
        changes = {"network": network, "allow_internet_access": internet}
        told = egress_of(record.network, internet=record.allow_internet_access)
        if egress_of(network, internet=internet) == told and not record.egress_pending:
            await self._table.amend(live, **changes)  # the same in other words
            return
        backend = self._backends[record.backend]
        if Capability.NETWORK_RULES not in backend.capabilities:
            raise CapabilityMissing.of(backend.name, Capability.NETWORK_RULES.value)
        await self._table.amend(live, **changes, egress_pending=True)
        try:
            await self._tell(live)
        except (SandboxNotFound, DeadlineExceeded):
            raise
        except Exception:
            before = {"network": record.network, "allow_internet_access": record.allow_internet_access}
            await self._table.amend(live, **before, egress_pending=record.egress_pending)
            raise
        await self._table.amend(live, egress_pending=False)

    async def settle(self, live: Live) -> None:
        """Tell the backend what it may not know."""
        if live.record.egress_pending and live.record.state in {State.RUNNING, State.PAUSED}:
            await self._tell(live)
            await self._table.amend(live, egress_pending=False)

    async def _tell(self, live: Live) -> None:
        record = live.record
        egress = egress_of(record.network, internet=record.allow_internet_access)
        try:
            async with asyncio.timeout(_PATIENCE) as bound:
                await self._backends[record.backend].update_egress(record.handle, egress)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded(
                f"the network rules were not in place within {_PATIENCE:g} seconds; the gateway tries again at its next start",
                should_retry=True,
            ) from None
        except NotFound:
            await self._ending.end(live, final=State.FAILED, note="it was found gone")
            raise SandboxNotFound.of(record.id) from None
        _log.info("network rules replaced", sandbox=record.id)
