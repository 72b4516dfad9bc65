"""The containers of one gateway: making one with all that belongs to it, finding it again, and leaving nothing of it.

Below the backend, which decides what is made and when; above the parts, of which each knows one side of a container.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from weakref import WeakValueDictionary

from sandgate_bundle import Bundle
from sandgate_errors import (
    AlreadyExists,
    CapabilityMissing,
    Conflict,
    FailedPrecondition,
    Internal,
    NotFound,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_api import Capability, Egress, Placement, to_its_end
from sandgate_plugin_docker.boxes import Box, Identity, Shelf
from sandgate_plugin_docker.checks import cannot_limit_disks
from sandgate_plugin_docker.containers import LABEL, NAME_LABEL, configuration, labels
from sandgate_plugin_docker.engine import Details, Engine, Refused
from sandgate_plugin_docker.firewall import Firewall
from sandgate_plugin_docker.images import Images
from sandgate_plugin_docker.networks import NONE, Network, address_in
from sandgate_plugin_docker.reaching import Reach
from sandgate_plugin_docker.settings import DockerSettings, TemplateSettings
from sandgate_plugin_docker.templates import Model

__all__ = ["Fleet", "name_of", "runs"]

_log = logging.getLogger(__name__)


_EGRESS = "egress.json"
#: Seconds between two tries to remove what an engine that was away has kept.
_STRAY_INTERVAL = 5.0
#: How long the engine may go on with a commit whose gateway was killed: as long as this one would have waited for it.
_COMMIT_SECONDS = 600.0
_KERNELS_OF_THE_HOST = frozenset({None, "runc", "crun"})


class Fleet:
    """Everything that is a container, or belongs to one."""

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        shelf: Shelf,
        *,
        settings: DockerSettings,
        images: Images,
        info: Details,
        bundle: Bundle,
        by_socket: Reach,
        by_port: Reach,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._shelf = shelf
        self._settings = settings
        self._images = images
        self._info = info
        self._bundle = bundle
        self._by_socket = by_socket
        self._by_port = by_port
        self._network = Network(engine, identity.gateway)
        self._firewall: Firewall | None = None
        self._locks: MutableMapping[str, asyncio.Lock] = WeakValueDictionary()
        #: What could not be removed while the engine was away, by name.
        self._strays: dict[str, Box] = {}
        #: Images that are not to be, and may still be in the making: until when they are looked for.
        self._unwanted: dict[str, float] = {}
        self._strayed = asyncio.Event()
        self._remover: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the network, let rules hold that sandboxes of an earlier start have, and begin to remove strays."""
        self._firewall = Firewall.open(self._settings, self._engine, self._network, self._identity.gateway)
        await self._prepare_network()
        if self._firewall is not None:
            await self._firewall.sweep()
        self._remover = asyncio.create_task(self._remove_strays(), name="removal of stray containers")

    async def close(self) -> None:
        if self._remover is not None:
            self._remover.cancel()
            # Not awaited itself: its cancellation would look like one of this call.
            await asyncio.wait({self._remover})
        await self._leave_network()
        await self._by_port.close()

    @property
    def keeps_rules(self) -> bool:
        return self._firewall is not None

    @property
    def ports_only(self) -> bool:
        return self._settings.agents == "port" or not self._engine.is_local

    def reach(self, settings: TemplateSettings) -> Reach:
        """How agents of a template are reached. A runtime of another kernel does not share sockets with this machine."""
        if self.ports_only:
            return self._by_port
        foreign = settings.runtime not in _KERNELS_OF_THE_HOST
        return self._by_port if foreign and self._settings.agents == "auto" else self._by_socket

    async def _prepare_network(self) -> None:
        await self._network.ensure()
        if self._firewall is None:
            return
        for container in await self.ours():
            box = self.box_of(container)
            if (egress := _kept_egress(box)) is not None and container["State"] in {"running", "paused"}:
                # Known before the first change: that one replaces all that an earlier start had set.
                details = await self._engine.inspect(container["Id"])
                self._firewall.note(box.name, None if details is None else address_in(details), egress)
        await self._firewall.ensure()

    async def _leave_network(self) -> None:
        """Remove the network where it is nobody's: an engine has addresses for a few dozen only."""
        try:
            if await self.ours():
                return
            if self._firewall is not None:
                await self._firewall.remove()
            await self._engine.remove_network(self._network.name)
        except (Refused, SandgateError) as error:
            _log.warning("the network %s was left behind: %s", self._network.name, error)

    def container_of(self, sandbox_id: str) -> str:
        return f"sandgate-{self._identity.gateway}-{sandbox_id}"

    async def ours(self) -> Sequence[Details]:
        return await self._engine.list(f"{LABEL}gateway={self._identity.gateway}")

    def sandbox_of(self, container: Details) -> str:
        """Empty for one that somebody has given another name: it is nobody's."""
        prefix = self.container_of("")
        name = name_of(container)
        if container["Labels"].get(NAME_LABEL) == name:
            return str(container["Labels"].get(f"{LABEL}box", ""))
        return name.removeprefix(prefix) if name.startswith(prefix) else ""

    def box_of(self, container: Details) -> Box:
        return self._shelf.box(container["Labels"].get(f"{LABEL}box"))

    def box_in(self, details: Details) -> Box:
        return self._shelf.box(details["Config"]["Labels"].get(f"{LABEL}box"))

    def reach_of(self, details: Details) -> Reach:
        """The way that the container was made for."""
        return self._by_port if details["Config"].get("OpenStdin") else self._by_socket

    async def find(self, container: str, box: Box) -> Details | None:
        """A sandbox's container. One whose name was asked for is known by its box too: the name may be another's by now."""
        details = await self._engine.inspect(container)
        if details is None or details["Name"].lstrip("/").startswith(self.container_of("")):
            return details
        marks = details["Config"]["Labels"] or {}
        name = details["Name"].lstrip("/")
        wanted = {NAME_LABEL: name, f"{LABEL}gateway": self._identity.gateway, f"{LABEL}box": box.name}
        return details if wanted.items() <= marks.items() else None

    async def existing(self, container: str, box: Box) -> Details:
        details = await self.find(container, box)
        if details is None:
            raise NotFound("there is no such sandbox")
        return details

    async def make(self, model: Model, name: str, box: Box, *, image: str, egress: Egress) -> Placement:
        """A container with an agent that accepts calls, or nothing at all."""
        reach = self.reach(model.settings)
        network = (model.settings.network or self._network.name) if egress.internet else NONE
        # It takes the engine as long to put a container on a network as an agent needs to start.
        at_start = network if reach.needs_network else NONE

        async def settle(container: str) -> None:
            if network != at_start:
                await self._network.enter(network, container)
            if not egress.open:
                await self.apply(egress, box, container, model=model)

        async with self.busy(name):
            if (stray := self._strays.get(name)) is not None and stray.name == box.name:
                del self._strays[name]
            try:
                address = await reach.bring_up(
                    box,
                    model,
                    lambda: to_its_end(self._new_container(model, name, box, image=image, network=at_start)),
                    anew=False,
                    meanwhile=lambda container: to_its_end(settle(container)),
                )
            except (AlreadyExists, Conflict):
                # The container of that name is another call's, or somebody's.
                raise
            except BaseException as error:
                if isinstance(error, Internal | Refused):
                    _log.error("%s: its log ends: %s", name, await self._engine.last_words(name))
                await to_its_end(self.clear_away(name, box))
                if isinstance(error, Refused) and error.status == 404 and self._network.name in error.message:
                    await self._prepare_network()
                    raise Unavailable("the sandboxes' network had been removed: try again", retry_after=1) from error
                raise
        return Placement(handle={"container": name, "box": box.name}, agent=address)

    async def _new_container(self, model: Model, name: str, box: Box, *, image: str, network: str) -> str:
        asked_for = "" if name.startswith(self.container_of("")) else name
        config = configuration(
            model,
            image=image,
            bundle=self._bundle,
            way=await self.reach(model.settings).way(box, model),
            network=network,
            labels=labels(gateway=self._identity.gateway, template=model.name, box=box.name, name=asked_for),
        )
        try:
            return await self._engine.create(config, name=name)
        except Refused as refused:
            if refused.status == 404 and "image" in refused.message.lower():
                self._images.forget(model.settings.image)
                raise Unavailable(f"the image '{model.settings.image}' has just been removed", retry_after=1) from None
            if refused.status == 409 and asked_for:
                raise AlreadyExists(f"there is a container named '{name}' already") from refused
            if refused.status == 409:
                raise Conflict("this sandbox is being made already") from refused
            if "storage-opt" in refused.message:
                raise FailedPrecondition(cannot_limit_disks(self._info)) from refused
            raise

    async def apply(self, egress: Egress, box: Box, container: str, *, model: Model) -> None:
        """Let ``egress`` hold for a container, and when it is started again."""
        await asyncio.to_thread(box.write, _EGRESS, json.dumps(asdict(egress)).encode())
        details = await self.existing(container, box)
        if not runs(details):
            return
        network = model.settings.network or self._network.name
        await self._network.admit(details, network=network, internet=egress.internet)
        if self._firewall is not None:
            await self._firewall.apply(box.name, address_in(await self.existing(container, box)), egress)

    async def apply_kept(self, box: Box, container: str, *, model: Model) -> None:
        """What held before its container was stopped."""
        if (egress := _kept_egress(box)) is not None:
            await self.apply(egress, box, container, model=model)

    async def release_address(self, box: Box) -> None:
        """Its container has stopped: the address may soon be another's."""
        if self._firewall is not None:
            await self._firewall.forget(box.name)

    def check_egress(self, model: Model, egress: Egress) -> None:
        if egress.open:
            return
        if not egress.internet and self.reach(model.settings).needs_network:
            raise CapabilityMissing.of("docker", f"{Capability.NO_INTERNET.value} where agents are reached by a port")
        if egress.internet:
            if self._firewall is None:
                raise CapabilityMissing.of("docker", Capability.NETWORK_RULES.value)
            if model.settings.network is not None:
                raise CapabilityMissing.of("docker", f"{Capability.NETWORK_RULES.value} on networks of templates")
            self._firewall.check(egress)

    async def erase(self, name: str, box: Box) -> None:
        details = await self.find(name, box)
        if details is not None:
            if details["Config"]["Labels"].get(f"{LABEL}gateway") != self._identity.gateway:
                raise Internal("the handle of the sandbox is damaged")
            # One that was claimed has a box of another name; a crash may have kept that from the handle.
            box = self.box_in(details)
            await self._engine.remove(details["Id"])
            await self._forget_image(details["Image"])
        await self.release_address(box)
        await self._by_port.forget(box)
        await asyncio.to_thread(box.remove)

    async def clear_away(self, name: str, box: Box) -> None:
        """Erase what a call that fails has made: now, or when the engine answers again."""
        try:
            await self.erase(name, box)
        except (Refused, SandgateError) as error:
            _log.warning("%s is removed later: %s", name, error)
            # Nobody has been told of it, so nobody needs what is here.
            await asyncio.to_thread(box.remove)
            self._strays[name] = box
            self._strayed.set()

    def remove_when_made(self, image: str) -> None:
        """Remove an image that the engine may be about to make, asked by nobody who is left."""
        self._unwanted[image] = time.monotonic() + _COMMIT_SECONDS
        self._strayed.set()

    async def _remove_strays(self) -> None:
        while True:
            await self._strayed.wait()
            await asyncio.sleep(_STRAY_INTERVAL)
            for name, box in list(self._strays.items()):
                async with self.busy(name):
                    await self._remove_stray(name, box)
            for image, end in list(self._unwanted.items()):
                await self._remove_unwanted(image, end)
            if not self._strays and not self._unwanted:
                self._strayed.clear()

    async def _remove_stray(self, name: str, box: Box) -> None:
        if name not in self._strays:
            return
        try:
            await self.erase(name, box)
        except (Refused, SandgateError) as error:
            _log.info("%s cannot be removed yet: %s", name, error)
        else:
            del self._strays[name]

    async def _remove_unwanted(self, image: str, end: float) -> None:
        try:
            found = await self._engine.image(image) is not None
            if found:
                await self._engine.remove_image(image, force=True)
        except (Refused, SandgateError) as error:
            _log.info("%s cannot be removed yet: %s", image, error)
        else:
            if found or time.monotonic() > end:
                del self._unwanted[image]

    async def _forget_image(self, image: str) -> None:
        """A snapshot that was given up while this sandbox used it can go now."""
        details = await self._engine.image(image)
        config = (details or {}).get("Config") or {}
        is_snapshot = (config.get("Labels") or {}).get(f"{LABEL}snapshot") == self._identity.gateway
        if details is not None and is_snapshot and not details.get("RepoTags"):
            await self._engine.remove_image(image, force=False)

    def busy(self, name: str) -> asyncio.Lock:
        """Held while a container is made, changed or removed: a kill may come during the create, and two at once."""
        return self._locks.setdefault(name, asyncio.Lock())


def name_of(container: Details) -> str:
    """Of a container in a list."""
    names: Sequence[str] = container["Names"] or [container["Id"]]
    return names[0].lstrip("/")


def runs(details: Details) -> bool:
    return bool(details["State"]["Running"]) and not details["State"].get("Dead")


def _kept_egress(box: Box) -> Egress | None:
    """None: nothing was ever said."""
    text = box.read(_EGRESS)
    if text is None:
        return None
    known = json.loads(text)
    return Egress(internet=known["internet"], allow=tuple(known["allow"]), deny=tuple(known["deny"]))
