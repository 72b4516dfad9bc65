"""The ``[backends.docker]`` table of the configuration, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sandgate_plugin_api import allows_image, refused_settings

__all__ = ["LEAST_MEMORY_MB", "DockerSettings", "MountSettings", "TemplateSettings"]

_MODEL = ConfigDict(extra="forbid", frozen=True, strict=True)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_INNER_FOLDER = re.compile(r"/.*[^/]")
#: The engine refuses to start a container with less.
LEAST_MEMORY_MB = 32

Text = Annotated[str, Field(min_length=1)]
#: TOML has lists only.
Words = Annotated[tuple[str, ...], Field(strict=False)]


class MountSettings(BaseModel):
    """Something of the engine's host that every sandbox of a template sees. Read-only unless told otherwise."""

    model_config = _MODEL

    #: A folder or file of the engine's host, or the name of a volume.
    source: Text
    #: Where it is in the sandbox.
    target: Text
    read_only: bool = True

    @field_validator("target")
    @classmethod
    def _not_ours(cls, target: str) -> str:
        if not _INNER_FOLDER.fullmatch(target) or ".." in target.split("/"):
            raise ValueError("must be an absolute path without '..'")
        if f"{target}/".startswith("/run/sandgate/") or "/run/sandgate/".startswith(f"{target}/"):
            raise ValueError("would hide what the gateway mounts below /run/sandgate")
        return target


class _Sandbox(BaseModel):
    """What may be said for all sandboxes, and for those of one template."""

    model_config = _MODEL

    #: Whole CPUs; None: as many as the engine's host has.
    cpu_count: int | None = Field(default=None, ge=1, le=1024)
    #: MiB, swap included; None: no limit.
    memory_mb: int | None = Field(default=None, ge=LEAST_MEMORY_MB)
    #: MiB of changed and new files; None: no limit. Needs a storage driver that can.
    disk_size_mb: int | None = Field(default=None, ge=64)
    #: Processes and threads; None: no limit.
    pids: int | None = Field(default=4096, ge=64)
    #: The engine's name of an OCI runtime, as ``runsc`` or ``kata``; None: the engine's default.
    runtime: Text | None = None
    #: Sandboxes made ahead for each template, so that a create need not wait for one.
    warm: int = Field(default=0, ge=0, le=64)
    #: Whether ``user`` may become root by the agent's own ``sudo``.
    sudo: bool = True
    #: Whether set-user-id programs of the image gain privileges, as the image's own ``sudo`` needs.
    set_user_id: bool = False


class TemplateSettings(_Sandbox):
    """One table ``[backends.docker.templates.NAME]``. What is not said holds as in ``[backends.docker]``."""

    #: A reference as ``docker run`` takes it.
    image: Text
    aliases: Words = ()
    #: Variables of every command, besides those of the image.
    envs: dict[str, str] = Field(default_factory=dict)
    #: Where commands start; None: the image's WORKDIR, else the home of the acting user.
    workdir: Annotated[str, Field(pattern="^/")] | None = None
    #: Who acts where a call names nobody; None: the image's USER, else ``user``.
    user: Text | None = None
    #: Started in each sandbox: true for the image's own ENTRYPOINT and CMD, or a list of words.
    entrypoint: bool | Words = False
    start_command: str = ""
    ready_command: str = ""
    #: The network of the engine that sandboxes join; None: the gateway's own, on which they do not see one another.
    network: Text | None = None
    mounts: tuple[MountSettings, ...] = Field(default=(), strict=False)
    #: A root file system that cannot be written; /tmp, /var/tmp, /run and /home/user can, in memory.
    read_only: bool = False

    @field_validator("envs")
    @classmethod
    def _names(cls, envs: dict[str, str]) -> dict[str, str]:
        for name, value in envs.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"'{name}' cannot be a variable")
        return envs

    @field_validator("network")
    @classmethod
    def _own_network(cls, network: str | None) -> str | None:
        """The agent takes what it sees for the sandbox's own, and its ports are reached from outside."""
        if network in {"host", "none", "default"} or (network or "").startswith("container:"):
            raise ValueError(f"'{network}' is no network that a sandbox can join and leave; give the name of one")
        return network

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.entrypoint and self.start_command:
            raise ValueError("entrypoint and start_command are two ways to say what is started: give one")
        return self


class DockerSettings(_Sandbox):
    """What an operator may choose; an unknown key is an error that names it."""

    #: ``unix:///path``, ``tcp://host:port`` or ``ssh://user@host``; None: DOCKER_HOST, else the usual socket.
    host: Text | None = None
    #: A folder with ``ca.pem``, and ``cert.pem`` and ``key.pem``, for ``tcp://``; None: DOCKER_CERT_PATH where
    #: DOCKER_TLS_VERIFY is set.
    certificates: Text | None = None
    #: How agents are reached: through a socket in a folder of this machine, or through a port of the engine's host, by
    #: TLS. ``auto``: by socket where the engine is reached by one.
    agents: Literal["auto", "socket", "port"] = "auto"
    #: The name or address of the engine's host for ports of agents; None: what ``host`` names.
    agent_host: Text | None = None
    #: The address of the engine's host on which agents' ports are opened; None: all of them, or loopback where the
    #: engine is on this machine.
    agent_bind: Text | None = None
    #: Whether sandboxes are kept from private networks and the engine's host, by packet filter rules, where the gateway
    #: can set them.
    firewall: bool = True
    #: Whether images are fetched: when missing, at every first use, or never.
    pull: Literal["missing", "always", "never"] = "missing"
    #: Seconds without any progress after which a pull has failed.
    pull_stall: int = Field(default=30, ge=1)
    #: Image references that clients may give as a template's id: true for any, or patterns as ``ghcr.io/me/*``, in which
    #: ``*`` is anything but a slash and ``**`` anything.
    allow_images: bool | Words = False
    templates: dict[str, TemplateSettings] = Field(default_factory=dict)

    @field_validator("templates")
    @classmethod
    def _template_names(cls, templates: dict[str, TemplateSettings]) -> dict[str, TemplateSettings]:
        seen: set[str] = set()
        for name, template in templates.items():
            for known in (name, *template.aliases):
                if not _NAME.fullmatch(known):
                    raise ValueError(f"'{known}' cannot be the name of a template")
                if known in seen:
                    raise ValueError(f"'{known}' names two templates")
                seen.add(known)
        return templates

    def inherited(self, template: TemplateSettings) -> TemplateSettings:
        """A template's settings, with the backend's own where it says nothing."""
        common = {name: getattr(self, name) for name in _Sandbox.model_fields if name not in template.model_fields_set}
        return template.model_copy(update=common)

    def allows(self, reference: str) -> bool:
        """Whether clients may name this image."""
        return allows_image(self.allow_images, reference)

    @classmethod
    def read(cls, table: Mapping[str, object]) -> DockerSettings:
        """The settings of a table. Raises FailedPrecondition with one line that names every wrong key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            keys = {*cls.model_fields, *TemplateSettings.model_fields, *MountSettings.model_fields}
            raise refused_settings(error.errors(), keys=keys) from None
