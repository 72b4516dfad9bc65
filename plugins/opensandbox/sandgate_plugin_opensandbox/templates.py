"""What clients can make sandboxes from: the configured templates, and images by reference where that is allowed.

Which images there are, and what they say of themselves, is the server's knowledge and not told to its clients: an image is
tried when a sandbox is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandgate_errors import InvalidArgument
from sandgate_plugin_api import Resources, Template
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings, TemplateSettings

__all__ = ["Catalog", "Model"]

#: What `base` is where nobody has said it.
_BASE_IMAGE = "python:3.12-slim-bookworm"
#: Host and path, then a tag or a digest. A bare name is that of a template.
_REFERENCE = re.compile(
    r"(?=.*[/:@])[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_LONGEST_REFERENCE = 512


@dataclass(frozen=True, kw_only=True)
class Model:
    """All that is needed to make a sandbox of a template."""

    name: str
    settings: TemplateSettings
    #: Whether a client named the image, so that its absence is the client's business.
    by_reference: bool


class Catalog:
    """The templates of one backend."""

    def __init__(self, settings: OpenSandboxSettings) -> None:
        self._settings = settings
        named = settings.templates or {"base": TemplateSettings(image=_BASE_IMAGE)}
        self._named = {name: settings.inherited(template) for name, template in named.items()}

    def listed(self) -> Sequence[Template]:
        return [_described(name, settings) for name, settings in self._named.items()]

    def find(self, name: str) -> Template | None:
        """The template of an id, alias or image reference."""
        model = self._model(name)
        return None if model is None else _described(model.name, model.settings)

    def model(self, name: str) -> Model:
        """Raises InvalidArgument for a name that is none."""
        model = self._model(name)
        if model is None:
            raise InvalidArgument(f"backend 'opensandbox' has no template '{name}'")
        return model

    def model_of(self, name: str) -> Model:
        """Of a sandbox that was made from a template, which may be unknown by now."""
        unknown = Model(
            name=name, settings=self._settings.inherited(TemplateSettings(image="unknown")), by_reference=False
        )
        return self._model(name) or unknown

    def _model(self, name: str) -> Model | None:
        for known, settings in self._named.items():
            if name == known or name in settings.aliases:
                return Model(name=known, settings=settings, by_reference=False)
        if len(name) > _LONGEST_REFERENCE or not _REFERENCE.fullmatch(name) or not self._settings.allows(name):
            return None
        settings = self._settings.inherited(TemplateSettings(image=name))
        return Model(name=name, settings=settings, by_reference=True)


def _described(name: str, settings: TemplateSettings) -> Template:
    return Template(
        id=name,
        aliases=settings.aliases,
        resources=Resources(
            cpu_count=settings.cpu_count, memory_mb=settings.memory_mb, disk_size_mb=settings.disk_size_mb
        ),
        envs=settings.envs,
        default_user=settings.user or "",
        workdir=settings.workdir or "",
        start_command=settings.start_command,
        ready_command=settings.ready_command,
    )
