"""Frozen records that cross the plugin border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AgentAddress", "Placement", "Resources", "SandboxRequest", "Survivor", "Template"]


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


@dataclass(frozen=True, kw_only=True)
class AgentAddress:
    """Where the agent of one sandbox answers, and what proves a caller to it."""

    #: A gRPC target: ``unix:/path`` (at most 107 bytes of path) or ``host:port``.
    target: str
    #: Goes into the metadata ``agent-token`` of every call. Never logged.
    token: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """One sandbox to make."""

    #: `i` and 20 of [a-z0-9]; unique for all time.
    sandbox_id: str
    template: Template
    #: False: no connection leaves the sandbox.
    allow_internet_access: bool = True
    #: As the client gave it; for labels, never for decisions.
    metadata: Mapping[str, str] = field(default_factory=dict)


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
