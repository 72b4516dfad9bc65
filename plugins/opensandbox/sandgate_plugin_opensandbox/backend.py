"""The OpenSandbox backend: one sandbox is one of an OpenSandbox server's, with our agent started in it.

Called by the core (``sandgate_plugin_api.backend`` says when). What this module adds to the parts is order: labels under
which the server finds a sandbox before it is made, an agent before an answer, and nothing left behind by a call that fails,
is cancelled or never hears what became of it. What the server knows is not kept here a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from sandgate_bundle import Bundle, forget_portable, make_portable
from sandgate_errors import CapabilityMissing, FailedPrecondition, Internal, SandgateError, Unavailable
from sandgate_plugin_api import (
    AgentFeature,
    Backend,
    BackendContext,
    Capability,
    Egress,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
    to_its_end,
)
from sandgate_plugin_opensandbox.fleet import Fleet
from sandgate_plugin_opensandbox.handles import id_of, name_of, running
from sandgate_plugin_opensandbox.identity import Identity, Name
from sandgate_plugin_opensandbox.keeping import Keeper
from sandgate_plugin_opensandbox.pausing import Pausing
from sandgate_plugin_opensandbox.probing import diagnose, probe
from sandgate_plugin_opensandbox.rules import policy
from sandgate_plugin_opensandbox.server import Server, has_ended, told
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings
from sandgate_plugin_opensandbox.snapshots import Snapshots
from sandgate_plugin_opensandbox.starting import Agents, Starter, pack
from sandgate_plugin_opensandbox.templates import Catalog, Model
from sandgate_plugin_opensandbox.tunnels import Tunnels

__all__ = ["OpenSandboxBackend"]

_log = logging.getLogger(__name__)

#: Where `sandbox_binds` of the server finds the bundle of today, below the backend's state directory.
_CURRENT = "bundle"


class OpenSandboxBackend(Backend):
    """Sandboxes of one OpenSandbox server."""

    name = "opensandbox"

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._closing = contextlib.AsyncExitStack()
        self._bundle: Bundle | None = None
        self._locks: MutableMapping[Name, asyncio.Lock] = WeakValueDictionary()

    async def open(self) -> None:
        self._settings = OpenSandboxSettings.read(self._context.settings)
        # Whoever shares the name on the server and the root of the tokens can take over.
        self.host_bound = self._settings.gateway is None
        try:
            with told("the backend"):
                await self._open()
        except BaseException as error:
            await self._closing.aclose()
            if isinstance(error, SandgateError) and not isinstance(error, FailedPrecondition):
                raise FailedPrecondition(f"{error.message} ({self._settings.server})") from error
            raise

    async def _open(self) -> None:
        settings, state = self._settings, self._context.state_dir
        self._identity = await asyncio.to_thread(Identity.of, settings, state)
        server = self._server = Server.connect(settings)
        self._closing.push_async_callback(server.close)
        abilities = await probe(server, settings)
        _log.info("OpenSandbox %s on %s at %s", abilities.version, abilities.runtime, server.address)
        self.capabilities = abilities.capabilities
        self._agents = agents = await (self._agents_outside() if settings.execd_only else self._agents_inside())
        self._catalog = Catalog(settings)
        self._snapshots = Snapshots(server, self._identity.gateway)
        self._fleet = Fleet(server, agents, self._identity.gateway, lifetime=settings.lifetime, rules=self._has_rules)
        self._keeper = Keeper(
            server,
            gateway=self._identity.gateway,
            lifetime=settings.lifetime,
            snapshots=Capability.SNAPSHOT in self.capabilities,
            erase=self._erase_stray,
        )
        self._fleet.keeper = self._keeper
        self._pausing = Pausing(
            server,
            self._fleet,
            agents,
            self._snapshots,
            freezes=abilities.freezes,
            capabilities=self.capabilities,
            remake=self._remake,
            template=lambda handle: self._model_of(handle).settings,
        )
        self._closing.push_async_callback(self._fleet.close)
        self._closing.push_async_callback(self._keeper.close)
        if self._bundle is not None and (not settings.agent_mount or not await self._fleet.ours()):
            # Files under a running interpreter must stay.
            await asyncio.to_thread(forget_portable, state, keep={self._bundle.name})
        self._keeper.open()

    async def _agents_inside(self) -> Agents:
        settings, state = self._settings, self._context.state_dir
        bundle = await asyncio.to_thread(make_portable, state, entrance=Path(__file__).with_name("enter.py"))
        await asyncio.to_thread(_point, state / _CURRENT, bundle.path.relative_to(state))
        archive = None if settings.agent_mount else await asyncio.to_thread(pack, bundle, state)
        tunnels = Tunnels(self._server.session, self._context.runtime_dir)
        self._closing.push_async_callback(tunnels.close)
        self._bundle = bundle
        return Starter(self._server, self._identity, settings, bundle=bundle, archive=archive, tunnels=tunnels)

    async def _agents_outside(self) -> Agents:
        # Not at the top: it brings the agent's own modules.
        from sandgate_plugin_opensandbox.by_execd import ExecdStarter, FarAgents

        self.lacks = frozenset(AgentFeature)
        _log.warning("sandboxes get no agent ('execd_only'); what they lack: %s", ", ".join(sorted(self.lacks)))
        server = self._server
        agents = FarAgents(server.session, self._context.runtime_dir, tls=lambda: server.tls)
        self._closing.push_async_callback(agents.close)
        return ExecdStarter(server, self._identity, agents)

    @property
    def _has_rules(self) -> bool:
        return Capability.NETWORK_RULES in self.capabilities

    async def close(self) -> None:
        await self._closing.aclose()

    # Templates.

    async def templates(self) -> Sequence[Template]:
        return self._catalog.listed()

    async def find_template(self, name: str) -> Template | None:
        return self._catalog.find(name)

    # Making.

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"gateway": self._identity.gateway, "sandbox": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        name = name_of(handle)
        with told():
            model = self._catalog.model(request.template.id)
            egress = request.egress if request.allow_internet_access else Egress(internet=False)
            self._check_egress(egress)
            snapshot = (
                None if request.snapshot is None else await self._snapshots.check(request.snapshot.get("snapshot"))
            )
            resources = request.template.resources
            network = policy(egress) if self._has_rules else None
            body = self._fleet.body(name, model, resources, snapshot=snapshot, network=network)
            async with self._busy(name):
                sandbox, address = await self._fleet.make(name, body, model)
        about = {"template": model.name, "cpu_count": resources.cpu_count, "memory_mb": resources.memory_mb}
        return Placement(handle={**handle, "id": sandbox, **about}, agent=address)

    def _check_egress(self, egress: Egress) -> None:
        if egress.open or self._has_rules:
            return
        missing = Capability.NETWORK_RULES if egress.internet else Capability.NO_INTERNET
        raise CapabilityMissing.of(self.name, missing.value)

    def _busy(self, name: Name) -> asyncio.Lock:
        """Held while a sandbox is made, changed or removed: a kill may come during the create, and two at once."""
        return self._locks.setdefault(name, asyncio.Lock())

    # Finding.

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        name = name_of(handle)
        with told():
            sandbox = id_of(handle)
            if sandbox is None:
                found = next(iter(await self._fleet.find(name)), None)
            else:
                found = await self._server.get(sandbox)
            if found is None or has_ended(found):
                return None
            sandbox = str(found["id"])
            self._keeper.keep(sandbox)
            address = await self._agents.reach(name, sandbox)
        return Placement(handle={**handle, "id": sandbox}, agent=address)

    async def survey(self) -> Sequence[Survivor]:
        found: dict[str, Survivor] = {}
        with told():
            for details in await self._fleet.ours():
                sandbox = str((details.get("metadata") or {}).get("sandgate-sandbox", ""))
                handle = {"gateway": self._identity.gateway, "sandbox": sandbox, "id": str(details["id"])}
                found[sandbox] = Survivor(sandbox_id=sandbox, handle=handle)
            if Capability.SNAPSHOT in self.capabilities:
                for sandbox, kept in (await self._snapshots.paused()).items():
                    handle = {"gateway": self._identity.gateway, "sandbox": sandbox, "paused": "files", "kept": kept}
                    found.setdefault(sandbox, Survivor(sandbox_id=sandbox, handle=handle))
        # What somebody has given our label without a sandbox's name is nobody's.
        return [survivor for survivor in found.values() if survivor.sandbox_id]

    # Ending.

    async def destroy(self, handle: Mapping[str, object]) -> None:
        name = name_of(handle)
        with told():
            await to_its_end(self._destroy(name, id_of(handle)))

    async def _destroy(self, name: Name, sandbox: str | None) -> None:
        async with self._busy(name):
            await self._fleet.erase(name, sandbox)
            if Capability.SNAPSHOT in self.capabilities:
                await self._snapshots.forget_paused(name)

    async def _erase_stray(self, name: Name) -> bool:
        async with self._busy(name):
            return await self._fleet.erase_all(name)

    # Pausing.

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        name = name_of(handle)
        with told():
            async with self._busy(name):
                return await to_its_end(self._pausing.pause(handle, memory=memory))

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        name = name_of(handle)
        with told():
            async with self._busy(name):
                placement = await to_its_end(self._pausing.resume(handle))
        self._keeper.keep(str(placement.handle["id"]))
        return placement

    async def _remake(self, handle: Mapping[str, object], snapshot: str) -> Placement:
        name = name_of(handle)
        network = handle.get("network")
        body = self._fleet.body(
            name,
            self._model_of(handle),
            _resources(handle),
            snapshot=snapshot,
            network=network if isinstance(network, dict) and network else None,
        )
        sandbox, address = await self._fleet.make(name, body, self._model_of(handle))
        return Placement(handle=running(handle, sandbox), agent=address)

    def _model_of(self, handle: Mapping[str, object]) -> Model:
        """What a sandbox was made as: its template may have changed or gone since."""
        return self._catalog.model_of(str(handle.get("template", "")))

    # Snapshots.

    async def snapshot(self, handle: Mapping[str, object], *, snapshot_id: str) -> Mapping[str, object]:
        self._check_snapshots()
        name, kept = name_of(handle), self._snapshots.name(snapshot_id)
        with told():
            async with self._busy(name):
                details = await self._fleet.existing(id_of(handle))
                try:
                    made = await to_its_end(self._snapshots.make(str(details["id"]), name=kept))
                except asyncio.CancelledError:
                    # It may have been whole by then, and nobody hears of it.
                    await to_its_end(self._snapshots.give_up(kept))
                    raise
        return {"snapshot": made, "gateway": name.gateway}

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        self._check_snapshots()
        with told("the snapshot"):
            kept = snapshot.get("snapshot")
            if isinstance(kept, str) and kept:
                await to_its_end(self._snapshots.delete(kept))
            else:
                # A crash cut it off, so all that is known is the id that was asked for.
                name = self._snapshots.name(str(snapshot.get("snapshot_id")))
                await to_its_end(self._snapshots.give_up(name))

    def _check_snapshots(self) -> None:
        if Capability.SNAPSHOT not in self.capabilities:
            raise CapabilityMissing.of(self.name, Capability.SNAPSHOT.value)

    # What else can be asked of a sandbox.

    async def update_egress(self, handle: Mapping[str, object], egress: Egress) -> None:
        if not self._has_rules:
            raise CapabilityMissing.of(self.name, Capability.NETWORK_RULES.value)
        with told():
            async with self._busy(name_of(handle)):
                if handle.get("paused") is not None:
                    # The sidecar stands still with the sandbox, or is gone with it.
                    raise Unavailable("rules cannot be changed while the sandbox is paused: resume it first")
                details = await self._fleet.existing(id_of(handle))
                await to_its_end(self._server.set_network(str(details["id"]), policy(egress)))

    @classmethod
    def diagnose(cls, settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
        try:
            chosen = OpenSandboxSettings.read(settings)
        except FailedPrecondition as error:
            return (("settings", False, error.message),)
        return diagnose(chosen)


def _resources(handle: Mapping[str, object]) -> Resources:
    cpu_count, memory_mb = handle.get("cpu_count"), handle.get("memory_mb")
    if not isinstance(cpu_count, int) or not isinstance(memory_mb, int):
        raise Internal("the handle of the sandbox is damaged")
    return Resources(cpu_count=cpu_count, memory_mb=memory_mb, disk_size_mb=0)


def _point(link: Path, target: Path) -> None:
    draft = link.with_name(f"{link.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.rename(link)
