"""The way to the other cores of one database: calls that are theirs to answer, passed on as they came.

A call goes on with the deadline, request id and cancellation of its caller and comes back as bytes, or as the error that
the other core raised. The credential of the first caller stays here; what goes on is who it was found to be. A call waits for
as long as the other core lives: one that stands still, or whose host says nothing any more, is given up with its lease.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import structlog

from sandgate_api.core.v1 import peers_pb2, peers_pb2_grpc, sandboxes_pb2
from sandgate_core.agents import CHANNEL_OPTIONS
from sandgate_core.callers import PEER_INTERNAL, PEER_TEAM, PEER_TOKEN, Caller
from sandgate_core.roster import Peer, Roster
from sandgate_errors import SandgateError, Unavailable
from sandgate_errors.grpc import from_status

__all__ = ["Peers"]

#: Seconds that a change of keys or teams waits for another core that lives and does not answer.
_REFRESH_PATIENCE = 3.0
#: Seconds after which a call that has no answer yet looks whether the other core lives.
_LOOK = 2.0
#: Seconds until a caller should try again: a core that is started again is back by then.
_RETRY_AFTER = 2.0
_OPTIONS = [
    *CHANNEL_OPTIONS,
    # A host that lost its power says nothing: its connection looks well until it is asked.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_LOCATE = "/sandgate_api.core.v1.SandboxService/Locate"
_log = structlog.get_logger(__name__)


class Peers:
    """Channels to other cores, by address, and the calls on them."""

    def __init__(self, roster: Roster, *, token: str) -> None:
        self._roster = roster
        self._token = token
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    async def forward(
        self, peer: Peer, method: str, request: bytes, *, caller: Caller, request_id: str, timeout: float | None
    ) -> bytes:
        """What ``peer`` answers to a call that is its. Raises what it raises, Unavailable when it cannot be reached."""
        begin: Any = self._channel(peer).unary_unary(method)
        call = begin(request, timeout=timeout, metadata=self._metadata(caller, request_id))
        answering = asyncio.ensure_future(_answer_of(call))
        try:
            while not (await asyncio.wait({answering}, timeout=_LOOK))[0]:
                if not await self._roster.lives(peer.id):
                    raise Unavailable(
                        f"core {peer.id} on {peer.host}, whose sandbox this is, is away", retry_after=_RETRY_AFTER
                    )
            return answering.result()
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, peer) from error
        finally:
            # Over before this is, and looked at, whatever this ends with.
            answering.cancel()
            await asyncio.wait({answering})
            _ = answering.cancelled() or answering.exception()

    async def locate(
        self, peer: Peer, request: sandboxes_pb2.LocateRequest, caller: Caller, *, request_id: str
    ) -> sandboxes_pb2.LocateResponse:
        """Where the relay takes a call of ``caller``, who may not ask this himself."""
        gateway = replace(caller, internal=True)
        answer = await self.forward(
            peer, _LOCATE, request.SerializeToString(), caller=gateway, request_id=request_id, timeout=None
        )
        return sandboxes_pb2.LocateResponse.FromString(answer)

    async def refresh(self) -> None:
        """Every other core that lives goes by the store's keys and teams when this returns, or was not to be reached."""
        peers = [peer for peer in await self._roster.others() if peer.alive and peer.address]
        await asyncio.gather(*(self._refresh(peer) for peer in peers))

    async def _refresh(self, peer: Peer) -> None:
        stub: Any = peers_pb2_grpc.PeerServiceStub(self._channel(peer))
        try:
            await stub.Refresh(
                peers_pb2.RefreshRequest(), timeout=_REFRESH_PATIENCE, metadata=((PEER_TOKEN, self._token),)
            )
        except grpc.aio.AioRpcError as error:
            _log.warning(
                "a core could not be told of a change: it will see it when it renews its lease",
                core=peer.id,
                address=peer.address,
                code=error.code().name,
            )

    def _channel(self, peer: Peer) -> grpc.aio.Channel:
        if not peer.address:
            raise Unavailable(
                f"core {peer.id} on {peer.host}, whose sandbox this is, is starting",
                retry_after=_RETRY_AFTER,
                should_retry=True,
            )
        channel = self._channels.get(peer.address)
        if channel is None:
            channel = self._channels[peer.address] = grpc.aio.insecure_channel(peer.address, options=_OPTIONS)
        return channel

    def _metadata(self, caller: Caller, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
        metadata: list[tuple[str, str | bytes]] = [(PEER_TOKEN, self._token), ("request-id", request_id)]
        if caller.owner is not None:
            metadata.append((PEER_TEAM, caller.owner.encode()))
        if caller.internal:
            metadata.append((PEER_INTERNAL, "true"))
        return tuple(metadata)


async def _answer_of(call: Any) -> bytes:
    # Cancelled, this cancels the call.
    answer: bytes = await call
    return answer


def _error_of(error: grpc.aio.AioRpcError, peer: Peer) -> SandgateError:
    trailers = error.trailing_metadata()
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and all(key != "error-reason" for key, _ in trailers or ()):
        # gRPC's own text names addresses.
        _log.warning("another core cannot be reached", core=peer.id, address=peer.address, details=error.details())
        # Whether to ask again is not said: the call may have been heard.
        return Unavailable(
            f"core {peer.id} on {peer.host}, whose sandbox this is, does not answer", retry_after=_RETRY_AFTER
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        _log.error("another core does not take this one's calls: its seed is another", core=peer.id)
    return from_status(code, error.details() or "", trailers)
