"""The Docker backend: one sandbox is one container, and its agent the first process in it.

Called by the core (``sandgate_plugin_api.backend`` says when). What this module adds to the parts is order: a name under
which the engine finds the container before it is made, an agent before an answer, and nothing left behind by a call that
fails or is cancelled. What the engine knows is not kept here a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Awaitable, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sandgate_bundle import forget_portable, make_portable
from sandgate_errors import (
    CapabilityMissing,
    Conflict,
    DataLoss,
    FailedPrecondition,
    Internal,
    NotFound,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_api import (
    AgentAddress,
    Backend,
    BackendContext,
    Capability,
    Egress,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
    Usage,
)
from sandgate_plugin_docker.boxes import Box, Identity, Shelf
from sandgate_plugin_docker.checks import cannot_limit_disks, check_engine, check_templates, diagnose
from sandgate_plugin_docker.containers import LABEL, configuration, labels
from sandgate_plugin_docker.engine import Details, Engine, Refused, told
from sandgate_plugin_docker.firewall import Firewall
from sandgate_plugin_docker.furnishing import Furnishing
from sandgate_plugin_docker.images import Images
from sandgate_plugin_docker.networks import NONE, Network, address_in
from sandgate_plugin_docker.ports import ByPort
from sandgate_plugin_docker.reaching import BySocket, Reach
from sandgate_plugin_docker.settings import DockerSettings, TemplateSettings
from sandgate_plugin_docker.templates import Catalog, Model
from sandgate_plugin_docker.usage import Meter
from sandgate_plugin_docker.warm import Spare, WarmPool

__all__ = ["DockerBackend"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Containers made ahead are named after nobody; a sandbox's id begins with "i".
_WARM_PREFIX = "w"
#: A name goes into the engine's addresses: handles come back from the store, and a store can be edited.
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_EGRESS = "egress.json"
#: Seconds between two tries to remove what an engine that was away has kept.
_STRAY_INTERVAL = 5.0


class DockerBackend(Backend):
    """Sandboxes as containers of one engine."""

    name = "docker"
    capabilities = frozenset(
        {Capability.PAUSE, Capability.PAUSE_FILESYSTEM, Capability.SNAPSHOT, Capability.LIMITS, Capability.NO_INTERNET}
    )

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._shelf = Shelf(state=context.state_dir, runtime=context.runtime_dir)
        self._closing = contextlib.AsyncExitStack()
        self._pools: dict[str, WarmPool] = {}
        #: Names of the containers that are the pools': made or being made, and given to nobody.
        self._spare: set[str] = set()
        self._locks: MutableMapping[str, asyncio.Lock] = WeakValueDictionary()
        self._meter = Meter()
        #: What could not be removed while the engine was away, by name.
        self._strays: dict[str, Box] = {}
        self._strayed = asyncio.Event()

    async def open(self) -> None:
        self._settings = DockerSettings.read(self._context.settings)
        try:
            with told("the backend"):
                await self._open()
        except BaseException as error:
            await self._closing.aclose()
            if isinstance(error, SandgateError) and not isinstance(error, FailedPrecondition):
                raise FailedPrecondition(f"{error.message} ({Engine.address_of(self._settings)})") from error
            raise

    async def _open(self) -> None:
        state = self._context.state_dir
        self._engine = Engine.connect(self._settings)
        self._closing.push_async_callback(self._engine.close)
        info = self._info = await self._engine.info()
        check_engine(info)
        identity = self._identity = await asyncio.to_thread(Identity.of, state)
        bundle = self._bundle = await asyncio.to_thread(
            make_portable, state, entrance=Path(__file__).with_name("enter.py")
        )
        self._images = Images(self._engine, self._settings)
        self._closing.push_async_callback(self._images.close)
        self._network = Network(self._engine, identity.gateway)
        self._firewall = await Firewall.open(self._settings, self._engine, self._network, identity.gateway)
        if self._firewall is not None:
            self.capabilities |= {Capability.NETWORK_RULES}
        furnishing = Furnishing(self._engine, identity, state)
        self._by_socket: Reach = BySocket(self._engine, identity, furnishing, state=state, bundle=bundle)
        self._by_port: Reach = ByPort(self._engine, identity, self._settings, bundle=bundle)
        self._closing.push_async_callback(self._by_port.close)
        self._catalog = Catalog(self._settings, self._images, _machine(info, local=self._engine.is_local))
        check_templates(info, self._catalog.configured)
        for name, template in self._catalog.configured.items():
            if template.read_only and self._reach(template) is self._by_port:
                raise FailedPrecondition(
                    f"template '{name}': a read-only root file system needs an agent that is reached by a socket"
                )
        if self._ports_only:
            # Who is on no network has no port.
            self.capabilities -= {Capability.NO_INTERNET}
        self._closing.push_async_callback(self._leave_network)
        await self._prepare_network()
        await self._clear_leftovers()
        remover = asyncio.create_task(self._remove_strays(), name="removal of stray containers")
        self._closing.push_async_callback(_end, remover)
        for name, settings in self._catalog.configured.items():
            if settings.warm:
                await self._open_pool(name, settings.warm)

    @property
    def _ports_only(self) -> bool:
        return self._settings.agents == "port" or not self._engine.is_local

    def _reach(self, settings: TemplateSettings) -> Reach:
        """How agents of a template are reached. A runtime of another kernel does not share sockets with this machine."""
        if self._ports_only:
            return self._by_port
        foreign = settings.runtime not in {None, "runc", "crun"}
        return self._by_port if foreign and self._settings.agents == "auto" else self._by_socket

    async def _prepare_network(self) -> None:
        await self._network.ensure()
        if self._firewall is not None:
            await self._firewall.ensure()

    async def _clear_leftovers(self) -> None:
        """End what an earlier core had made ahead, and forget boxes and bundles that nothing uses any more."""
        containers = await self._ours()
        for container in containers:
            if self._sandbox_of(container).startswith(_WARM_PREFIX):
                await self._erase(_name_of(container), self._box_of(container))
        used = {container["Labels"].get(f"{LABEL}box") for container in containers}
        keep = {self._bundle.name}
        for box in await asyncio.to_thread(lambda: list(self._shelf.all())):
            if box.name not in used:
                await asyncio.to_thread(box.remove)
            elif (name := box.read("bundle")) is not None:
                keep.add(name.decode())
        await asyncio.to_thread(forget_portable, self._context.state_dir, keep=keep)

    async def _open_pool(self, name: str, size: int) -> None:
        pool = WarmPool(size, make=lambda: self._make_warm(name), discard=self._discard)
        self._pools[name] = pool
        self._closing.push_async_callback(pool.close)
        pool.open(name)

    async def close(self) -> None:
        await self._closing.aclose()

    async def _leave_network(self) -> None:
        """Remove the network where it is nobody's: an engine has addresses for a few dozen only."""
        try:
            if await self._ours():
                return
            if self._firewall is not None:
                await self._firewall.remove()
            await self._engine.remove_network(self._network.name)
        except (Refused, SandgateError) as error:
            _log.warning("the network %s was left behind: %s", self._network.name, error)

    # Templates.

    async def templates(self) -> Sequence[Template]:
        return self._catalog.listed()

    async def find_template(self, name: str) -> Template | None:
        with told("the template"):
            return await self._catalog.find(name)

    # Making.

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"container": self._container_of(request.sandbox_id), "box": request.sandbox_id}

    def _container_of(self, sandbox_id: str) -> str:
        return f"sandgate-{self._identity.gateway}-{sandbox_id}"

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        with told():
            model = await self._catalog.model(request.template.id)
            egress = request.egress if request.allow_internet_access else Egress(internet=False)
            self._check_egress(model, egress)
            name = _container(handle)
            if request.snapshot is None and (placement := await self._claim(model, name, egress)) is not None:
                return placement
            image = model.image.id if request.snapshot is None else await self._snapshot_image(request.snapshot)
            return await self._make(model, name, self._shelf.box(handle.get("box")), image=image, egress=egress)

    def _check_egress(self, model: Model, egress: Egress) -> None:
        if egress.open:
            return
        if not egress.internet and self._reach(model.settings).needs_network:
            raise CapabilityMissing.of(self.name, f"{Capability.NO_INTERNET.value} where agents are reached by a port")
        if egress.internet:
            if self._firewall is None:
                raise CapabilityMissing.of(self.name, Capability.NETWORK_RULES.value)
            if model.settings.network is not None:
                raise CapabilityMissing.of(self.name, f"{Capability.NETWORK_RULES.value} on networks of templates")
            self._firewall.check(egress)

    async def _snapshot_image(self, snapshot: Mapping[str, object]) -> str:
        reference = snapshot.get("image")
        details = await self._engine.image(reference) if isinstance(reference, str) else None
        if details is None:
            raise NotFound("the snapshot does not exist any more")
        return str(details["Id"])

    async def _claim(self, model: Model, name: str, egress: Egress) -> Placement | None:
        """One that was made ahead, if there is one that lives."""
        pool = self._pools.get(model.name)
        while pool is not None and (spare := pool.take(model)) is not None:
            try:
                placement = await _to_its_end(self._give(spare, model, name, egress))
            except BaseException:
                await _to_its_end(self._clear_away(name, spare.box))
                await _to_its_end(self._clear_away(spare.container, spare.box))
                self._spare.discard(spare.container)
                raise
            if placement is not None:
                self._spare.discard(spare.container)
                return placement
            _log.warning("a warm sandbox had ended before it was used: %s", spare.container)
            await _to_its_end(self._discard(spare))
        return None

    async def _give(self, spare: Spare, model: Model, name: str, egress: Egress) -> Placement | None:
        """Make a spare container this sandbox's; None when it has ended. After a crash its name finds it."""
        details = await self._engine.inspect(spare.container)
        if details is None or not _runs(details):
            return None
        await self._engine.rename(details["Id"], name)
        await self._apply(egress, spare.box, details["Id"], model=model, fresh=True)
        address = await self._reach(model.settings).address(spare.box, details)
        return Placement(handle={"container": name, "box": spare.box.name}, agent=address)

    async def _make_warm(self, template: str) -> Spare:
        with told():
            model = await self._catalog.model(template)
            token = secrets.token_hex(10)
            box = self._shelf.box(f"{_WARM_PREFIX}{token}")
            name = self._container_of(box.name)
            self._spare.add(name)
            try:
                await self._make(model, name, box, image=model.image.id, egress=Egress())
            except BaseException:
                self._spare.discard(name)
                raise
            return Spare(container=name, box=box, image=model.image.id)

    async def _discard(self, spare: Spare) -> None:
        await self._erase(spare.container, spare.box)
        self._spare.discard(spare.container)

    async def _make(self, model: Model, name: str, box: Box, *, image: str, egress: Egress) -> Placement:
        """A container with an agent that accepts calls, or nothing at all."""
        reach = self._reach(model.settings)
        async with self._busy(name):
            try:
                address = await reach.bring_up(
                    box,
                    model,
                    lambda: _to_its_end(self._new_container(model, name, box, image=image, egress=egress)),
                    anew=False,
                )
                await self._apply(egress, box, name, model=model, fresh=True)
            except Conflict:
                # The container of that name is another call's.
                raise
            except BaseException as error:
                if isinstance(error, Internal | Refused):
                    _log.error("%s: its log ends: %s", name, await self._engine.last_words(name))
                await _to_its_end(self._clear_away(name, box))
                raise
        return Placement(handle={"container": name, "box": box.name}, agent=address)

    async def _new_container(self, model: Model, name: str, box: Box, *, image: str, egress: Egress) -> str:
        network = (model.settings.network or self._network.name) if egress.internet else NONE
        config = configuration(
            model,
            image=image,
            bundle=self._bundle,
            way=await self._reach(model.settings).way(box, model),
            network=network,
            labels=labels(gateway=self._identity.gateway, template=model.name, box=box.name),
        )
        try:
            return await self._engine.create(config, name=name)
        except Refused as refused:
            if refused.status == 404 and "image" in refused.message.lower():
                self._images.forget(model.settings.image)
                raise Unavailable(f"the image '{model.settings.image}' has just been removed", retry_after=1) from None
            if refused.status == 409:
                raise Conflict("this sandbox is being made already") from refused
            if "storage-opt" in refused.message:
                raise FailedPrecondition(cannot_limit_disks(self._info)) from refused
            raise

    async def _apply(self, egress: Egress, box: Box, container: str, *, model: Model, fresh: bool) -> None:
        """Let ``egress`` hold for a container that runs."""
        if fresh and egress.open:
            return
        await asyncio.to_thread(box.write, _EGRESS, json.dumps(asdict(egress)).encode())
        network = model.settings.network or self._network.name
        await self._network.admit(container, network=network, internet=egress.internet)
        if self._firewall is not None:
            details = await self._existing(container)
            await self._firewall.apply(box.name, address_in(details), egress)

    # Finding.

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        with told():
            details = await self._engine.inspect(_container(handle))
            if details is None or not _runs(details):
                return None
            box = self._box_of_details(details)
            address = await self._reach_of(details).address(box, details)
            return Placement(handle={**handle, "box": box.name}, agent=address)

    async def survey(self) -> Sequence[Survivor]:
        with told():
            containers = await self._ours()
        # The pools' containers are this object's own business until they are somebody's.
        return [
            Survivor(
                sandbox_id=self._sandbox_of(container),
                handle={"container": _name_of(container), "box": container["Labels"].get(f"{LABEL}box", "")},
            )
            for container in containers
            if _name_of(container) not in self._spare
        ]

    async def _ours(self) -> Sequence[Details]:
        return await self._engine.list(f"{LABEL}gateway={self._identity.gateway}")

    def _sandbox_of(self, container: Details) -> str:
        """Empty for one that somebody has given another name: it is nobody's."""
        prefix = self._container_of("")
        name = _name_of(container)
        return name.removeprefix(prefix) if name.startswith(prefix) else ""

    def _box_of(self, container: Details) -> Box:
        return self._shelf.box(container["Labels"].get(f"{LABEL}box"))

    def _box_of_details(self, details: Details) -> Box:
        return self._shelf.box(details["Config"]["Labels"].get(f"{LABEL}box"))

    def _reach_of(self, details: Details) -> Reach:
        """The way that the container was made for."""
        return self._by_port if details["Config"].get("OpenStdin") else self._by_socket

    async def _existing(self, container: str) -> Details:
        details = await self._engine.inspect(container)
        if details is None:
            raise NotFound("there is no such sandbox")
        return details

    async def _model_of(self, details: Details) -> Model:
        return await self._catalog.model(details["Config"]["Labels"].get(f"{LABEL}template", ""))

    # Ending.

    async def destroy(self, handle: Mapping[str, object]) -> None:
        name = _container(handle)
        box = self._shelf.box(handle.get("box"))
        with told():
            await _to_its_end(self._destroy(name, box))

    async def _destroy(self, name: str, box: Box) -> None:
        async with self._busy(name):
            await self._erase(name, box)

    async def _erase(self, name: str, box: Box) -> None:
        details = await self._engine.inspect(name)
        if details is not None:
            if details["Config"]["Labels"].get(f"{LABEL}gateway") != self._identity.gateway:
                raise Internal("the handle of the sandbox is damaged")
            # One that was claimed has a box of another name; a crash may have kept that from the handle.
            box = self._box_of_details(details)
            await self._engine.remove(details["Id"])
            await self._forget_image(details["Image"])
        if self._firewall is not None:
            await self._firewall.forget(box.name)
        await self._by_port.forget(box)
        self._meter.forget(name)
        await asyncio.to_thread(box.remove)

    async def _clear_away(self, name: str, box: Box) -> None:
        """Erase what a call that fails has made: now, or when the engine answers again."""
        try:
            await self._erase(name, box)
        except (Refused, SandgateError) as error:
            _log.warning("%s is removed later: %s", name, error)
            # Nobody has been told of it, so nobody needs what is here.
            await asyncio.to_thread(box.remove)
            self._strays[name] = box
            self._strayed.set()

    async def _remove_strays(self) -> None:
        while True:
            await self._strayed.wait()
            await asyncio.sleep(_STRAY_INTERVAL)
            for name, box in list(self._strays.items()):
                try:
                    await self._erase(name, box)
                except (Refused, SandgateError) as error:
                    _log.info("%s cannot be removed yet: %s", name, error)
                else:
                    del self._strays[name]
            if not self._strays:
                self._strayed.clear()

    async def _forget_image(self, image: str) -> None:
        """A snapshot that was given up while this sandbox used it can go now."""
        details = await self._engine.image(image)
        config = (details or {}).get("Config") or {}
        is_snapshot = f"{LABEL}snapshot" in (config.get("Labels") or {})
        if details is not None and is_snapshot and not details.get("RepoTags"):
            await self._engine.remove_image(image, force=False)

    # Pausing.

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        name = _container(handle)
        with told():
            async with self._busy(name):
                await _to_its_end(self._pause(handle, name, memory=memory))
        return {**handle, "paused": "memory" if memory else "files"}

    async def _pause(self, handle: Mapping[str, object], name: str, *, memory: bool) -> None:
        details = await self._existing(name)
        state = details["State"]
        if not memory:
            # The container stays with its layer: no copy of what may be gigabytes, and no image to look after.
            await self._engine.kill(details["Id"])
        elif state["Paused"]:
            return
        elif state["Running"]:
            await self._engine.pause(details["Id"])
        elif handle.get("paused") == "files":
            raise DataLoss("the memory of the sandbox was given up before")
        else:
            raise NotFound("the sandbox has ended")

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        name = _container(handle)
        with told():
            async with self._busy(name):
                details = await self._existing(name)
                box = self._box_of_details(details)
                kept = {key: value for key, value in handle.items() if key != "paused"}
                if details["State"]["Paused"]:
                    await _to_its_end(self._engine.unpause(details["Id"]))
                elif not details["State"]["Running"]:
                    if handle.get("paused") != "files":
                        raise DataLoss("the processes of the sandbox are gone")
                    return Placement(handle=kept, agent=await self._start_anew(details, box))
                address = await self._reach_of(details).address(box, await self._existing(name))
                return Placement(handle=kept, agent=address)

    async def _start_anew(self, details: Details, box: Box) -> AgentAddress:
        container = details["Id"]
        model = await self._model_of(details)

        async def same() -> str:
            return str(container)

        try:
            address = await self._reach_of(details).bring_up(box, model, same, anew=True)
            await self._apply(_kept_egress(box), box, container, model=model, fresh=False)
        except BaseException:
            await _to_its_end(self._engine.kill(container))
            raise
        return address

    # Snapshots.

    async def snapshot(self, handle: Mapping[str, object], *, snapshot_id: str) -> Mapping[str, object]:
        if not _TAG.fullmatch(snapshot_id):
            raise Internal("the snapshot's id cannot be the name of an image")
        name = _container(handle)
        repository = f"sandgate-{self._identity.gateway}/snapshots"
        kept = {"image": f"{repository}:{snapshot_id}"}
        with told():
            async with self._busy(name):
                details = await self._existing(name)
                if not _runs(details):
                    raise NotFound("the sandbox has ended")
                if details["HostConfig"]["ReadonlyRootfs"]:
                    raise FailedPrecondition("a sandbox with a read-only root file system cannot be snapshotted")
                marks = {f"{LABEL}gateway": self._identity.gateway, f"{LABEL}snapshot": snapshot_id}
                try:
                    await _to_its_end(
                        self._engine.commit(details["Id"], repository=repository, tag=snapshot_id, labels=marks)
                    )
                except BaseException:
                    await _to_its_end(self._engine.remove_image(kept["image"], force=True))
                    raise
        return kept

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        reference = str(snapshot.get("image"))
        if not reference.startswith(f"sandgate-{self._identity.gateway}/snapshots:"):
            raise Internal("the handle of the snapshot is damaged")
        with told("the snapshot"):
            # By force: its name goes, and what sandboxes still use stays for them.
            await _to_its_end(self._engine.remove_image(reference, force=True))

    # What else can be asked of a sandbox.

    async def update_egress(self, handle: Mapping[str, object], egress: Egress) -> None:
        name = _container(handle)
        with told():
            async with self._busy(name):
                details = await self._existing(name)
                model = await self._model_of(details)
                self._check_egress(model, egress)
                box = self._box_of_details(details)
                await _to_its_end(self._apply(egress, box, details["Id"], model=model, fresh=False))

    async def usage(self, handle: Mapping[str, object]) -> Usage | None:
        name = _container(handle)
        with told():
            stats = await self._engine.stats(name)
        return None if stats is None else self._meter.measure(name, stats)

    def _busy(self, name: str) -> asyncio.Lock:
        """Held while a container is made, changed or removed: a kill may come during the create, and two at once."""
        return self._locks.setdefault(name, asyncio.Lock())

    @classmethod
    def diagnose(cls, settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
        try:
            chosen = DockerSettings.read(settings)
        except FailedPrecondition as error:
            return (("settings", False, error.message),)
        return diagnose(chosen)


def _container(handle: Mapping[str, object]) -> str:
    name = handle.get("container")
    if not isinstance(name, str) or not _CONTAINER.fullmatch(name):
        raise Internal("the handle of the sandbox is damaged")
    return name


def _name_of(container: Details) -> str:
    """Of a container in a list."""
    names: Sequence[str] = container["Names"] or [container["Id"]]
    return names[0].lstrip("/")


def _runs(details: Details) -> bool:
    return bool(details["State"]["Running"]) and not details["State"].get("Dead")


def _kept_egress(box: Box) -> Egress:
    text = box.read(_EGRESS)
    if text is None:
        return Egress()
    known = json.loads(text)
    return Egress(internet=known["internet"], allow=tuple(known["allow"]), deny=tuple(known["deny"]))


def _machine(info: Details, *, local: bool) -> Resources:
    """What a sandbox can see of the engine's host where nothing limits it."""
    disk = 0
    if local:
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(info["DockerRootDir"]).total
    return Resources(cpu_count=int(info["NCPU"]), memory_mb=int(info["MemTotal"]) // 2**20, disk_size_mb=disk // 2**20)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    # Not awaited itself: its cancellation would look like one of this call.
    await asyncio.wait({task})


async def _to_its_end(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even when cancelled meanwhile; the cancellation then goes on.

    For what a cancellation must not tear apart: the engine goes on with a request whose connection is gone.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("failed while its caller was cancelled", exc_info=failure)
        raise cancelled
    return task.result()
