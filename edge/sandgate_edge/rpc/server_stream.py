"""Server streams: one message in, then every message of the agent as one frame, as it comes (behaviour W2, W10, T8).

A client that goes away cancels this handler and with it the call to the agent; what the call had started runs on.
"""

from __future__ import annotations

import grpc.aio
from aiohttp import web
from google.protobuf.message import Message

from sandgate_api.envd.v1 import process_pb2
from sandgate_edge import following, routing
from sandgate_edge.connect.codec import Codec
from sandgate_edge.connect.deadline import keepalive_seconds, passed_on
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, PLACE, POLICY, REQUEST_ID
from sandgate_edge.rpc.acting_user import acting_user
from sandgate_edge.rpc.body import only_envelope
from sandgate_edge.rpc.messages import decoded
from sandgate_edge.rpc.service import Method, codec_of
from sandgate_edge.rpc.stream_answer import StreamAnswer

__all__ = ["server_stream"]

_FOLLOWED = (process_pb2.StartResponse, process_pb2.ConnectResponse)


async def server_stream(request: web.Request, method: Method) -> web.StreamResponse:
    codec = codec_of(request, method)
    located = await routing.admit(request)
    answer, policy = StreamAnswer(request, codec), request.app[POLICY]
    async with answer.ending(located), following.command(request, located) as note:
        call = await _begin(request, method, codec=codec, located=located)
        try:
            async with routing.answering(request, located, within=routing.FIRST_MESSAGE_SECONDS):
                message = await call.read()
            while isinstance(message, Message):
                note(message)
                if _is_last(message):
                    answer.hold(await policy.answer(request, message))
                    await request.app[AGENTS].last_word(call)
                    break
                await answer.send(await policy.answer(request, message))
                message = await call.read()
        finally:
            call.cancel()
    return answer.response


def _is_last(message: Message) -> bool:
    """Nothing but success follows the end of a process (O7): one hop and two packets less for every command."""
    return isinstance(message, _FOLLOWED) and message.event.HasField("end")


async def _begin(
    request: web.Request, method: Method, *, codec: Codec, located: Located
) -> grpc.aio.UnaryStreamCall[Message, Message]:
    user = acting_user(request)
    message = await decoded(codec, method.request, await only_envelope(request))
    message = await request.app[POLICY].message(request, message)
    agents = request.app[AGENTS]
    metadata = agents.metadata(
        located,
        request_id=request[REQUEST_ID],
        acting_user=user,
        timeout_ms=passed_on(
            request.headers.get("Connect-Timeout-Ms"), user_agent=request.headers.get("User-Agent", "")
        ),
        keepalive=keepalive_seconds(request.headers.get("Keepalive-Ping-Interval")),
    )
    call: grpc.aio.UnaryStreamCall[Message, Message] = method.begin(agents, located)(message, metadata=metadata)
    # The stream may last for hours, and its request is gone in a moment.
    request[PLACE].hold(0)
    return call
