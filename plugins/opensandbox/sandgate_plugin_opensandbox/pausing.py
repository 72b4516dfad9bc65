"""Pausing and resuming, for two kinds of runtimes.

Docker freezes a sandbox, and everything in it goes on after a resume. Kubernetes keeps its files and ends the rest. On
Docker files alone are kept as a snapshot: the sandbox goes, and a resume makes another one from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from sandgate_errors import CapabilityMissing, Internal, NotFound, Unavailable
from sandgate_plugin_api import Capability, Placement
from sandgate_plugin_opensandbox.fleet import Fleet
from sandgate_plugin_opensandbox.handles import Handle, id_of, name_of, running
from sandgate_plugin_opensandbox.server import Refused, Server, state_of
from sandgate_plugin_opensandbox.settings import TemplateSettings
from sandgate_plugin_opensandbox.snapshots import Snapshots
from sandgate_plugin_opensandbox.starting import Agents

__all__ = ["Pausing"]

_PAUSING, _RESUMING = frozenset({"Running", "Pausing"}), frozenset({"Paused", "Resuming"})

#: Makes a sandbox of a handle anew, from a snapshot: its id and agent.
Remake = Callable[[Handle, str], Awaitable[Placement]]


class Pausing:
    """Of one backend's sandboxes. The caller holds the sandbox's lock."""

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        agents: Agents,
        snapshots: Snapshots,
        *,
        freezes: bool,
        capabilities: frozenset[Capability],
        remake: Remake,
        template: Callable[[Handle], TemplateSettings],
    ) -> None:
        self._server = server
        self._fleet = fleet
        self._agents = agents
        self._snapshots = snapshots
        self._freezes = freezes
        self._capabilities = capabilities
        self._remake = remake
        self._template = template

    async def pause(self, handle: Handle, *, memory: bool) -> Mapping[str, object]:
        """The handle of the paused sandbox."""
        capability = Capability.PAUSE if memory else Capability.PAUSE_FILESYSTEM
        if capability not in self._capabilities:
            raise CapabilityMissing.of("opensandbox", capability.value)
        if handle.get("paused") == "files" and "id" not in handle:
            await self._snapshots.check(handle.get("kept"))
            return handle
        details = await self._fleet.existing(id_of(handle))
        sandbox = str(details["id"])
        if not memory and self._freezes:
            return await self._keep_files(handle, sandbox, paused=state_of(details) == "Paused")
        network = {} if memory else await self._network(sandbox)
        await self._stand_still(sandbox)
        # Else whoever holds a connection would wait for one that stands still, or for one that has ended.
        if not memory:
            await self._agents.forget(name_of(handle))
        return {**handle, "id": sandbox, "paused": "memory" if memory else "files", **network}

    async def _stand_still(self, sandbox: str) -> None:
        try:
            await self._server.pause(sandbox)
        except Refused as refused:
            # One that is paused already is told from one that ended by its state.
            if refused.status == 400:
                raise CapabilityMissing.of("opensandbox", Capability.PAUSE_FILESYSTEM.value) from refused
            if refused.status != 409:
                raise
        if (state := await self._fleet.settled(sandbox, passing=_PAUSING)) != "Paused":
            raise Unavailable(f"the sandbox cannot be paused now: it is {state}")

    async def _keep_files(self, handle: Handle, sandbox: str, *, paused: bool) -> Mapping[str, object]:
        """As a snapshot, which outlives the sandbox. Failed: it runs."""
        name = name_of(handle)
        network = await self._network(sandbox)
        if paused:
            # The server takes snapshots of what runs. Its memory is given up in any case.
            await self._server.resume(sandbox)
        kept_name = self._snapshots.paused_name(name)
        # Of an earlier try that was cut off.
        await self._snapshots.give_up(kept_name)
        kept = await self._snapshots.make(sandbox, name=kept_name)
        try:
            await self._fleet.erase(name, sandbox)
        except BaseException:
            await self._snapshots.delete(kept)
            raise
        rest = {key: value for key, value in handle.items() if key != "id"}
        return {**rest, "paused": "files", "kept": kept, **network}

    async def _network(self, sandbox: str) -> Mapping[str, object]:
        """The rules that hold, which the next start has to be given again."""
        if Capability.NETWORK_RULES not in self._capabilities:
            return {}
        return {"network": await self._server.network(sandbox)}

    async def resume(self, handle: Handle) -> Placement:
        name = name_of(handle)
        if "id" not in handle:
            return await self._from_files(handle)
        details = await self._fleet.existing(id_of(handle))
        sandbox = str(details["id"])
        if state_of(details) != "Running":
            await self._go_on(sandbox)
        elif handle.get("paused") != "files":
            # It runs already, as after an answer that nobody got.
            return Placement(handle=running(handle, sandbox), agent=await self._agents.reached(name, sandbox))
        if handle.get("paused") != "files":
            address = await self._agents.reached(name, sandbox)
        else:
            await self._restore_network(handle, sandbox)
            address = await self._agents.start_if_needed(name, sandbox, self._template(handle))
        return Placement(handle=running(handle, sandbox), agent=address)

    async def _go_on(self, sandbox: str) -> None:
        try:
            await self._server.resume(sandbox)
        except Refused as refused:
            if refused.status != 409:
                raise
        if (state := await self._fleet.settled(sandbox, passing=_RESUMING)) != "Running":
            raise Unavailable(f"the sandbox cannot be resumed now: it is {state}")

    async def _restore_network(self, handle: Handle, sandbox: str) -> None:
        network = handle.get("network")
        if isinstance(network, dict) and network:
            await self._server.set_network(sandbox, network)

    async def _from_files(self, handle: Handle) -> Placement:
        name = name_of(handle)
        # A resume of which nobody heard the end, or that a crash cut off: what it made may be whole or not.
        for details in await self._fleet.find(name):
            if state_of(details) == "Running":
                sandbox = str(details["id"])
                address = await self._agents.start_if_needed(name, sandbox, self._template(handle))
                return Placement(handle=running(handle, sandbox), agent=address)
            await self._fleet.erase(name, str(details["id"]))
        kept = handle.get("kept")
        if not isinstance(kept, str):
            raise Internal("the handle of the sandbox is damaged")
        try:
            kept = await self._snapshots.check(kept)
        except NotFound:
            raise NotFound("there is no such sandbox") from None
        return await self._remake(handle, kept)
