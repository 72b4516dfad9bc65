"""Hooks that a plugin may implement. pluggy only finds and registers; behaviour of backends lives in classes.

A plugin marks its implementations with :data:`hookimpl`, in a module or on the methods of an object::

    from sandgate_plugin_api import Registrar, hookimpl

    @hookimpl
    def sandgate_register_backends(registrar: Registrar) -> None:
        registrar.add(MyBackend)

An implementation may leave out arguments that it does not need; a hook of a name that is not here is refused at start.

``sandgate_register_backends`` is called for a plugin that offers a configured backend. All others are **policy**: only
plugins that the operator names (``plugins`` in the configuration, ``--profile``) are asked, in the order in
which they are named, so that installing a distribution never changes what a gateway does.

Rules of policy hooks, for all of them unless said otherwise:

* ``async def``, and they must not block the event loop. Each has :data:`HOOK_SECONDS`; one that takes longer has failed.
* A hook returns the changed copy of its first argument (of ``reply.body`` and ``message`` where it has these), or None for
  "as it is". The next plugin sees what the one before has returned.
* To refuse, it raises an error of ``sandgate_errors``: the client gets it in the words of the plane that was asked.
* Anything else that it raises or returns is a fault of the plugin: it goes to the log with the names of plugin and
  distribution, and the request fails with "internal" and those names, never with the exception's text.
* Observers (``sandgate_lifecycle``, ``sandgate_ended``, ``sandgate_command_ended``) change nothing and refuse nothing: their faults are logged only.
* A hook that nobody implements costs a look into a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from sandgate_errors import SandgateError
    from sandgate_plugin_api.backend import Backend
    from sandgate_plugin_api.policy import (
        Activity,
        AgentRequest,
        Change,
        Credentials,
        ListQuery,
        NewLife,
        NewSandbox,
        PolicyContext,
        Reply,
        RestRequest,
        SandboxInfo,
    )

__all__ = [
    "HOOK_SECONDS",
    "PROJECT",
    "Registrar",
    "hookimpl",
    "hookspec",
    "sandgate_access",
    "sandgate_activity",
    "sandgate_agent_request",
    "sandgate_answer",
    "sandgate_command_ended",
    "sandgate_configure",
    "sandgate_create_request",
    "sandgate_defaults",
    "sandgate_describe",
    "sandgate_ended",
    "sandgate_error",
    "sandgate_lifecycle",
    "sandgate_list_query",
    "sandgate_message",
    "sandgate_new_life",
    "sandgate_register_backends",
    "sandgate_rest_request",
]

PROJECT = "sandgate"
#: Seconds that one policy hook may take.
HOOK_SECONDS = 5.0
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Registrar(Protocol):
    """Collects what a plugin offers."""

    def add(self, backend: type[Backend]) -> None:
        """Offer a backend class under its ``name``. Raises FailedPrecondition for a name that is taken."""


# Backends


@hookspec
def sandgate_register_backends(registrar: Registrar) -> None:
    """Add backend classes to ``registrar``.

    Not async. Called once for each plugin when the gateway starts, before any backend is opened. Constructing nothing,
    importing little: classes that need heavy libraries import them in ``open``.
    """


# Policy: the start


@hookspec
def sandgate_defaults() -> Mapping[str, object]:  # type: ignore[empty-body]
    """Values for keys of the gateway's configuration, where the operator has set none.

    Not async. Called in the front process, before the others start. For a profile, which is a way the whole gateway
    behaves. Keys are those of the configuration file; an unknown one is refused with the plugin's name. ``plugins``,
    ``profile``, ``backends``, ``state_dir`` and ``database`` cannot be set.
    """


@hookspec
async def sandgate_configure(context: PolicyContext) -> None:
    """Take the settings; once in each process, before it serves.

    Raises FailedPrecondition with one line for the operator; the gateway then does not start. A plugin without this hook
    takes no settings, and a table for it is refused.
    """


# Policy in the core: holds for every caller, REST and gRPC


@hookspec
async def sandgate_create_request(request: NewSandbox) -> NewSandbox | None:
    """Amend or refuse a create. Called before a backend is asked for the template by name (whether it is listed stands in
    ``request.ready``) and before anything is checked or counted but the caller's key; for a create that repeats an earlier one (by its idempotency key) not at all.
    """


@hookspec
async def sandgate_new_life(sandbox: SandboxInfo, request: NewLife) -> NewLife | None:
    """Amend or refuse a new deadline of a running sandbox that somebody asks for; ``request`` is what may be changed."""


@hookspec
async def sandgate_list_query(query: ListQuery) -> ListQuery | None:
    """Amend or refuse a list, or filter it (``where``)."""


@hookspec
async def sandgate_activity(sandbox: SandboxInfo, activity: Activity) -> float | None:
    """Somebody uses a running sandbox. Returns seconds for which it is to live from now at least, None for no change.

    Called beside the request, which does not wait; several uses in quick succession may be told as one. With several
    plugins the longest life counts, within the longest that the deployment allows. A failure is logged only.
    """


@hookspec
async def sandgate_lifecycle(sandbox: SandboxInfo, change: Change) -> None:
    """A sandbox has changed its state. Observes: called afterwards, one after the other, in the order of the changes.

    What changes faster than observers take it is told late, and the oldest untold changes are given up with a line in the
    log when there are 10,000 of them. The history of each sandbox is kept by the gateway in any case.
    """


# Policy in the edge: the shape of what clients send and get


@hookspec
async def sandgate_rest_request(request: RestRequest) -> RestRequest | None:
    """Amend or refuse a request of the control plane, before its members are checked.

    With a refusal the API key is checked first: a wrong key is answered before a wrong request. ``query`` and ``body`` may
    be changed, and the header ``X-API-KEY``.
    """


@hookspec
async def sandgate_describe(sandbox: SandboxInfo, reply: Reply) -> Mapping[str, object] | None:
    """Shape the JSON object that describes a sandbox. Returns the new ``reply.body``."""


@hookspec
async def sandgate_agent_request(request: AgentRequest) -> AgentRequest | None:
    """Amend or refuse a request of the data plane, before its sandbox is looked up: headers (also those that name the
    sandbox) and query.

    A GET or POST whose headers name another port than the agent's, but whose path is one of the agent's, is asked about
    too: it is the agent's where the hook sets that port, else it goes to its port as it came.
    """


@hookspec
async def sandgate_access(request: AgentRequest, sandbox_id: str, credentials: Credentials) -> bool | None:
    """Whether a request may reach a sandbox. True admits, False refuses (401); None leaves it to the next plugin, and at the
    end to E2B's rule: the sandbox's own token, or a signature for a file. The first answer counts.

    Asked for every request of the data plane but the health of one that is awake. Never raises to admit.
    """


@hookspec
async def sandgate_message(request: AgentRequest, message: Any) -> Any:
    """Amend or refuse what a client sends to the agent: a message of ``sandgate_api.envd.v1``, such as ``StartRequest``.

    Called for each message of unary calls and streams alike. Returns a message of the same type.
    """


@hookspec
async def sandgate_answer(request: AgentRequest, message: Any) -> Any:
    """Amend or refuse what goes back to the client: a message of the agent, for an upload the list of JSON objects.

    Called for each message of a stream; keep it cheap. A client that has left gets nothing more, but see
    ``sandgate_ended``. Returns a message of the same type.
    """


@hookspec
async def sandgate_ended(request: AgentRequest, complete: bool) -> None:
    """A request of the data plane that the hooks have admitted is over. ``complete``: its answer was sent to the end; else
    the client left or the sandbox ended, and what the call has started may run on. Observes.
    """


@hookspec
async def sandgate_command_ended(request: AgentRequest) -> None:
    """The command that a ``Start`` has begun is over, or was never begun. Observes.

    Where the client has left, the command runs on, and the edge follows it to its end, which costs a stream to the agent.
    Not told of a command whose client left before its start event, and when the edge stops meanwhile.
    """


@hookspec
async def sandgate_error(request: RestRequest | AgentRequest, error: SandgateError) -> SandgateError | None:
    """Another error for the client, as where a profile's codes differ. Called for every error that a request of either
    plane ends with, refusals of hooks included. Returns it; does not raise.
    """
