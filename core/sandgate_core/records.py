"""The record of one sandbox, as the store keeps it and the core decides by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_core.states import State
from sandgate_plugin_api import Resources

__all__ = ["NetworkRules", "SandboxRecord"]


@dataclass(frozen=True, kw_only=True)
class NetworkRules:
    """What may pass between a sandbox and the network, as the client gave it (rest.md 3.4)."""

    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    #: None: not said, which means true.
    allow_public_traffic: bool | None = None
    mask_request_host: str = ""


@dataclass(frozen=True, kw_only=True)
class SandboxRecord:
    """Everything the core knows of a sandbox. Times are in microseconds since 1970."""

    id: str
    owner: str
    backend: str
    template_id: str
    #: Another name of the template; empty when it has none.
    alias: str
    state: State
    #: Counts the changes of state; numbers the entries of the record's history.
    revision: int = 0
    created_at: int
    #: From readiness; None before it (C7).
    started_at: int | None = None
    #: The deadline; None before readiness.
    end_at: int | None = None
    ended_at: int | None = None
    #: The life asked for at create, in microseconds.
    timeout: int
    pause_on_timeout: bool = False
    pause_memory: bool = True
    auto_resume: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict, repr=False)
    resources: Resources
    allow_internet_access: bool = True
    network: NetworkRules | None = None
    #: Whether the data plane asks for the sandbox's token.
    secure: bool = False
    token_version: int = 1
    #: The backend's own note; JSON.
    handle: Mapping[str, object]
