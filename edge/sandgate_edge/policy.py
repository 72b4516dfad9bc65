"""Where plugins have a say in the edge: requests, messages and replies to what hooks see, and what they return back.

Called at the borders where clients' words come in and go out: before a route of the control plane reads its request, around
every request of the data plane, for each message to and from an agent, for each JSON object that describes a sandbox, for
each error. Hooks and their rules: :mod:`sandgate_plugin_api.hookspecs`. Without plugins nothing here is even asked: the
middleware is not installed, and ``has`` is a look into a dictionary.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge import routing
from sandgate_edge.core_client import CoreClient, Located
from sandgate_edge.keys import AGENT_REQUEST, CORE, NAMED, POLICY, REQUEST_ID, REST_REQUEST, SANDBOX_ID, SETTINGS, USED
from sandgate_edge.ports import to_port
from sandgate_edge.rest.query import parse
from sandgate_errors import Internal, InvalidArgument, NotFound, SandgateError, Unauthenticated
from sandgate_plugin_api import (
    AgentRequest,
    Credentials,
    PolicyContext,
    Reply,
    ReplyKind,
    Resources,
    RestRequest,
    SandboxInfo,
)
from sandgate_plugin_api.policies import Policies

__all__ = ["EdgePolicy", "agent_requests", "opened"]

T = TypeVar("T")
Next = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Seconds between two reports that a sandbox is used, while a request to it is open.
_REPORT = 15.0
#: Seconds for observers that are still being told when the edge stops.
_CLOSE_PATIENCE = 5.0
#: Observers that are being told at once; more are not told, which goes to the log.
_MOST_TOLD = 1_000
#: Commands without a client whose end is waited for. Beyond that one counts as ended.
_MOST_FOLLOWED = 10_000
_TOKEN_HEADER = "X-Access-Token"  # noqa: S105 - the name of a header
_API_KEY = "x-api-key"
_STATES = {
    sandboxes_pb2.SANDBOX_STATE_RUNNING: "running",
    sandboxes_pb2.SANDBOX_STATE_PAUSED: "paused",
}
_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class EdgePolicy:
    """The hooks of one edge. Made when its application is built; :func:`opened` is its life."""

    def __init__(self, policies: Policies | None = None) -> None:
        self.policies = policies or Policies()
        self._telling: set[asyncio.Task[Any]] = set()
        self._following: set[asyncio.Task[None]] = set()
        self._used: OrderedDict[tuple[str, sandboxes_pb2.Activity.ValueType], None] = OrderedDict()
        self._open: Counter[tuple[str, sandboxes_pb2.Activity.ValueType]] = Counter()
        self._wake = asyncio.Event()

    def has(self, hook: str) -> bool:
        return self.policies.has(hook)

    # Control plane

    async def rest_request(self, request: web.Request, body: Mapping[str, object] | None) -> web.Request:
        """The request as the plugins want it, with what they made of its body. Raises what they refuse it with."""
        asked = RestRequest(
            route=f"{request.method} {_canonical(request)}",
            parameters=dict(request.match_info),
            headers=dict(request.headers),
            query=parse(request.rel_url.raw_query_string),
            body=body or {},
            request_id=request[REQUEST_ID],
        )
        wanted = await self.policies.amend("sandgate_rest_request", asked, argument="request")
        if wanted is not asked:
            request = _cloned(request, asked, wanted, headers={_API_KEY})
        request[REST_REQUEST] = (wanted, body is None and not wanted.body)
        return request

    async def described(
        self, request: web.Request, sandbox: sandboxes_pb2.Sandbox, body: dict[str, object], kind: ReplyKind
    ) -> Mapping[str, object]:
        """The JSON object that describes a sandbox, as the plugins want it."""
        if not self.has("sandgate_describe"):
            return body
        asked = request[REST_REQUEST][0] if REST_REQUEST in request else _plain(request)
        reply = Reply(kind=kind, body=body, request=asked)
        info = _info_of(sandbox)
        # One plugin after the other, each on what the one before has made of it.
        changed: Mapping[str, object] = await self.policies.amend_part(
            "sandgate_describe", reply, argument="reply", part="body", sandbox=info
        )
        try:
            json.dumps(dict(changed), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            _log.error("a plugin's reply cannot be sent as JSON", hook="sandgate_describe", exc_info=error)
            raise Internal("a plugin is faulty in sandgate_describe", should_retry=False) from error
        return changed

    # Data plane

    def may_mean_the_agent(self, request: web.Request) -> bool:
        """Whether plugins are to be asked about a request whose headers name another port, but whose path is the agent's."""
        return (
            self.has("sandgate_agent_request")
            and request.method in {"GET", "POST"}
            and _may_be_for_agent(request)
            and _named_by(request) == "headers"
        )

    async def agent_request(self, request: web.Request) -> web.Request:
        """The request as the plugins want it. Raises what they refuse it with."""
        asked = AgentRequest(
            route=f"{request.method} {request.path}",
            headers=dict(request.headers),
            query=parse(request.rel_url.raw_query_string),
            named_by=_named_by(request),
            request_id=request[REQUEST_ID],
        )
        request[AGENT_REQUEST] = asked
        if not self.has("sandgate_agent_request"):
            return request
        wanted = await self.policies.amend("sandgate_agent_request", asked, argument="request")
        if wanted is not asked:
            request = _cloned(request, asked, wanted, headers=None)
            request.pop(NAMED, None)
        request[AGENT_REQUEST] = wanted
        return request

    async def check_access(self, request: web.Request, located: Located, otherwise: Callable[[Located], None]) -> None:
        """Raises Unauthenticated unless the request may reach the sandbox; ``otherwise`` is E2B's own rule."""
        is_health = request.path == "/health" and located.awake
        if is_health or AGENT_REQUEST not in request or not self.has("sandgate_access"):
            otherwise(located)
            return
        core, sandbox_id = request.app[CORE], located.sandbox.id

        async def opened_by(key: str) -> bool:
            try:
                await core.get(sandbox_id, api_key=key, request_id=request[REQUEST_ID])
            except (NotFound, Unauthenticated):
                return False
            return True

        credentials = Credentials(token=request.headers.get(_TOKEN_HEADER), opened_by=opened_by)
        verdict = await self.policies.first(
            "sandgate_access", bool, request=request[AGENT_REQUEST], sandbox_id=sandbox_id, credentials=credentials
        )
        if verdict is None:
            otherwise(located)
        elif not verdict:
            raise Unauthenticated("the request may not reach this sandbox")

    async def message(self, request: web.Request, message: T) -> T:
        """What goes to the agent."""
        if AGENT_REQUEST not in request or not self.has("sandgate_message"):
            return message
        return await self.policies.amend(
            "sandgate_message", message, argument="message", request=request[AGENT_REQUEST]
        )

    async def answer(self, request: web.Request, message: T) -> T:
        """What goes back to the client."""
        if AGENT_REQUEST not in request or not self.has("sandgate_answer"):
            return message
        return await self.policies.amend("sandgate_answer", message, argument="message", request=request[AGENT_REQUEST])

    async def error(self, request: web.Request, error: SandgateError) -> SandgateError:
        """What the client is told. A fault of the plugin leaves the error as it is."""
        if not self.has("sandgate_error"):
            return error
        asked: RestRequest | AgentRequest
        if AGENT_REQUEST in request:
            asked = request[AGENT_REQUEST]
        else:
            asked = request[REST_REQUEST][0] if REST_REQUEST in request else _plain(request)
        try:
            return await self.policies.amend(
                "sandgate_error", error, argument="error", kind=SandgateError, request=asked
            )
        except SandgateError:
            return error

    # Observers

    def _tell(self, telling: Coroutine[Any, Any, object]) -> None:
        if len(self._telling) >= _MOST_TOLD:
            telling.close()
            _log.error("observers are too slow: the end of a request was not told")
            return
        # Owned by this object, which waits for them when the edge stops.
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def admitted(self, request: web.Request, sandbox_id: str) -> None:
        """A request of the data plane may reach its sandbox: the core is told now, while it goes on, and when it is over."""
        activity = _activity_of(request.path)
        if activity is not None and AGENT_REQUEST in request and self.has("sandgate_activity"):
            request[USED] = (sandbox_id, activity)
            self._open[request[USED]] += 1
            self._note(request[USED])

    def over(self, request: web.Request, *, complete: bool) -> None:
        """A request of the data plane is over."""
        if USED in request:
            self._open[request[USED]] -= 1
            self._note(request[USED])
        if self.has("sandgate_ended"):
            self._tell(self.policies.collect("sandgate_ended", request=request[AGENT_REQUEST], complete=complete))

    def command_ended(self, request: AgentRequest) -> None:
        """The command that a request has started is over."""
        self._tell(self.policies.collect("sandgate_command_ended", request=request))

    def follow(self, request: AgentRequest, end: Coroutine[Any, Any, None]) -> None:
        """The same, once ``end`` has returned."""
        if len(self._following) >= _MOST_FOLLOWED:
            end.close()
            _log.error("too many commands without a client: one is not followed to its end")
            self.command_ended(request)
            return
        # Owned by this object, which gives them up when the edge stops.
        task = asyncio.create_task(end)
        self._following.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._following.discard(task)
            if not task.cancelled():
                if (failure := task.exception()) is not None:
                    _log.error("a command could not be followed to its end", exc_info=failure)
                self.command_ended(request)

        task.add_done_callback(over)

    def _note(self, what: tuple[str, sandboxes_pb2.Activity.ValueType]) -> None:
        self._used[what] = None
        self._wake.set()

    async def report(self, core: CoreClient) -> None:
        """Tell the core of uses, for as long as this runs: each sandbox at most once in every round."""
        while True:
            try:
                async with asyncio.timeout(_REPORT):
                    await self._wake.wait()
            except TimeoutError:
                self._open += Counter()  # Leaves out those that nobody has open any more.
                self._used |= dict.fromkeys(self._open)
            self._wake.clear()
            while self._used:
                (sandbox_id, activity), _nothing = self._used.popitem(last=False)
                try:
                    await core.note_activity(sandbox_id, activity)
                except SandgateError as error:
                    _log.warning("the core was not told that a sandbox is used", reason=error.message)

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(set(self._following))
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=_CLOSE_PATIENCE)
        for task in self._telling:
            task.cancel()
        await self.policies.close()


@web.middleware
async def agent_requests(request: web.Request, handler: Next) -> web.StreamResponse:
    """Around every request of the data plane. Installed only where there are plugins."""
    if not _may_be_for_agent(request):
        return await handler(request)
    policy = request.app[POLICY]
    shaped = await policy.agent_request(request)
    if (port := _other_port(shaped)) is not None:
        # Nobody has sent it to the agent: it goes where it was to go, as it came, and no hook has a say in it.
        request.pop(AGENT_REQUEST, None)
        return await to_port(request, *port)
    complete = False
    try:
        response = await handler(shaped)
        transport = request.transport
        complete = transport is not None and not transport.is_closing()
        return response
    finally:
        policy.over(shaped, complete=complete)
        if (named := shaped.get(SANDBOX_ID)) is not None:
            # For the log line, which knows the request as it came.
            request[SANDBOX_ID] = named


async def opened(app: web.Application) -> AsyncIterator[None]:
    """A part of the application's life: plugins configured, the core told of uses. Raises FailedPrecondition."""
    policy, tables = app[POLICY], app[SETTINGS].plugins

    def context(_name: str, table: Mapping[str, object]) -> PolicyContext:
        return PolicyContext(process="edge", settings=table)

    await policy.policies.configure(tables, context)
    reporting = asyncio.create_task(policy.report(app[CORE]))
    yield
    reporting.cancel()
    await asyncio.wait({reporting})
    await policy.close()


def _other_port(request: web.Request) -> tuple[str, int] | None:
    """The sandbox and port, where it is not the agent's."""
    try:
        named = routing.sandbox_id_of(request)
    except InvalidArgument:
        return None  # Found and answered again where such errors are.
    return None if named is None or named[1] == routing.AGENT_PORT else named


def _may_be_for_agent(request: web.Request) -> bool:
    if request.path in {"/health", "/metrics", "/envs"}:
        return _named_by(request) != "nothing"
    return request.path == "/files" or "." in request.path.partition("/")[2].partition("/")[0]


def _named_by(request: web.Request) -> Literal["host", "headers", "nothing"]:
    only_host = CIMultiDictProxy(CIMultiDict({"Host": request.headers.get("Host", "")}))
    try:
        if routing.named_by(only_host, request.app[SETTINGS].domain) is not None:
            return "host"
    except InvalidArgument:
        return "host"
    return "headers" if routing.ID_HEADER in request.headers else "nothing"


def _activity_of(path: str) -> sandboxes_pb2.Activity.ValueType | None:
    """What a request does in a sandbox; None: it only asks how it is."""
    if path.startswith("/process.Process/"):
        return sandboxes_pb2.ACTIVITY_COMMAND
    is_file = path == "/files" or path.startswith("/filesystem.Filesystem/")
    return sandboxes_pb2.ACTIVITY_FILE if is_file else None


def _cloned(
    request: web.Request,
    asked: RestRequest | AgentRequest,
    wanted: RestRequest | AgentRequest,
    *,
    headers: AbstractSet[str] | None,
) -> web.Request:
    """The request with another query and other headers; ``headers`` names those that may be changed (None: all)."""
    changes: dict[str, Any] = {}
    if wanted.query != asked.query:
        pairs = [(name, value) for name, values in wanted.query.items() for value in values]
        changes["rel_url"] = request.rel_url.with_query(None).raw_path + (f"?{urlencode(pairs)}" if pairs else "")
    if wanted.headers != asked.headers:
        if headers is None:
            changes["headers"] = CIMultiDict(wanted.headers)
        else:
            kept = CIMultiDict(request.headers)
            kept.update({name: value for name, value in wanted.headers.items() if name.lower() in headers})
            changes["headers"] = kept
    if not changes:
        return request
    try:
        return request.clone(**changes)
    except UnicodeEncodeError:
        raise InvalidArgument("a header of the request is not valid text") from None


def _canonical(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


def _plain(request: web.Request) -> RestRequest:
    """A request that no plugin was asked about."""
    return RestRequest(
        route=f"{request.method} {_canonical(request)}",
        parameters=dict(request.match_info),
        headers=dict(request.headers),
        request_id=request[REQUEST_ID],
    )


def _info_of(sandbox: sandboxes_pb2.Sandbox) -> SandboxInfo:
    return SandboxInfo(
        id=sandbox.id,
        template_id=sandbox.template_id,
        alias=sandbox.alias,
        backend=sandbox.backend,
        state=_STATES.get(sandbox.state, "killed"),
        started_at=sandbox.started_at.ToNanoseconds() / 1e9,
        end_at=sandbox.end_at.ToNanoseconds() / 1e9,
        metadata=dict(sandbox.metadata),
        resources=Resources(
            cpu_count=sandbox.resources.cpu_count,
            memory_mb=sandbox.resources.memory_mb,
            disk_size_mb=sandbox.resources.disk_size_mb,
        ),
        address=sandbox.address,
    )
