"""The relay: the agents' services on the core's address, for callers that cannot reach an agent themselves.

A call that names a sandbox in ``sandbox-id`` goes to that sandbox's agent as bytes: nothing is decoded, so a method that
a newer agent offers needs no change here, and one that it does not is refused by the agent itself. Deadline,
cancellation, status, message, initial and trailing metadata pass; credentials of the gateway do not, and the agent's
token is put in. One message at a time is held each way: a slow reader slows the writer.

Where the sandbox is another core's, the call goes to that core's relay, which takes it to the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.agents import AGENT_TOKEN, Agents
from sandgate_core.callers import CREDENTIALS, RELAY_TOKEN, SANDBOX_ID, current
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.sandboxes import Sandboxes
from sandgate_errors import InvalidArgument, PermissionDenied, SandboxNotFound, SandboxUnreachable
from sandgate_plugin_api import Activity, AgentAddress
from sandgate_tracing import AGENT_SPAN, TRACE_CONTEXT, Metadata, Tracing

__all__ = ["Relay"]

_ENVD_SERVICES = "/sandgate_api.envd.v1."
_AGENT_SERVICE = "/sandgate_api.agent.v1.Agent/"
#: The core's own call: a caller could give the sandbox another identity with it.
_INIT = _AGENT_SERVICE + "Init"
_OURS = CREDENTIALS | {SANDBOX_ID, AGENT_TOKEN}
#: What belongs to one connection and is set anew by the library on the next.
_HOP = ("grpc-", "user-agent", "content-type", "te", ":")

_Metadata = Metadata


class Relay(grpc.GenericRpcHandler):
    """Serves every method of the agents' services."""

    def __init__(self, sandboxes: Sandboxes, agents: Agents, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._sandboxes = sandboxes
        self._agents = agents

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = str(handler_call_details.method)
        if not method.startswith((_ENVD_SERVICES, _AGENT_SERVICE)):
            return None

        async def behaviour(_: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            await self._call(method, context)

        relay: Any = behaviour  # the stubs know handlers of the synchronous server only
        return grpc.stream_stream_rpc_method_handler(relay)

    async def _call(self, method: str, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        metadata = _pairs(context.invocation_metadata())
        sandbox_id = _sandbox_of(metadata)
        if method == _INIT:
            raise PermissionDenied("Init is the gateway's own call")
        elsewhere = await self._elsewhere(sandbox_id, request_id=_request_id_of(metadata))
        if elsewhere is not None:
            await self._pass_on(elsewhere, method, context, metadata)
            return
        # Whoever came this far has proved a key or the gateway's own token, so traffic may wake the sandbox (R15).
        record, address = await self._sandboxes.locating.locate(sandbox_id, current(), wake=True)
        if address is None:
            raise SandboxNotFound.of(record.id)
        if (activity := _activity_of(method)) is not None:
            self._sandboxes.note_activity(record.id, activity)
        async with self._agents.channel(address.target) as channel:
            call = self._begin(channel, method, context, metadata=_onward(metadata, address))
            try:
                await _pass(call, context)
                code, details = await call.code(), await call.details()
                trailing = self._trailing(await call.trailing_metadata())
            finally:
                # The caller went away, or one direction failed: the agent must not go on for nobody.
                call.cancel()
            lost = code is grpc.StatusCode.UNAVAILABLE and channel.get_state() is not grpc.ChannelConnectivity.READY
        if lost:
            await self._lost(record.id)
        if code is grpc.StatusCode.UNAVAILABLE:
            # In the agent's own words: it was told to end. Where its sandbox ends with it, that is the answer.
            await self._sandboxes.locating.locate(record.id, current())
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailing)
        context.set_trailing_metadata(trailing)

    async def _elsewhere(self, sandbox_id: str, *, request_id: str) -> sandboxes_pb2.LocateResponse | None:
        """The relay of the core whose sandbox it is; None: this one's."""
        routing = self._sandboxes.routing
        routing.check()
        name = parse_sandbox_id(sandbox_id)
        found = await routing.elsewhere(name, current())
        if found is None:
            return None
        peers, peer = found
        request = sandboxes_pb2.LocateRequest(id=name, wake=True)
        return await peers.locate(peer, request, current(), request_id=request_id)

    async def _pass_on(
        self, where: sandboxes_pb2.LocateResponse, method: str, context: Any, metadata: _Metadata
    ) -> None:
        proof = ((SANDBOX_ID, where.sandbox.id), (RELAY_TOKEN, where.agent.token))
        async with self._agents.channel(where.agent.target) as channel:
            call = self._begin(channel, method, context, metadata=(*_passed(metadata), *proof))
            try:
                await _pass(call, context)
                code, details = await call.code(), await call.details()
                trailing = self._trailing(await call.trailing_metadata())
            finally:
                call.cancel()
        broken = channel.get_state() is not grpc.ChannelConnectivity.READY
        if code is grpc.StatusCode.UNAVAILABLE and broken and all(key != "error-reason" for key, _ in trailing):
            raise SandboxUnreachable("the core whose sandbox this is does not answer", retry_after=1)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailing)
        context.set_trailing_metadata(trailing)

    def _begin(self, channel: grpc.aio.Channel, method: str, context: Any, *, metadata: _Metadata) -> Any:
        begin: Any = channel.stream_stream(method)
        if self._tracing is None:
            return begin(timeout=_remaining(context), metadata=metadata)
        outgoing = self._tracing.outgoing(f"agent {method.rpartition('/')[2][:64]}")
        kept = tuple(pair for pair in metadata if pair[0] not in TRACE_CONTEXT)
        call = begin(timeout=_remaining(context), metadata=(*kept, *outgoing.metadata))
        outgoing.follow(call)
        return call

    def _trailing(self, metadata: Iterable[Any] | None) -> _Metadata:
        """What the caller gets; the agent's span is made here where there are traces, and once."""
        pairs = _pairs(metadata)
        return pairs if self._tracing is None else tuple(pair for pair in pairs if pair[0] != AGENT_SPAN)

    async def _lost(self, sandbox_id: str) -> None:
        """The agent could not be reached: say whether the sandbox is gone, without the transport's text."""
        await self._sandboxes.locating.locate(sandbox_id, current(), agent_lost=True)
        raise SandboxUnreachable("the sandbox is there, but its agent does not answer")


async def _pass(call: Any, context: Any) -> None:
    """Both directions, until the agent has ended its side; the caller's side may stay open longer."""
    sending = asyncio.create_task(_send(call, context))
    try:
        await _receive(call, context)
    finally:
        sending.cancel()
        await asyncio.wait({sending})
    # The agent's status tells why it ended; a fault of our own on the way there must not be lost.
    if not sending.cancelled() and (fault := sending.exception()) is not None:
        raise fault


async def _send(call: Any, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the agent has ended the call: its status says why
    try:
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


async def _receive(call: Any, context: Any) -> None:
    try:
        initial = _pairs(await call.initial_metadata())
        if initial:
            await context.send_initial_metadata(initial)
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)
    except grpc.aio.AioRpcError:
        return  # its code, text and trailing metadata are read from the call


def _sandbox_of(metadata: _Metadata) -> str:
    named = [str(value) for key, value in metadata if key == SANDBOX_ID]
    if len(named) != 1:
        raise InvalidArgument("name one sandbox in the metadata sandbox-id")
    return named[0]


def _activity_of(method: str) -> Activity | None:
    """What a call does in a sandbox; None: it only asks how it is."""
    service, _, name = method.rpartition("/")
    if service.endswith(".Process"):
        return Activity.COMMAND
    return Activity.FILE if service.endswith(".Filesystem") or name in {"ReadFile", "WriteFile"} else None


def _onward(metadata: _Metadata, address: AgentAddress) -> _Metadata:
    return (*_passed(metadata), (AGENT_TOKEN, address.token))


def _passed(metadata: _Metadata) -> _Metadata:
    return tuple((key, value) for key, value in metadata if key not in _OURS and not key.startswith(_HOP))


def _request_id_of(metadata: _Metadata) -> str:
    return next((str(value) for key, value in metadata if key == "request-id"), "")


def _pairs(metadata: Iterable[Any] | None) -> _Metadata:
    return tuple((key, value) for key, value in metadata or ())


def _remaining(context: grpc.aio.ServicerContext[bytes, bytes]) -> float | None:
    remaining: float | None = context.time_remaining()
    return remaining
