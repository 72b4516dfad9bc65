"""``PeerService``: what the other cores of the database tell this one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sandgate_api.core.v1 import peers_pb2, peers_pb2_grpc
from sandgate_core.callers import current

__all__ = ["PeerService"]


class PeerService(peers_pb2_grpc.PeerServiceServicer):
    """``refresh`` reads what may have changed elsewhere."""

    def __init__(self, refresh: Callable[[], Awaitable[None]]) -> None:
        self._refresh = refresh

    async def Refresh(self, request: peers_pb2.RefreshRequest, context: Any) -> peers_pb2.RefreshResponse:  # noqa: N802
        current().must_be_core()
        await self._refresh()
        return peers_pb2.RefreshResponse()
