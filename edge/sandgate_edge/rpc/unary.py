"""Unary calls: a message in, a message or an error with its own HTTP status out (behaviour W1, W6, T7)."""

from __future__ import annotations

import grpc.aio
from aiohttp import web
from google.protobuf.message import Message

from sandgate_edge import routing
from sandgate_edge.connect.codec import Codec
from sandgate_edge.connect.deadline import timeout_ms
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, PLACE, POLICY, REQUEST_ID, SETTINGS
from sandgate_edge.responses import connect_error
from sandgate_edge.rpc.acting_user import acting_user
from sandgate_edge.rpc.body import whole_body
from sandgate_edge.rpc.messages import decoded, encoded
from sandgate_edge.rpc.service import Method, codec_of
from sandgate_errors import SandgateError

__all__ = ["unary"]

# What the kernel takes at once, more or less.
_SENT_BY_THE_SERVER = 256 * 1024


async def unary(request: web.Request, method: Method) -> web.StreamResponse:
    """What is refused before the agent is reached leaves as an exception: it is answered as plain HTTP (W7)."""
    codec = codec_of(request, method)
    located = await routing.admit(request)
    try:
        reply = await _reply(request, method, codec=codec, located=located)
        body = await encoded(codec, reply)
        request[PLACE].hold(len(body))
    except (routing.SandboxGone, routing.PortClosed):
        raise
    except SandgateError as error:
        return connect_error(await request.app[POLICY].error(request, error))
    response = web.Response(body=body, headers={"Content-Type": codec.unary_type})
    if len(body) > _SENT_BY_THE_SERVER:
        # Here, and not once all is said and done: the client may be slow to take it, and it has its place until then.
        await response.prepare(request)
        await response.write_eof()
        await request.writer.drain()
    return response


async def _reply(request: web.Request, method: Method, *, codec: Codec, located: Located) -> Message:
    user = acting_user(request)
    limit = timeout_ms(request.headers.get("Connect-Timeout-Ms"))
    message = await decoded(codec, method.request, await whole_body(request))
    message = await request.app[POLICY].message(request, message)
    if method.check_request is not None:
        method.check_request(request.app[SETTINGS], message)
    agents = request.app[AGENTS]
    metadata = agents.metadata(located, request_id=request[REQUEST_ID], acting_user=user)
    call = method.begin(agents, located)
    try:
        async with routing.answering(request, located, within=routing.REPLY_SECONDS if limit is None else None):
            reply: Message = await call(message, metadata=metadata, timeout=None if limit is None else limit / 1000)
    except grpc.aio.AioRpcError as error:
        raise await routing.lost(request, located, error) from error
    if method.check_reply is not None:
        method.check_reply(request.app[SETTINGS], reply)
    return await request.app[POLICY].answer(request, reply)
