"""Client streams: messages in for as long as the client likes, one reply at the end (behaviour A20, envd.md 10.3).

Half duplex: nothing is answered while the client sends, unless the agent ends the call: an unknown process or a time
limit must be told at once, not when the client happens to be done.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from aiohttp import web
from google.protobuf.message import Message

from sandgate_edge import routing
from sandgate_edge.connect.codec import Codec
from sandgate_edge.connect.deadline import keepalive_seconds, passed_on
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, POLICY, REQUEST_ID
from sandgate_edge.rpc.acting_user import acting_user
from sandgate_edge.rpc.body import envelopes
from sandgate_edge.rpc.messages import decoded
from sandgate_edge.rpc.service import Method, codec_of
from sandgate_edge.rpc.stream_answer import StreamAnswer

__all__ = ["client_stream"]


async def client_stream(request: web.Request, method: Method) -> web.StreamResponse:
    codec = codec_of(request, method)
    located = await routing.admit(request)
    answer = StreamAnswer(request, codec)
    async with answer.ending(located):
        call = _begin(request, method, located=located)
        try:
            reply = await _exchange(call, _Sender(request, method, codec=codec))
        finally:
            call.cancel()
        await answer.send(await request.app[POLICY].answer(request, reply))
    return answer.response


def _begin(request: web.Request, method: Method, *, located: Located) -> Any:
    user = acting_user(request)
    agents = request.app[AGENTS]
    metadata = agents.metadata(
        located,
        request_id=request[REQUEST_ID],
        acting_user=user,
        timeout_ms=passed_on(request.headers.get("Connect-Timeout-Ms")),
        keepalive=keepalive_seconds(request.headers.get("Keepalive-Ping-Interval")),
    )
    return method.begin(agents, located)(metadata=metadata)


class _Sender:
    """Passes the client's messages on, each when it is there."""

    def __init__(self, request: web.Request, method: Method, *, codec: Codec) -> None:
        self._request = request
        self._method = method
        self._codec = codec
        self._policy = request.app[POLICY]

    async def send(self, call: Any) -> None:
        """Raises the client's mistakes. That the call ended meanwhile is none: its reply says why."""
        async for payload in envelopes(self._request):
            message = await decoded(self._codec, self._method.request, payload)
            message = await self._policy.message(self._request, message)
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return
        try:
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def _exchange(call: Any, sender: _Sender) -> Message:
    """The reply, or the first failure: of the client's messages or of the call."""
    sending = asyncio.create_task(sender.send(call))
    replying = asyncio.create_task(_reply_of(call))
    try:
        await asyncio.wait({sending, replying}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
        return await replying
    finally:
        # Both are owned here and end here; what they would still raise was told above or no longer counts.
        sending.cancel()
        replying.cancel()
        await asyncio.gather(sending, replying, return_exceptions=True)


async def _reply_of(call: Any) -> Message:
    reply: Message = await call
    return reply
