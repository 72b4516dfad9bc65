"""Which core a call belongs to: this one, or the one whose sandbox or snapshot it names.

What is in memory here is here; only what is not costs a look into the store. A call that another core has passed on is never
passed on again: when it does not belong here any more, its caller asks anew. Which calls name a sandbox, and where, stands in
:data:`ROUTED`; a test holds every method of the service against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.callers import DEFAULT_OWNER, Caller
from sandgate_core.errands import Errands
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.live import LiveTable
from sandgate_core.peers import Peers
from sandgate_core.roster import Owner, Peer
from sandgate_core.sharing import Sharing
from sandgate_core.templates import Templates
from sandgate_core.undelivered import if_undelivered
from sandgate_errors import Unavailable
from sandgate_plugin_api import Backend

__all__ = ["ANYWHERE", "ROUTED", "Routing"]

_SERVICE = "/sandgate_api.core.v1.SandboxService/"
_KILL = f"{_SERVICE}Kill"
#: Any core makes sandboxes, but from a snapshot that only one can read.
_CREATE = f"{_SERVICE}Create"
#: Methods that belong to the core of one sandbox, and the field of the request that names it.
ROUTED: Mapping[str, str] = {
    _KILL: "id",
    f"{_SERVICE}SetTimeout": "id",
    f"{_SERVICE}Connect": "id",
    f"{_SERVICE}Pause": "id",
    f"{_SERVICE}Resume": "id",
    f"{_SERVICE}Locate": "id",
    f"{_SERVICE}CreateSnapshot": "id",
    f"{_SERVICE}Fork": "id",
    f"{_SERVICE}UpdateNetwork": "id",
    f"{_SERVICE}NoteActivity": "id",
}
#: Methods that any core answers, or asks several cores for.
ANYWHERE = frozenset(
    {
        _CREATE,
        f"{_SERVICE}Get",
        f"{_SERVICE}List",
        f"{_SERVICE}GetMetrics",
        f"{_SERVICE}GetEvents",
        # Says nothing about a sandbox that is not at hand; its caller asks Locate then.
        f"{_SERVICE}LocateStream",
        f"{_SERVICE}FindTemplate",
        f"{_SERVICE}ListTemplates",
        f"{_SERVICE}ListSnapshots",
        f"{_SERVICE}DeleteSnapshot",
        f"{_SERVICE}FindByTokenHash",
    }
)
#: Seconds until a caller should ask again: for a sandbox on its way to another core, and for one whose core may be back.
_SOON = 1.0
_LATER = 10.0
#: Seconds for a kill on another core that nobody waits for.
_PATIENCE = 60.0


class _Forward(Protocol):
    """:meth:`Peers.forward` to one core, for one caller."""

    def __call__(self, method: str, request: bytes, *, timeout: float | None) -> Coroutine[Any, Any, bytes]: ...


class Routing:
    """Finds the core of a sandbox. ``sharing``: None where there is one core."""

    def __init__(
        self,
        table: LiveTable,
        *,
        backends: Mapping[str, Backend],
        templates: Templates,
        errands: Errands,
        sharing: Sharing | None,
        node: str,
    ) -> None:
        self._table = table
        self._templates = templates
        self._errands = errands
        self._backends = backends
        self._sharing = sharing
        self._node = node

    def check(self) -> None:
        """Raises Unavailable when another core may act in this one's place."""
        if self._sharing is not None:
            self._sharing.lease.check()

    async def elsewhere(self, sandbox_id: str, caller: Caller) -> tuple[Peers, Peer] | None:
        """The other core whose sandbox it is, and the way there; None: it is for this one to answer.

        Raises Unavailable while nobody can answer for it.
        """
        if self._sharing is None or self._table.get(sandbox_id) is not None:
            return None
        owner = await self._sharing.roster.owner_of(sandbox_id)
        # The table is looked at again: the sandbox may have been made or taken over meanwhile.
        if owner is None or not caller.sees(owner.team) or self._table.get(sandbox_id) is not None:
            return None
        if owner.core.id == self._node or caller.forwarded:
            if not owner.state.shown:
                return None
            raise Unavailable(
                f"sandbox {sandbox_id} is being taken over by another core", retry_after=_SOON, should_retry=True
            )
        if not owner.core.alive:
            raise self._away(sandbox_id, owner)
        return self._sharing.peers, owner.core

    async def answer(self, method: str, request: Any, caller: Caller, *, request_id: str, timeout: float | None) -> Any:
        """What the core of the sandbox answers that ``request`` names; None: it is for this one to answer.

        Bytes, but for a create: what it made is for the audit.
        """
        self.check()
        if method == _CREATE:
            found = await self._of_snapshot(request, caller)
        elif (field := ROUTED.get(method)) is not None:
            found = await self.elsewhere(parse_sandbox_id(getattr(request, field)), caller)
        else:
            return None
        if found is None:
            return None
        peers, peer = found
        forward = partial(peers.forward, peer, caller=caller, request_id=request_id)
        if method != _CREATE:
            return await forward(method, request.SerializeToString(), timeout=timeout)
        return await self._created(request, forward, timeout=timeout)

    async def _created(
        self, request: sandboxes_pb2.CreateRequest, forward: _Forward, *, timeout: float | None
    ) -> sandboxes_pb2.CreateResponse:
        """What the other core has made, and its caller gets; else it is ended there (C12).

        A call that is cancelled may have been answered already. So it goes on without its caller, to learn what it made.
        """
        making = self._errands.start(forward(_CREATE, request.SerializeToString(), timeout=timeout))

        def take_back() -> None:
            if not request.idempotency_key:
                self._errands.post(_taken_back(making, forward), "an unknown sandbox lives on another core")

        try:
            answer = await asyncio.shield(making)
        except asyncio.CancelledError:
            take_back()
            raise
        if_undelivered(take_back)
        return sandboxes_pb2.CreateResponse.FromString(answer)

    async def _of_snapshot(self, request: sandboxes_pb2.CreateRequest, caller: Caller) -> tuple[Peers, Peer] | None:
        """The core that has the snapshot to make a sandbox from. One that is away is for the create itself to tell."""
        if self._sharing is None or caller.forwarded:
            return None
        core = await self._templates.kept_at(request.template_id, owner=caller.owner or DEFAULT_OWNER)
        peer = None if core is None else await self._sharing.roster.find(core)
        return None if peer is None or not peer.alive else (self._sharing.peers, peer)

    def _away(self, sandbox_id: str, owner: Owner) -> Unavailable:
        backend = self._backends.get(owner.backend)
        if backend is not None and not backend.host_bound:
            return Unavailable(
                f"sandbox {sandbox_id} is being taken over from core {owner.core.id}, which is away",
                retry_after=_SOON,
                should_retry=True,
            )
        return Unavailable(
            f"core {owner.core.id} on {owner.core.host} is away, and sandbox {sandbox_id} is on its machine",
            retry_after=_LATER,
            should_retry=True,
        )


async def _taken_back(making: asyncio.Task[bytes], forward: _Forward) -> None:
    await asyncio.wait({making})
    if making.cancelled() or making.exception() is not None:
        return
    made = sandboxes_pb2.CreateResponse.FromString(making.result()).sandbox.id
    await forward(_KILL, sandboxes_pb2.KillRequest(id=made).SerializeToString(), timeout=_PATIENCE)
