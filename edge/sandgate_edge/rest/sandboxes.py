"""The control plane of the E2B API: the sandbox routes (``rest.md`` 2 and 4, ``behaviour.md`` 13).

Each handler turns a request into one call of the core and its answer into a JSON object; nothing is decided here. Errors
are raised as they are and become bodies in the application's middleware.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.keys import CORE, POLICY, REQUEST_ID, SETTINGS
from sandgate_edge.rest.absent import ABSENT, add_absent
from sandgate_edge.rest.api_key import api_key_of
from sandgate_edge.rest.bodies import read_object
from sandgate_edge.rest.create import TIMEOUT_V1, TIMEOUT_V2, create_request
from sandgate_edge.rest.credentials import key_first
from sandgate_edge.rest.filters import list_request, parse_metadata
from sandgate_edge.rest.identifiers import sandbox_id_in_path
from sandgate_edge.rest.query import parse, query_of
from sandgate_edge.rest.repeats import made_once
from sandgate_edge.rest.views import detail_view, listed_view, sandbox_view
from sandgate_errors import (
    InvalidArgument,
    SandgateError,
)
from sandgate_plugin_api import ReplyKind

__all__ = ["routes", "sandbox_reply"]

routes = web.RouteTableDef()
add_absent(routes, ABSENT)

# What `autoPause` says about the sandbox's end; absent, it stays as it was.
_AT_END = {
    None: sandboxes_pb2.ON_TIMEOUT_UNSPECIFIED,
    False: sandboxes_pb2.ON_TIMEOUT_KILL,
    True: sandboxes_pb2.ON_TIMEOUT_PAUSE,
}


@routes.post("/sandboxes")
@key_first
async def create_v1(request: web.Request) -> web.Response:
    """Secured only when asked for; 15 seconds of life when none are named."""
    body = await read_object(request)
    secure = bool(body.flag("secure"))
    return await _create(request, create_request(body, secure=secure, default_timeout=TIMEOUT_V1))


@routes.post("/v2/sandboxes")
@key_first
async def create_v2(request: web.Request) -> web.Response:
    """Always secured; 300 seconds of life when none are named."""
    body = await read_object(request)
    return await _create(request, create_request(body, secure=True, default_timeout=TIMEOUT_V2))


async def _create(request: web.Request, message: sandboxes_pb2.CreateRequest) -> web.Response:
    message.idempotency_key = _idempotency_key(request)
    with made_once(repeatable=bool(message.idempotency_key)):
        sandbox = await request.app[CORE].create(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    try:
        return web.json_response(await sandbox_reply(request, sandbox), status=201)
    except BaseException:
        # A plugin could not describe it, so nobody will ever know of it (C12). A repeat with its key would find it.
        if not message.idempotency_key:
            await _take_back(request, sandbox.id)
        raise


async def _take_back(request: web.Request, sandbox_id: str) -> None:
    try:
        await request.app[CORE].kill(sandbox_id, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    except SandgateError:
        pass  # It ends by itself at its deadline.


def _idempotency_key(request: web.Request) -> str:
    """What makes repeats of one create the same (``rest.md`` 1.4); empty when the client did not ask for it."""
    keys = request.headers.getall("Idempotency-Key", [])
    # A header may hold any bytes, and a message only text: what is no ASCII can be no key either.
    if len(keys) > 1 or "" in keys or not all(map(str.isascii, keys)):
        raise InvalidArgument("Idempotency-Key must be one key of a-z, 0-9 and '-'")
    return next(iter(keys), "")


@routes.get("/v2/sandboxes", allow_head=False)
@key_first
async def list_v2(request: web.Request) -> web.Response:
    message = list_request(parse(request.rel_url.raw_query_string))
    answer = await _list(request, message)
    headers = {}
    if answer.next_page_token:
        headers["X-Next-Token"] = answer.next_page_token
    if not message.states or sandboxes_pb2.SANDBOX_STATE_RUNNING in message.states:
        headers["X-Total-Running"] = str(answer.total_running)
    return await _listed(request, answer, headers)


@routes.get("/sandboxes", allow_head=False)
@key_first
async def list_v1(request: web.Request) -> web.Response:
    """Running ones only, newest first, in one piece (``behaviour.md`` C22)."""
    message = sandboxes_pb2.ListRequest(
        metadata=parse_metadata(query_of(request).get("metadata", "")),
        states=[sandboxes_pb2.SANDBOX_STATE_RUNNING],
        order=sandboxes_pb2.ORDER_DESC,
        all=True,
    )
    return await _listed(request, await _list(request, message), {})


async def _list(request: web.Request, message: sandboxes_pb2.ListRequest) -> sandboxes_pb2.ListResponse:
    return await request.app[CORE].list(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])


async def _listed(request: web.Request, answer: sandboxes_pb2.ListResponse, headers: dict[str, str]) -> web.Response:
    policy = request.app[POLICY]
    items = [
        await policy.described(request, sandbox, listed_view(sandbox), ReplyKind.LISTED) for sandbox in answer.sandboxes
    ]
    return web.json_response(items, headers=headers)


async def sandbox_reply(request: web.Request, sandbox: sandboxes_pb2.Sandbox) -> Mapping[str, object]:
    """The answer of create, connect, resume and fork."""
    view = sandbox_view(sandbox, domain=request.app[SETTINGS].domain)
    return await request.app[POLICY].described(request, sandbox, view, ReplyKind.SANDBOX)


@routes.get("/sandboxes/{id}", allow_head=False)
@key_first
async def get(request: web.Request) -> web.Response:
    sandbox = await request.app[CORE].get(
        sandbox_id_in_path(request),
        api_key=api_key_of(request),
        request_id=request[REQUEST_ID],
        # For plugins alone: no client of E2B's is told.
        address=request.app[POLICY].has("sandgate_describe"),
    )
    view = detail_view(sandbox, domain=request.app[SETTINGS].domain)
    return web.json_response(await request.app[POLICY].described(request, sandbox, view, ReplyKind.DETAIL))


@routes.delete("/sandboxes/{id}")
@key_first
async def kill(request: web.Request) -> web.Response:
    await request.app[CORE].kill(
        sandbox_id_in_path(request), api_key=api_key_of(request), request_id=request[REQUEST_ID]
    )
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/timeout")
@key_first
async def set_timeout(request: web.Request) -> web.Response:
    """The end becomes now + timeout, earlier or later than before."""
    body = await read_object(request)
    return await _set_timeout(request, body.required_integer("timeout"), extend_only=False)


@routes.post("/sandboxes/{id}/refreshes")
@key_first
async def refresh(request: web.Request) -> web.Response:
    """Only ever extends (``behaviour.md`` C32)."""
    duration = (await read_object(request, required=False)).integer("duration")
    return await _set_timeout(request, TIMEOUT_V1 if duration is None else duration, extend_only=True)


async def _set_timeout(request: web.Request, seconds: int, *, extend_only: bool) -> web.Response:
    await request.app[CORE].set_timeout(
        sandbox_id_in_path(request),
        timeout=seconds,
        extend_only=extend_only,
        api_key=api_key_of(request),
        request_id=request[REQUEST_ID],
    )
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/connect")
@routes.post("/v2/sandboxes/{id}/connect")
@key_first
async def connect(request: web.Request) -> web.Response:
    """200 when it was running, 201 when it had to be resumed (``behaviour.md`` C42).

    The old route's clients always name a timeout, so both routes may share the new one's default.
    """
    body = await read_object(request, required=False)
    timeout = body.integer("timeout")
    answer = await request.app[CORE].connect(
        sandbox_id_in_path(request),
        timeout=TIMEOUT_V2 if timeout is None else timeout,
        memory=body.flag("memory"),
        api_key=api_key_of(request),
        request_id=request[REQUEST_ID],
    )
    view = await sandbox_reply(request, answer.sandbox)
    return web.json_response(view, status=201 if answer.resumed else 200)


@routes.post("/sandboxes/{id}/pause")
@key_first
async def pause(request: web.Request) -> web.Response:
    """409 when it is paused already; several at the same time join one pause (``behaviour.md`` C39)."""
    body = await read_object(request, required=False)
    message = sandboxes_pb2.PauseRequest(
        id=sandbox_id_in_path(request),
        memory=body.flag("memory"),
        require_healthy_agent=bool(body.flag("requireHealthyGuest")),
    )
    await request.app[CORE].pause(message, api_key=api_key_of(request), request_id=request[REQUEST_ID])
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/resume")
@key_first
async def resume(request: web.Request) -> web.Response:
    """The older form of connect: 409 when it runs (``behaviour.md`` C45)."""
    body = await read_object(request, required=False)
    timeout, pauses = body.integer("timeout"), body.flag("autoPause")
    sandbox = await request.app[CORE].resume(
        sandboxes_pb2.ResumeRequest(
            id=sandbox_id_in_path(request), memory=body.flag("memory"), on_timeout=_AT_END[pauses]
        ),
        timeout=TIMEOUT_V1 if timeout is None else timeout,
        api_key=api_key_of(request),
        request_id=request[REQUEST_ID],
    )
    return web.json_response(await sandbox_reply(request, sandbox), status=201)
