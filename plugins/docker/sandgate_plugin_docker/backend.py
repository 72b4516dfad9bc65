"""The Docker backend: one sandbox is one container, and its agent the first process in it.

Called by the core (``sandgate_plugin_api.backend`` says when). What this module adds to the parts is order: a name under
which the engine finds the container before it is made, an agent before an answer, and nothing left behind by a call that
fails or is cancelled. What the engine knows is not kept here a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandgate_bundle import forget_portable, make_portable
from sandgate_errors import DataLoss, FailedPrecondition, Internal, InvalidArgument, NotFound, SandgateError
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
    to_its_end,
)
from sandgate_plugin_docker.boxes import Box, Identity, Shelf
from sandgate_plugin_docker.checks import check_engine, check_templates, diagnose, how_to_reach
from sandgate_plugin_docker.containers import HELPER_LABEL, LABEL
from sandgate_plugin_docker.engine import Details, Engine, told
from sandgate_plugin_docker.fleet import Fleet, name_of, runs
from sandgate_plugin_docker.furnishing import Furnishing
from sandgate_plugin_docker.images import ImageFacts, Images
from sandgate_plugin_docker.networks import address_in
from sandgate_plugin_docker.ports import ByPort
from sandgate_plugin_docker.reaching import BySocket
from sandgate_plugin_docker.settings import DockerSettings
from sandgate_plugin_docker.templates import Catalog, Model
from sandgate_plugin_docker.usage import Meter
from sandgate_plugin_docker.warm import Spare, WarmPool

__all__ = ["DockerBackend"]

_log = logging.getLogger(__name__)

#: Containers made ahead are named after nobody; a sandbox's id begins with "i".
_WARM_PREFIX = "w"
#: A name goes into the engine's addresses: handles come back from the store, and a store can be edited.
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
#: The engine's rule.
_SHORTEST_NAME = 2
#: How the names begin that gateways give.
_OURS = "sandgate-"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


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

    async def open(self) -> None:
        self._settings = DockerSettings.read(self._context.settings)
        try:
            with told("the backend"):
                await self._open()
        except BaseException as error:
            await self._closing.aclose()
            if isinstance(error, SandgateError) and not isinstance(error, FailedPrecondition):
                address = Engine.address_of(self._settings)
                raise FailedPrecondition(f"{error.message} ({address}{how_to_reach(address)})") from error
            raise

    async def _open(self) -> None:
        state = self._context.state_dir
        self._engine = Engine.connect(self._settings)
        self._closing.push_async_callback(self._engine.close)
        info = await self._engine.info()
        check_engine(info)
        self._meter = Meter(Path(info["DockerRootDir"]) if self._engine.is_local else None)
        identity = self._identity = await asyncio.to_thread(Identity.of, state)
        bundle = self._bundle = await asyncio.to_thread(
            make_portable, state, entrance=Path(__file__).with_name("enter.py")
        )
        self._images = Images(self._engine, self._settings)
        self._closing.push_async_callback(self._images.close)
        furnishing = Furnishing(self._engine, identity, state)
        by_port = ByPort(self._engine, identity, self._settings, bundle=bundle)
        self._fleet = Fleet(
            self._engine,
            identity,
            self._shelf,
            settings=self._settings,
            images=self._images,
            info=info,
            bundle=bundle,
            by_socket=BySocket(self._engine, identity, furnishing, state=state, bundle=bundle),
            by_port=by_port,
        )
        self._catalog = Catalog(self._settings, self._images, _machine(info, local=self._engine.is_local))
        check_templates(info, self._catalog.configured)
        for name, template in self._catalog.configured.items():
            if template.read_only and self._fleet.reach(template) is by_port:
                raise FailedPrecondition(
                    f"template '{name}': a read-only root file system needs an agent that is reached by a socket"
                )
        self._closing.push_async_callback(self._fleet.close)
        await self._fleet.open()
        if self._fleet.keeps_rules:
            self.capabilities |= {Capability.NETWORK_RULES}
        if self._fleet.ports_only:
            # Who is on no network has no port.
            self.capabilities -= {Capability.NO_INTERNET}
        await self._clear_leftovers()
        await by_port.sweep()
        for name, settings in self._catalog.configured.items():
            if settings.warm:
                await self._open_pool(name, settings.warm)

    async def _clear_leftovers(self) -> None:
        """End what an earlier core had made ahead, and forget boxes and bundles that nothing uses any more."""
        containers = await self._fleet.ours()
        for container in containers:
            if self._fleet.sandbox_of(container).startswith(_WARM_PREFIX):
                await self._fleet.erase(name_of(container), self._fleet.box_of(container))
        for helper in await self._engine.list(f"{HELPER_LABEL}={self._identity.gateway}"):
            # One that ever ran has the label from its image, where anybody can write it.
            if helper["State"] == "created":
                await self._engine.remove(helper["Id"])
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

    # Templates.

    async def templates(self) -> Sequence[Template]:
        return self._catalog.listed()

    async def find_template(self, name: str) -> Template | None:
        with told("the template"):
            return await self._catalog.find(name)

    # Making.

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        name = request.name or self._fleet.container_of(request.sandbox_id)
        if request.name and (not _CONTAINER.fullmatch(name) or len(name) < _SHORTEST_NAME or name.startswith(_OURS)):
            raise InvalidArgument(f"a container cannot be called {name[:100]!a}")
        return {"container": name, "box": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        with told():
            template = await self._catalog.model(request.template.id)
            from_image = request.snapshot is None
            model = self._catalog.limited(template, request.template.resources, disk=from_image)
            egress = request.egress if request.allow_internet_access else Egress(internet=False)
            self._fleet.check_egress(model, egress)
            name = _container(handle)
            # One that was made ahead has what its template says.
            as_made = from_image and model is template and not request.name
            if as_made and (placement := await self._claim(model, name, egress)) is not None:
                return placement
            image = model.image.id if request.snapshot is None else await self._snapshot_image(request.snapshot)
            return await self._fleet.make(model, name, self._shelf.box(handle.get("box")), image=image, egress=egress)

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
                placement = await to_its_end(self._give(spare, model, name, egress))
            except BaseException:
                await to_its_end(self._fleet.clear_away(name, spare.box))
                await to_its_end(self._fleet.clear_away(spare.container, spare.box))
                self._spare.discard(spare.container)
                raise
            if placement is not None:
                self._spare.discard(spare.container)
                return placement
            _log.warning("a warm sandbox had ended before it was used: %s", spare.container)
            # Also where it cannot be removed now: whoever asks for a sandbox has nothing to do with this one.
            await to_its_end(self._fleet.clear_away(spare.container, spare.box))
            self._spare.discard(spare.container)
        return None

    async def _give(self, spare: Spare, model: Model, name: str, egress: Egress) -> Placement | None:
        """Make a spare container this sandbox's; None when it has ended. After a crash its name finds it."""
        details = await self._engine.inspect(spare.container)
        reach = self._fleet.reach(model.settings)
        if details is None or not runs(details) or not await reach.answers(spare.box, details):
            return None
        await self._engine.rename(details["Id"], name)
        if not egress.open:
            await self._fleet.apply(egress, spare.box, details["Id"], model=model)
        address = await reach.address(spare.box, details)
        return Placement(handle={"container": name, "box": spare.box.name}, agent=address)

    async def _make_warm(self, template: str) -> Spare:
        with told():
            model = await self._catalog.model(template)
            token = secrets.token_hex(10)
            box = self._shelf.box(f"{_WARM_PREFIX}{token}")
            name = self._fleet.container_of(box.name)
            self._spare.add(name)
            try:
                await self._fleet.make(model, name, box, image=model.image.id, egress=Egress())
            except BaseException:
                self._spare.discard(name)
                raise
            return Spare(container=name, box=box, image=model.image.id)

    async def _discard(self, spare: Spare) -> None:
        await self._fleet.erase(spare.container, spare.box)
        self._spare.discard(spare.container)

    # Finding.

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        with told():
            details = await self._fleet.find(_container(handle), self._box(handle))
            if details is None or not runs(details):
                return None
            box = self._fleet.box_in(details)
            address = await self._fleet.reach_of(details).address(box, details)
            return Placement(handle={**handle, "box": box.name}, agent=address)

    async def survey(self) -> Sequence[Survivor]:
        with told():
            containers = await self._fleet.ours()
        # The pools' containers are this object's own business until they are somebody's.
        return [
            Survivor(
                sandbox_id=self._fleet.sandbox_of(container),
                handle={"container": name_of(container), "box": container["Labels"].get(f"{LABEL}box", "")},
            )
            for container in containers
            if name_of(container) not in self._spare
        ]

    async def _model_of(self, details: Details) -> Model:
        """What a container was made from: its template may have changed or gone since, and its image's name, too."""
        image = await self._engine.image(details["Image"])
        name = details["Config"]["Labels"].get(f"{LABEL}template", "")
        return self._catalog.model_of(name, ImageFacts.of(image or {"Id": details["Image"]}))

    # Ending.

    async def destroy(self, handle: Mapping[str, object]) -> None:
        name = _container(handle)
        box = self._box(handle)
        with told():
            await to_its_end(self._destroy(name, box))
        self._meter.forget(name)

    def _box(self, handle: Mapping[str, object]) -> Box:
        return self._shelf.box(handle.get("box"))

    async def _destroy(self, name: str, box: Box) -> None:
        async with self._fleet.busy(name):
            await self._fleet.erase(name, box)

    # Pausing.

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        name = _container(handle)
        with told():
            async with self._fleet.busy(name):
                await to_its_end(self._pause(handle, name, memory=memory))
        return {**handle, "paused": "memory" if memory else "files"}

    async def _pause(self, handle: Mapping[str, object], name: str, *, memory: bool) -> None:
        details = await self._fleet.existing(name, self._box(handle))
        state = details["State"]
        if not memory:
            # The container stays with its layer: no copy of what may be gigabytes, and no image to look after.
            await self._engine.kill(details["Id"])
            await self._fleet.release_address(self._fleet.box_in(details))
        elif state["Paused"]:
            return
        elif state["Running"]:
            await self._engine.pause(details["Id"])
        elif handle.get("paused") == "files":
            raise DataLoss("the memory of the sandbox was given up before")
        elif handle.get("paused") == "memory":
            # A restart of the engine took its processes. Its files are there, and a resume says what is lost.
            return
        else:
            raise NotFound("the sandbox has ended")

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        name = _container(handle)
        with told():
            async with self._fleet.busy(name):
                details = await self._fleet.existing(name, self._box(handle))
                box = self._fleet.box_in(details)
                kept = {key: value for key, value in handle.items() if key != "paused"}
                if details["State"]["Paused"]:
                    await to_its_end(self._engine.unpause(details["Id"]))
                elif handle.get("paused") == "files" and not await self._is_up(details, box):
                    return Placement(handle=kept, agent=await self._start_anew(details, box))
                elif not details["State"]["Running"]:
                    raise DataLoss("the processes of the sandbox are gone")
                address = await self._fleet.reach_of(details).address(box, await self._fleet.existing(name, box))
                return Placement(handle=kept, agent=address)

    async def _is_up(self, details: Details, box: Box) -> bool:
        """Whether an earlier start on the files, of which nobody was told, came to its end."""
        if not details["State"]["Running"]:
            return False
        await self._fleet.reach_of(details).address(box, details)
        try:
            _, writer = await asyncio.open_unix_connection(box.socket)
        except OSError:
            await self._engine.kill(details["Id"])
            return False
        writer.close()
        return True

    async def _start_anew(self, details: Details, box: Box) -> AgentAddress:
        container = details["Id"]
        model = await self._model_of(details)

        async def same() -> str:
            return str(container)

        try:
            address = await self._fleet.reach_of(details).bring_up(
                box,
                model,
                same,
                anew=True,
                meanwhile=lambda container: to_its_end(self._fleet.apply_kept(box, container, model=model)),
            )
        except BaseException:
            await to_its_end(self._engine.kill(container))
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
            async with self._fleet.busy(name):
                details = await self._fleet.existing(name, self._box(handle))
                if not runs(details):
                    raise NotFound("the sandbox has ended")
                if details["HostConfig"]["ReadonlyRootfs"]:
                    raise FailedPrecondition("a sandbox with a read-only root file system cannot be snapshotted")
                # Labels go over to an image, and from there to whatever somebody starts from it: that is not ours.
                marks = {f"{LABEL}snapshot": self._identity.gateway, f"{LABEL}gateway": "", f"{LABEL}box": ""}
                try:
                    await to_its_end(
                        self._engine.commit(details["Id"], repository=repository, tag=snapshot_id, labels=marks)
                    )
                except BaseException:
                    await to_its_end(self._engine.remove_image(kept["image"], force=True))
                    raise
        return kept

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        repository = f"sandgate-{self._identity.gateway}/snapshots"
        reference = str(snapshot.get("image"))
        if "image" not in snapshot and _TAG.fullmatch(str(snapshot.get("snapshot_id"))):
            # A crash cut it off, so all that is known is the id that was asked for.
            reference = f"{repository}:{snapshot['snapshot_id']}"
            # And the engine may not have come to the end of it.
            self._fleet.remove_when_made(reference)
        if not reference.startswith(f"{repository}:"):
            raise Internal("the handle of the snapshot is damaged")
        with told("the snapshot"):
            # By force: its name goes, and what sandboxes still use stays for them.
            await to_its_end(self._engine.remove_image(reference, force=True))

    # What else can be asked of a sandbox.

    async def update_egress(self, handle: Mapping[str, object], egress: Egress) -> None:
        name = _container(handle)
        with told():
            async with self._fleet.busy(name):
                details = await self._fleet.existing(name, self._box(handle))
                model = await self._model_of(details)
                self._fleet.check_egress(model, egress)
                box = self._fleet.box_in(details)
                await to_its_end(self._fleet.apply(egress, box, details["Id"], model=model))

    async def usage(self, handle: Mapping[str, object]) -> Usage | None:
        name = _container(handle)
        with told():
            if not self._meter.knows(name):
                if (details := await self._fleet.find(name, self._box(handle))) is None:
                    return None
                self._meter.learn(name, details)
            stats = await self._engine.stats(name)
        return None if stats is None else self._meter.measure(name, stats)

    async def address(self, handle: Mapping[str, object]) -> str | None:
        with told():
            details = await self._fleet.find(_container(handle), self._box(handle))
        found = None if details is None else address_in(details)
        return None if found is None else str(found)

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


def _machine(info: Details, *, local: bool) -> Resources:
    """What a sandbox can see of the engine's host where nothing limits it."""
    disk = 0
    if local:
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(info["DockerRootDir"]).total
    return Resources(cpu_count=int(info["NCPU"]), memory_mb=int(info["MemTotal"]) // 2**20, disk_size_mb=disk // 2**20)
