"""Which requests are for a port of a sandbox, and who may make them (behaviour.md R1, R2, R5, R10, R13, R15)."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
from aiohttp import web

from sandgate_edge import draining, routing
from sandgate_edge.ambiguity import fault_of
from sandgate_edge.core_client import Located
from sandgate_edge.keys import ANSWER_BEGAN, CORE, POLICY, PORT, REQUEST_ID, SETTINGS
from sandgate_edge.ports.exchange import Exchange, NoAnswer, Passed
from sandgate_edge.ports.heads import TRAFFIC_TOKEN, request_head
from sandgate_edge.ports.pages import refusal
from sandgate_edge.ports.tunnel import open_tunnel
from sandgate_edge.responses import internal
from sandgate_errors import InvalidArgument, PermissionDenied, SandboxNotFound, SandgateError

__all__ = ["forward", "to_port"]


@web.middleware
async def forward(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Takes what is for a port out before anything of the gateway's own looks at it: routes, preflights, headers."""
    try:
        named = routing.sandbox_id_of(request)
    except InvalidArgument:
        # Found and answered again where such errors are.
        return await handler(request)
    if named is None or named[1] == routing.AGENT_PORT or request.app[POLICY].may_mean_the_agent(request):
        return await handler(request)
    return await to_port(request, *named)


async def to_port(request: web.Request, sandbox_id: str, port: int) -> web.StreamResponse:
    """The answer of a server in a sandbox, or why there is none."""
    request[PORT] = port
    if (fault := fault_of(request)) is not None:
        response = refusal(request, fault, sandbox_id=sandbox_id, port=port)
        response.force_close()
        return response
    try:
        draining.check(request)
        return await _forward(request, sandbox_id, port)
    except ConnectionError:
        raise
    except SandgateError as error:
        failure = error
    except web.RequestPayloadError:
        failure = InvalidArgument("the request body is broken")
    except Exception as error:
        failure = internal(error, request_id=request[REQUEST_ID])
    if ANSWER_BEGAN in request:
        # Ending it in order would pass a part off as the whole.
        routing.cut(request)
    response = refusal(request, failure, sandbox_id=sandbox_id, port=port)
    if not request.content.is_eof():
        response.force_close()
    return response


async def _forward(request: web.Request, sandbox_id: str, port: int) -> Passed:
    access = functools.partial(_check_traffic_token, request)
    located = await routing.locate_by_id(request, sandbox_id, access=access)
    mask = located.sandbox.network.mask_request_host
    head = request_head(request, port=port, mask=mask, trusted=request.app[SETTINGS].trusted_proxies)
    async with open_tunnel(request, located, port) as tunnel:
        exchange = Exchange(request, tunnel, confirm_end=functools.partial(_confirm, request, located))
        try:
            return await exchange.run(head)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DATA_LOSS:
                # The server broke the connection off. If its sandbox ended with it, that is the answer.
                await _confirm(request, located)
                raise NoAnswer from error
            raise await routing.lost(request, located, error) from error


def _check_traffic_token(request: web.Request, located: Located) -> None:
    """Raises PermissionDenied where public traffic is off and the request does not bring the token (R10)."""
    expected = located.sandbox.traffic_access_token
    if not expected:
        return
    given = request.headers.get(TRAFFIC_TOKEN)
    if given is None:
        raise PermissionDenied(
            f"Sandbox is secured with traffic access token. Token header '{TRAFFIC_TOKEN}' is missing"
        )
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode()):
        raise PermissionDenied(f"Provided token in header '{TRAFFIC_TOKEN}' is invalid")


async def _confirm(request: web.Request, located: Located) -> None:
    """Raises SandboxGone when the sandbox is: its processes end before its agent does, and look as if they had finished."""
    try:
        await request.app[CORE].locate(located.sandbox.id, request_id=request[REQUEST_ID])
    except SandboxNotFound as error:
        raise routing.SandboxGone(located.sandbox.id) from error
