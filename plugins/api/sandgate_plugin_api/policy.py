"""What policy hooks see and may change. The hooks stand in :mod:`sandgate_plugin_api.hookspecs`.

All records are frozen: a hook that wants a change returns ``dataclasses.replace(request, ...)``. Times are seconds, as
``datetime.timestamp`` counts them where they are moments. Nothing here is text for a client until a hook raises it.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from sandgate_plugin_api.records import Egress, Resources, Template

__all__ = [
    "Activity",
    "AgentRequest",
    "Change",
    "Credentials",
    "Deployment",
    "ListQuery",
    "NewLife",
    "NewSandbox",
    "PolicyContext",
    "Reply",
    "ReplyKind",
    "ResourceLimits",
    "RestRequest",
    "SandboxInfo",
]


class Activity(enum.StrEnum):
    """What somebody did in a sandbox. Questions about it, new deadlines and health checks are none."""

    #: A call of the process service: a command, its input, a terminal.
    COMMAND = "command"
    #: A file or directory was read, written, listed, moved or watched.
    FILE = "file"


@dataclass(frozen=True, kw_only=True)
class SandboxInfo:
    """One sandbox as the gateway knows it; a copy, which does not change."""

    id: str
    #: The team. Empty in the edge, which is not told.
    owner: str = ""
    template_id: str
    #: Another name of the template; empty when it has none.
    alias: str = ""
    backend: str
    #: `creating`, `running`, `paused`, `killed`, ... as ``sandgate_core.states`` names them. The edge sees `running` and
    #: `paused` only.
    state: str
    started_at: float | None
    #: The deadline; None before the sandbox is ready.
    end_at: float | None
    #: The life that was asked for at create, in seconds. None in the edge.
    life: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    resources: Resources
    #: Its own IP address where its backend knows one; only in a reply of the kind ``detail``.
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """What a sandbox may use; None: what its template says."""

    #: Whole CPUs.
    cpu_count: int | None = None
    #: MiB.
    memory_mb: int | None = None
    #: MiB.
    disk_size_mb: int | None = None


@dataclass(frozen=True, kw_only=True)
class NewSandbox:
    """A create, before anything of it was looked up or checked. What a hook leaves in it is then checked as if the client had
    sent it.
    """

    #: An id, an alias or whatever else the backends find a template by.
    template: str
    #: Whether the template that the client named is there: listed by a backend, or a snapshot. Otherwise a backend may find
    #: it without listing it, such as the reference of an image; or nobody does. A change changes nothing.
    ready: bool = False
    #: Seconds of life.
    timeout: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Whether the data plane asks for the sandbox's token.
    secure: bool = False
    egress: Egress = field(default_factory=Egress)
    #: At its end it pauses instead of being killed; without its memory, where that is False.
    pause_on_timeout: bool = False
    pause_memory: bool = True
    #: Traffic wakes it.
    auto_resume: bool = False
    #: Whose it will be. A change is refused: a plugin cannot give sandboxes away.
    owner: str
    #: Backends to try, in this order; empty: the gateway's own choice. The next one is tried when one says Unavailable or
    #: ResourceExhausted, or does not have the template.
    backends: tuple[str, ...] = ()
    #: Instead of the template's. Refused by name where the backend does not enforce limits.
    resources: ResourceLimits | None = None
    #: How the backend is to call it; see :attr:`~sandgate_plugin_api.records.SandboxRequest.name`.
    name: str = ""
    #: Seconds until it must be ready, from when its backend is asked to make it: looking for the template does not count.
    #: The gateway's own limit (``create_timeout``) for all of it counts besides. None: that one alone.
    start_timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class NewLife:
    """A new deadline, asked for by somebody: set-timeout, or an extension."""

    #: Seconds from now.
    timeout: float
    #: Never earlier than the present deadline.
    extend_only: bool


@dataclass(frozen=True, kw_only=True)
class ListQuery:
    """A list, before anything was filtered."""

    #: Whose sandboxes; None: everybody's, for the operator's own tools. A change is refused.
    owner: str | None
    #: Every pair must be there.
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Of `running` and `paused`; empty: both.
    states: frozenset[str] = frozenset()
    #: An id or an alias; None: any.
    template: str | None = None
    #: None: all in one piece.
    page_size: int | None = 100
    #: Every one must say True of a sandbox. Not async, and called once for each sandbox that the caller may see.
    where: tuple[Callable[[SandboxInfo], bool], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of state that has happened."""

    #: None: the sandbox has just been recorded.
    from_state: str | None
    to_state: str
    #: Why, in a few words of the gateway's.
    note: str


class Deployment(Protocol):
    """What a policy in the core may ask the gateway. Given with :class:`PolicyContext`; usable once the gateway serves."""

    @property
    def backends(self) -> Mapping[str, frozenset[str]]:
        """The configured backends and the names of their capabilities; the default backend first."""

    async def ready_templates(self, backend: str) -> Sequence[Template]:
        """The templates that a backend lists. Raises NotFound (no such backend), Unavailable."""


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """What ``sandgate_configure`` gets."""

    #: The process that has loaded the plugin: each has a copy of its own, and they share nothing.
    process: Literal["core", "edge"]
    #: The ``[plugins.<name>]`` table, unchecked: the plugin refuses what it does not know, by FailedPrecondition.
    settings: Mapping[str, object] = field(default_factory=dict)
    #: A private folder that survives restarts. None in the edge, of which there may be several.
    state_dir: Path | None = None
    #: None in the edge.
    deployment: Deployment | None = None


@dataclass(frozen=True, kw_only=True)
class RestRequest:
    """A request of the control plane, with its key checked for form only. The paths are those of E2B's REST API.

    All that an API key is for: sandboxes, templates, snapshots. Requests about keys and teams are the operator's.
    """

    #: Method and path as the API names them: `POST /v2/sandboxes`, `GET /sandboxes/{id}`. Refusing by it refuses a route.
    route: str
    #: What stands for the names in braces. A change is refused.
    parameters: Mapping[str, str] = field(default_factory=dict)
    #: Names as the client wrote them; lookups should not depend on case. Only ``X-API-KEY`` counts when it is changed.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Name to values, decoded once.
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The JSON object, before its members were checked; empty where there is none.
    body: Mapping[str, object] = field(default_factory=dict, repr=False)
    #: One id for one request, in every log line about it.
    request_id: str = ""


class ReplyKind(enum.StrEnum):
    """Which reply of the control plane describes a sandbox."""

    #: Create, connect and resume.
    SANDBOX = "sandbox"
    #: One item of a list.
    LISTED = "listed"
    #: All about one sandbox.
    DETAIL = "detail"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The JSON object that describes one sandbox, before it is sent."""

    kind: ReplyKind
    #: JSON-able; what a hook returns instead must be so too.
    body: Mapping[str, object]
    #: What is being answered, as plugins have amended it.
    request: RestRequest


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """A request of the data plane: for the agent of one sandbox, which may not exist."""

    #: `POST /process.Process/Start`, `GET /files`, `GET /health`.
    route: str
    #: As in :class:`RestRequest`; all of it counts when it is changed.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    #: How the request named its sandbox. `nothing`: not at all, or by a signature alone.
    named_by: Literal["host", "headers", "nothing"]
    request_id: str = ""

    def header(self, name: str) -> str | None:
        """The first header of that name, in any case."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), None)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What came with a request of the data plane, and the way to check it."""

    #: The header ``X-Access-Token``; None: it is missing.
    token: str | None = field(repr=False)
    #: Whether an API key is good and its team owns this sandbox. Asks the core, which counts as a use of the key.
    opened_by: Callable[[str], Awaitable[bool]] = field(repr=False)
