"""Frozen records that cross the plugin border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AgentAddress", "Egress", "Placement", "Resources", "SandboxRequest", "Survivor", "Template", "Usage"]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a sandbox may use, or what it can see where nothing limits it."""

    #: Whole CPUs.
    cpu_count: int
    #: MiB.
    memory_mb: int
    #: MiB.
    disk_size_mb: int


@dataclass(frozen=True, kw_only=True)
class Template:
    """Something sandboxes can be made from."""

    #: What clients write as ``templateID``.
    id: str
    #: Other names that mean the same.
    aliases: tuple[str, ...] = ()
    resources: Resources
    #: Variables of every command; those of the create request win.
    envs: Mapping[str, str] = field(default_factory=dict)
    #: The acting user where a call names none. Empty: `user`.
    default_user: str = ""
    #: The working directory where a call names none. Empty: the acting user's home.
    workdir: str = ""
    #: Started by the core through the agent, in the background, each time the sandbox starts on its files. Empty: none.
    start_command: str = ""
    #: The sandbox is ready when this ends with status 0; the core repeats it until then. Empty: ready at once.
    ready_command: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentAddress:
    """Where the agent of one sandbox answers, and what proves a caller to it."""

    #: A gRPC target: ``unix:/path`` (at most 107 bytes of path) or ``host:port``.
    target: str
    #: Goes into the metadata ``agent-token`` of every call. Never logged.
    token: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Egress:
    """Where connections from inside a sandbox may go. Private and link-local ranges stay blocked whatever stands here."""

    #: False: nowhere, whatever the lists say.
    internet: bool = True
    #: IPv4 and IPv6 addresses, ranges (`a.b.c.d/n`) and domain names (`example.org`, `*.example.org`). Allow wins over deny.
    allow: tuple[str, ...] = ()
    #: Addresses and ranges only.
    deny: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        """No rule restricts anything."""
        return self.internet and not self.allow and not self.deny


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """One sandbox to make."""

    #: `i` and 20 of [a-z0-9]; unique for all time.
    sandbox_id: str
    template: Template
    #: The same as ``egress.internet``.
    allow_internet_access: bool = True
    egress: Egress = Egress()
    #: What :meth:`~sandgate_plugin_api.backend.Backend.snapshot` of this backend returned: start from these files (and,
    #: with :attr:`~sandgate_plugin_api.backend.Capability.FORK`, this memory) instead of the template's. None: anew.
    snapshot: Mapping[str, object] | None = None
    #: As the client gave it; for labels, never for decisions.
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: How what is made is to be called, where it has a name that others see, such as a container's. Empty: as the backend
    #: likes. Text of a client: :meth:`~sandgate_plugin_api.backend.Backend.reserve` raises InvalidArgument for what cannot
    #: be a name, ``create`` AlreadyExists for one that is taken. A backend without names leaves it.
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a sandbox is."""

    #: The backend's own note, JSON-able, kept with the record and given back in every later call.
    handle: Mapping[str, object]
    agent: AgentAddress


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A sandbox that the backend finds existing, whoever remembers it."""

    sandbox_id: str
    handle: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a sandbox uses now."""

    cpu_count: int
    #: Percent of all its CPUs together since the previous question, 0 to 100.
    cpu_used_pct: float
    #: Bytes.
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_used: int
    disk_total: int
