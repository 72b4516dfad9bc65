"""The ``[backends.opensandbox]`` table of the configuration, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from sandgate_plugin_api import allows_image, refused_settings

__all__ = ["OpenSandboxSettings", "RegistrySettings", "TemplateSettings"]

_MODEL = ConfigDict(extra="forbid", frozen=True, strict=True)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
#: What a label of Kubernetes may hold, as the gateway's name becomes one.
_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
#: execd's own, and the one that the server gives a way of its own: a sandbox's programs want it.
_TAKEN_PORTS = frozenset({8080, 18080, 44772})
#: Where OpenSandbox's own clients look for the key.
_KEY_VARIABLE = "OPEN_SANDBOX_API_KEY"

Text = Annotated[str, Field(min_length=1)]
#: TOML has lists only.
Words = Annotated[tuple[str, ...], Field(strict=False)]
Secret = Annotated[SecretStr, Field(strict=False, min_length=1)]


class RegistrySettings(BaseModel):
    """With what the server fetches an image."""

    model_config = _MODEL

    username: Text
    password: Secret


class _Sandbox(BaseModel):
    """What may be said for all sandboxes, and for those of one template."""

    model_config = _MODEL

    #: Whole CPUs.
    cpu_count: int = Field(default=2, ge=1, le=1024)
    #: MiB.
    memory_mb: int = Field(default=2048, ge=64)
    #: MiB that clients are told of. The server neither limits disks nor says how large they are.
    disk_size_mb: int = Field(default=10_240, ge=1)
    #: A number of devices, or ``all``; None: no graphics processor.
    gpu: Annotated[str, Field(pattern="^([1-9][0-9]*|all)$")] | None = None
    #: Whether ``user`` may become root by the agent's own ``sudo``.
    sudo: bool = True


class TemplateSettings(_Sandbox):
    """One table ``[backends.opensandbox.templates.NAME]``. What is not said holds as in ``[backends.opensandbox]``."""

    #: A reference as the server's runtime takes it.
    image: Text
    aliases: Words = ()
    registry: RegistrySettings | None = None
    #: Variables of every command. Those of the image are not known to the gateway.
    envs: dict[str, str] = Field(default_factory=dict)
    #: Where commands start; None: the home of the acting user.
    workdir: Annotated[str, Field(pattern="^/")] | None = None
    #: Who acts where a call names nobody; None: ``user``, or with ``execd_only`` ``root``, which execd then has to be.
    user: Text | None = None
    start_command: str = ""
    ready_command: str = ""

    @field_validator("envs")
    @classmethod
    def _names(cls, envs: dict[str, str]) -> dict[str, str]:
        for name, value in envs.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"'{name}' cannot be a variable")
        return envs


class OpenSandboxSettings(_Sandbox):
    """What an operator may choose; an unknown key is an error that names it."""

    #: The lifecycle server, ``http://host:port`` or ``https://``, without ``/v1``.
    server: Text
    #: Its ``server.api_key``; None: the variable OPEN_SANDBOX_API_KEY, else it asks for none.
    api_key: Secret | None = None
    #: A file with the certificates that ``https://`` is checked with; None: the system's.
    ca: Text | None = None
    #: The name under which this gateway's sandboxes are found on the server. The same for all cores on one database, which
    #: then take over from one another; None: a name of this state directory's own.
    gateway: Annotated[str, Field(pattern=_LABEL)] | None = None
    #: What the tokens of sandboxes are derived from; None: the key of the server.
    secret: Annotated[SecretStr, Field(strict=False, min_length=16)] | None = None
    #: How sandboxes are reached: at the endpoint that the server reports, or through the server.
    reach: Literal["direct", "server"] = "direct"
    #: Whether endpoints are reached by TLS; None: as the server is, where they are the server's.
    endpoint_tls: bool | None = None
    #: The port in the sandbox on which its agent is reached.
    agent_port: int = Field(default=49983, ge=1024, le=65535)
    #: Whether every sandbox has the agent's bundle mounted already, by the server's ``sandbox_binds`` or a pod template.
    agent_mount: bool = False
    #: Whether sandboxes get no agent: commands and files go by execd alone, without what execd cannot do.
    execd_only: bool = False
    #: Seconds after which the server removes a sandbox that no gateway has spoken for; renewed as long as one does.
    lifetime: int = Field(default=86_400, ge=600)
    #: Image references that clients may give as a template's id: true for any, or patterns as ``ghcr.io/me/*``.
    allow_images: bool | Words = False
    templates: dict[str, TemplateSettings] = Field(default_factory=dict)

    @field_validator("server")
    @classmethod
    def _is_address(cls, server: str) -> str:
        parts = urlsplit(server)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be http://host:port or https://host:port")
        return server.rstrip("/")

    @field_validator("agent_port")
    @classmethod
    def _is_free(cls, port: int) -> int:
        if port in _TAKEN_PORTS:
            raise ValueError(f"{port} is taken by OpenSandbox itself")
        return port

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

    @model_validator(mode="after")
    def _shared_secret(self) -> Self:
        if self.gateway is not None and self.key is None and self.secret is None:
            raise ValueError("'gateway' is for several cores, which need a common 'secret' where there is no 'api_key'")
        return self

    @model_validator(mode="after")
    def _for_an_agent(self) -> Self:
        if not self.execd_only:
            return self
        for name in ("agent_mount", "agent_port", "sudo"):
            if name in self.model_fields_set:
                raise ValueError(f"'{name}' is for sandboxes with an agent, which 'execd_only' goes without")
        for name, template in self.templates.items():
            if "sudo" in template.model_fields_set:
                raise ValueError(f"'templates.{name}.sudo' is for an agent, which 'execd_only' goes without")
        return self

    @property
    def key(self) -> str | None:
        """The server's key, from wherever it comes."""
        if self.api_key is not None:
            return self.api_key.get_secret_value()
        return os.environ.get(_KEY_VARIABLE) or None

    @property
    def endpoint_scheme(self) -> str:
        tls = self.endpoint_tls
        if tls is None:
            tls = self.reach == "server" and self.server.startswith("https:")
        return "https" if tls else "http"

    def inherited(self, template: TemplateSettings) -> TemplateSettings:
        """A template's settings, with the backend's own where it says nothing."""
        common = {name: getattr(self, name) for name in _Sandbox.model_fields if name not in template.model_fields_set}
        user = template.user or ("root" if self.execd_only else "user")
        return template.model_copy(update={**common, "user": user})

    def allows(self, reference: str) -> bool:
        """Whether clients may name this image."""
        return allows_image(self.allow_images, reference)

    @classmethod
    def read(cls, table: Mapping[str, object]) -> OpenSandboxSettings:
        """The settings of a table. Raises FailedPrecondition with one line that names every wrong key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            keys = {*cls.model_fields, *TemplateSettings.model_fields}
            raise refused_settings(error.errors(), keys=keys) from None
