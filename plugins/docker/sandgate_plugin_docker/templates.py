"""What clients can make sandboxes from: the configured templates, and images by reference where that is allowed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sandgate_errors import InvalidArgument
from sandgate_plugin_api import Resources, Template
from sandgate_plugin_docker.images import ImageFacts, Images, is_reference
from sandgate_plugin_docker.settings import LEAST_MEMORY_MB, DockerSettings, TemplateSettings

__all__ = ["Catalog", "Model", "configured"]

#: What `base` is where nobody has said it.
_BASE_IMAGE = "python:3.12-slim-bookworm"
_NUMBERS = re.compile(r"(?P<uid>\d+)(?::(?P<gid>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A template with its image: all that is needed to make a sandbox of it."""

    name: str
    settings: TemplateSettings
    image: ImageFacts

    @property
    def default_user(self) -> str:
        """Empty: ``user``."""
        if self.settings.user is not None:
            return self.settings.user
        name = self.image.user.partition(":")[0]
        # A number has no name that the backend could know: the account `user` gets it instead.
        return "" if name in {"", "root"} or name.isdigit() else name

    @property
    def account(self) -> Mapping[str, int]:
        """The ids that ``user`` is to have; none: those that are free."""
        numbers = _NUMBERS.fullmatch(self.image.user) if self.settings.user is None else None
        if numbers is None or int(numbers["uid"]) == 0:
            return {}
        return {key: int(value) for key, value in numbers.groupdict().items() if value is not None}

    @property
    def envs(self) -> Mapping[str, str]:
        """Without the image's PATH, which the agent has and adds to."""
        return {**{name: value for name, value in self.image.envs.items() if name != "PATH"}, **self.settings.envs}

    @property
    def workdir(self) -> str:
        if self.settings.workdir is not None:
            return self.settings.workdir
        return self.image.workdir if self.image.workdir != "/" else ""

    @property
    def start_command(self) -> str:
        entrypoint = self.settings.entrypoint
        if entrypoint is True:
            return shlex.join(self.image.command)
        return shlex.join(entrypoint) if entrypoint else self.settings.start_command


def configured(settings: DockerSettings) -> dict[str, TemplateSettings]:
    """The templates by their names, each with all that holds for it."""
    named = settings.templates or {"base": TemplateSettings(image=_BASE_IMAGE)}
    return {name: settings.inherited(template) for name, template in named.items()}


class Catalog:
    """The templates of one backend."""

    def __init__(self, settings: DockerSettings, images: Images, machine: Resources) -> None:
        self._settings = settings
        self._images = images
        self._machine = machine
        self._named = configured(settings)

    @property
    def configured(self) -> Mapping[str, TemplateSettings]:
        return self._named

    def listed(self) -> Sequence[Template]:
        """The configured ones, with what is known of their images so far."""
        return [
            self._described(name, settings, self._images.known(settings.image))
            for name, settings in self._named.items()
        ]

    async def find(self, name: str) -> Template | None:
        """The template of an id, alias or image reference. Raises NotFound, Unavailable."""
        # An image that is not allowed is as unknown as one that does not exist: which there are is nobody's business.
        if self._configured(name) is None and not (is_reference(name) and self._settings.allows(name)):
            return None
        model = await self.model(name)
        return self._described(model.name, model.settings, model.image)

    async def model(self, name: str) -> Model:
        """Everything about a template. Raises as :meth:`find`; InvalidArgument for a name that is none."""
        found = self._configured(name)
        if found is None:
            if not (is_reference(name) and self._settings.allows(name)):
                raise InvalidArgument(f"backend 'docker' has no template '{name}'")
            found = name, self._settings.inherited(TemplateSettings(image=name, warm=0))
        known, settings = found
        return Model(name=known, settings=settings, image=await self._images.find(settings.image))

    def limited(self, model: Model, resources: Resources, *, disk: bool) -> Model:
        """A template for a sandbox that may use something else than it says; ``disk``: of its disk, too.

        The same object where it says the same. Raises InvalidArgument for what the engine's host does not have, or with
        which no container starts.
        """
        own = self._described(model.name, model.settings, model.image).resources
        names = ("cpu_count", "memory_mb", *(("disk_size_mb",) if disk else ()))
        changes = {name: getattr(resources, name) for name in names if getattr(resources, name) != getattr(own, name)}
        if not changes:
            return model
        if resources.cpu_count > self._machine.cpu_count:
            raise InvalidArgument(f"a sandbox can have {self._machine.cpu_count} CPUs here, not {resources.cpu_count}")
        if resources.memory_mb < LEAST_MEMORY_MB:
            raise InvalidArgument(f"a sandbox needs at least {LEAST_MEMORY_MB} MiB of memory")
        return replace(model, settings=model.settings.model_copy(update=changes))

    def model_of(self, name: str, image: ImageFacts) -> Model:
        """Of a sandbox that was made from a template, which may be unknown by now."""
        _, settings = self._configured(name) or (name, self._settings.inherited(TemplateSettings(image=image.id)))
        return Model(name=name, settings=settings, image=image)

    def _configured(self, name: str) -> tuple[str, TemplateSettings] | None:
        if name in self._named:
            return name, self._named[name]
        return next(((known, each) for known, each in self._named.items() if name in each.aliases), None)

    def _described(self, name: str, settings: TemplateSettings, image: ImageFacts | None) -> Template:
        facts = image or ImageFacts(id="", envs={}, workdir="", user="", command=())
        model = Model(name=name, settings=settings, image=facts)
        return Template(
            id=name,
            aliases=settings.aliases,
            resources=Resources(
                cpu_count=settings.cpu_count or self._machine.cpu_count,
                memory_mb=settings.memory_mb or self._machine.memory_mb,
                disk_size_mb=settings.disk_size_mb or self._machine.disk_size_mb,
            ),
            envs=model.envs,
            default_user=model.default_user,
            workdir=model.workdir,
            start_command=model.start_command,
            ready_command=settings.ready_command,
        )
