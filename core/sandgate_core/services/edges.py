"""``EdgeService``: the edges' numbers, for :mod:`sandgate_core.edges`."""

from __future__ import annotations

from typing import Any

from sandgate_api.core.v1 import edges_pb2, edges_pb2_grpc
from sandgate_core.callers import current
from sandgate_core.edges import Edges

__all__ = ["EdgeService"]


class EdgeService(edges_pb2_grpc.EdgeServiceServicer):
    """protobuf <-> :class:`sandgate_core.edges.Edges`."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def Report(self, request: edges_pb2.ReportRequest, context: Any) -> edges_pb2.ReportResponse:  # noqa: N802
        current().must_be_internal()
        await self._edges.report(request)
        return edges_pb2.ReportResponse()
