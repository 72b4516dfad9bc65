"""Which core a call belongs to: this one, or the one whose sandbox or snapshot it names.

What is in memory here is here; only what is not costs a look into the store. A call that another core has passed on is never
passed on again: when it does not belong here any more, its caller asks anew. Which calls name a sandbox, and where, stands in
:data:`ROUTED`; a test holds every method of the service against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.callers import DEFAULT_OWNER, Caller
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.live import LiveTable
from sandgate_core.peers import Peers
from sandgate_core.roster import Owner, Peer
from sandgate_core.sharing import Sharing
from sandgate_core.templates import Templates
from sandgate_errors import Unavailable
from sandgate_plugin_api import Backend

__all__ = ["ANYWHERE", "ROUTED", "Routing"]

_SERVICE = "/sandgate_api.core.v1.SandboxService/"
#: Methods that belong to the core of one sandbox, and the field of the request that names it.
ROUTED: Mapping[str, str] = {
    f"{_SERVICE}Kill": "id",
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
#: Any core makes sandboxes, but from a snapshot that only one can read.
_CREATE = f"{_SERVICE}Create"
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


class Routing:
    """Finds the core of a sandbox. ``sharing``: None where there is one core."""

    def __init__(
        self,
        table: LiveTable,
        *,
        backends: Mapping[str, Backend],
        templates: Templates,
        sharing: Sharing | None,
        node: str,
    ) -> None:
        self._table = table
        self._templates = templates
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
        answer = await peers.forward(
            peer, method, request.SerializeToString(), caller, request_id=request_id, timeout=timeout
        )
        return sandboxes_pb2.CreateResponse.FromString(answer) if method == _CREATE else answer

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
