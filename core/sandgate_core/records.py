"""The record of one sandbox, as the store keeps it and the core decides by it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_core.states import State
from sandgate_plugin_api import Resources

__all__ = ["NetworkRules", "PauseMode", "SandboxRecord", "Setup", "Use"]


class PauseMode(enum.StrEnum):
    """What is kept of a paused sandbox; the names are those that clients read (rest.md 3.2)."""

    FULL = "full"
    FILESYSTEM = "filesystem"


@dataclass(frozen=True, kw_only=True)
class NetworkRules:
    """What may pass between a sandbox and the network, as the client gave it (rest.md 3.4)."""

    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    #: None: not said, which means true.
    allow_public_traffic: bool | None = None
    mask_request_host: str = ""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What each start of a sandbox on its files takes from its template; variables stand with the sandbox's own."""

    #: The template as its backend knows it: of a sandbox that was made from a snapshot, that of the snapshot's source.
    template: str = ""
    default_user: str = ""
    workdir: str = ""
    start_command: str = ""
    ready_command: str = ""


@dataclass
class Use:
    """What a team has at one time."""

    sandboxes: int = 0
    cpus: int = 0
    memory_mb: int = 0

    def add(self, resources: Resources, *, times: int = 1) -> None:
        self.sandboxes += times
        self.cpus += times * resources.cpu_count
        self.memory_mb += times * resources.memory_mb


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
    #: The deadline; None before readiness. A sandbox that does not run keeps its last one, which is not acted on.
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
    #: The backend may not have been told the rules above yet.
    egress_pending: bool = False
    setup: Setup = field(default_factory=Setup)
    #: Whether the data plane asks for the sandbox's token.
    secure: bool = False
    token_version: int = 1
    #: The backend's own note; JSON.
    handle: Mapping[str, object]
    #: From the beginning of a pause to the end of the resume; else None.
    pause_mode: PauseMode | None = None
    #: The agent gave no answer when the sandbox was paused.
    agent_unresponsive: bool = False
    #: What makes a repeated create the same one: the client's key, and what came with it.
    idempotency_key: str | None = None
    request_digest: str | None = None
    #: The node id of the core whose it is.
    core: str = ""
