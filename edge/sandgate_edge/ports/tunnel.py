"""One byte tunnel to a port of a sandbox: the caller's side of ``Agent.Dial`` (``sandgate_api/agent/v1/agent.proto``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
import grpc.aio
from aiohttp import web

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge import routing
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, REQUEST_ID

__all__ = ["Tunnel", "open_tunnel"]

_Call: TypeAlias = grpc.aio.StreamStreamCall[agent_pb2.DialRequest, agent_pb2.DialResponse]


class Tunnel:
    """Bytes both ways. One task may read while another writes. Raises ``grpc.aio.AioRpcError`` when it breaks."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._ended = False

    async def read(self) -> bytes:
        """The next bytes; none once the other side has ended."""
        while not self._ended:
            message = await self._call.read()
            if not isinstance(message, agent_pb2.DialResponse) or message.HasField("end"):
                self._ended = True
            elif message.data:
                return message.data
        return b""

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(agent_pb2.DialRequest(data=data))
        except asyncio.InvalidStateError:
            pass  # the call is over, in whatever way: reading tells

    async def end(self) -> None:
        """The other side sees the end of ours; it may go on sending."""
        try:
            await self._call.done_writing()
        except asyncio.InvalidStateError:
            pass


@asynccontextmanager
async def open_tunnel(request: web.Request, located: Located, port: int) -> AsyncIterator[Tunnel]:
    """A tunnel that is closed at the end, and with it the connection in the sandbox.

    Raises PortClosed when nothing listens there (R5), ResourceExhausted (R16), SandboxGone.
    """
    agents = request.app[AGENTS]
    call = agents.agent(located).Dial(metadata=agents.metadata(located, request_id=request[REQUEST_ID]))
    try:
        try:
            async with routing.answering(request, located, within=routing.FIRST_MESSAGE_SECONDS):
                await call.write(agent_pb2.DialRequest(open=agent_pb2.DialRequest.Open(port=port)))
                # When it was refused, this raises the reason.
                await call.read()
        except grpc.aio.AioRpcError as error:
            raise await routing.lost(request, located, error) from error
        yield Tunnel(call)
    finally:
        call.cancel()
