"""What callers may ask about sandboxes (list, get, histories, measurements), answered without touching them.

This core's sandboxes are answered from memory, without a lock; those of other cores of the store as the store has them
(:mod:`sandgate_core.elsewhere`). Where a sandbox's agent is, is :mod:`sandgate_core.locating`'s to say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from sandgate_core.callers import Caller
from sandgate_core.elsewhere import Elsewhere
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.listing import Page, Query, page_of
from sandgate_core.live import LiveTable
from sandgate_core.metrics import Metrics
from sandgate_core.ordering import Ordering, together
from sandgate_core.policy import Policy
from sandgate_core.records import SandboxRecord
from sandgate_core.samples import Series
from sandgate_core.states import State
from sandgate_core.store import Change, Store
from sandgate_core.templates import Templates
from sandgate_errors import SandboxNotFound, SandgateError
from sandgate_plugin_api import Backend

__all__ = ["Questions"]

#: Seconds a backend may take to say what address a sandbox has.
_ADDRESS_PATIENCE = 10.0
_log = structlog.get_logger(__name__)


class Questions:
    """Answers them. A sandbox of another owner does not exist, for every question (S12)."""

    def __init__(
        self,
        *,
        table: LiveTable,
        store: Store,
        backends: Mapping[str, Backend],
        elsewhere: Elsewhere,
        templates: Templates,
        metrics: Metrics,
        policy: Policy,
        template_patience: float,
    ) -> None:
        """``template_patience``: seconds a backend may take to find a template by a reference."""
        self._table = table
        self._store = store
        self._backends = backends
        self._templates = templates
        self._metrics = metrics
        self._policy = policy
        self._template_patience = template_patience
        self._elsewhere = elsewhere

    async def get(self, sandbox_id: str, caller: Caller) -> SandboxRecord:
        name = parse_sandbox_id(sandbox_id)
        live = self._table.get(name)
        record = await self._elsewhere.find(name) if live is None else live.record
        if record is None or not caller.sees(record.owner) or not record.state.shown:
            raise SandboxNotFound.of(name)
        return record

    async def address(self, sandbox_id: str) -> str:
        """The IP address that a running sandbox of this core has for itself; empty: none, or its backend does not say."""
        live = self._table.get(sandbox_id)
        if live is None or not live.record.state.awake:
            return ""
        try:
            async with asyncio.timeout(_ADDRESS_PATIENCE):
                return await self._backends[live.record.backend].address(live.record.handle) or ""
        except (SandgateError, TimeoutError) as error:
            _log.warning("a backend does not say where a sandbox is", sandbox=sandbox_id, reason=str(error))
            return ""

    async def list(self, query: Query, caller: Caller, *, template: str | None = None) -> Page:
        """One page. ``template`` is an id or a name."""
        query, template, where = await self._policy.query(query, owner=caller.owner, template=template)
        names = query.templates if template is None else await self._templates.names_of(template, owner=caller.owner)
        query = replace(query, templates=names)
        # What a plugin leaves out, no limit may have counted.
        of_others = query if where is None else replace(query, page_size=None, page_token="")
        records, running = await self._elsewhere.for_page(of_others, owner=caller.owner)
        found = self._table.ordering.find(query, owner=caller.owner, where=where)
        if records or running:
            # One that changes hands just now may be here and there.
            others = Ordering(record for record in records if self._table.get(record.id) is None)
            beside = others.find(query, owner=caller.owner, where=where)
            found = together(query, [found, beside])
        return page_of(found.records, query, total_running=found.running + running)

    def counts(self) -> Counter[tuple[str, str]]:
        """This core's that have not ended, by backend and state."""
        return Counter((record.backend, record.state.value) for record in self._table.records())

    def secured(self) -> tuple[SandboxRecord, ...]:
        """This core's that a token protects and that callers may see."""
        return tuple(record for record in self._table.records() if record.secure and record.state.shown)

    def metrics(self, sandbox_id: str, caller: Caller) -> Series:
        """What a sandbox of this core used; nothing while it is paused."""
        return self._metrics.series(self._table.shown(sandbox_id, caller).record.id)

    async def events(self, sandbox_id: str, caller: Caller) -> Sequence[Change]:
        """What happened to a sandbox, ended ones included for as long as their record is kept."""
        name = parse_sandbox_id(sandbox_id)
        live = self._table.get(name)
        record = await self._store.find(name) if live is None else live.record
        # One that is being ended has a history before and after that; one that is being made is known to nobody yet.
        if record is None or not caller.sees(record.owner) or record.state is State.CREATING:
            raise SandboxNotFound.of(name)
        return await self._store.history(name)

    async def template_id(self, name: str, caller: Caller) -> str:
        """The id of the template or snapshot that ``name`` stands for. Raises NotFound."""
        return (await self._templates.find(name, owner=caller.owner, patience=self._template_patience)).id

    async def spawns(self, caller: Caller) -> dict[tuple[str, str], tuple[int, int]]:
        """How often each template was used, as :meth:`Store.spawns` counts."""
        return await self._store.spawns(caller.owner)
