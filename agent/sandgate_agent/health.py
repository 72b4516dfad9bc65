"""``grpc.health.v1.Health``, the standard question whether a server takes calls; open to callers without a token.

Its two messages have one field each. They are written here byte by byte: the package that has them would be the only
other dependency of the agent's bundle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sandgate_api.envd.v1.filesystem_pb2 import StatRequest

__all__ = ["Health"]

#: Field 1 (an enum): 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN.
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVICE_UNKNOWN = b"\x08\x03"


class Health:
    """Serving until told to stop."""

    def __init__(self, services: frozenset[str]) -> None:
        # The empty name means the server as a whole.
        self._services = services | {""}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, request_deserializer=_service),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request_deserializer=_service),
            },
        )

    async def _check(self, service: str | None, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        if service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._state()

    async def _watch(self, service: str | None, _context: object) -> AsyncIterator[bytes]:
        if service not in self._services:
            yield _SERVICE_UNKNOWN
            await asyncio.Future()
        yield self._state()
        await self._stopping.wait()
        yield self._state()

    def _state(self) -> bytes:
        return _NOT_SERVING if self._stopping.is_set() else _SERVING


def _service(request: bytes) -> str | None:
    """The name in a HealthCheckRequest, which is a string in field 1 as StatRequest is; None for what is none.

    Raising would have the library write a traceback for whoever comes along.
    """
    try:
        return StatRequest.FromString(request).path
    except DecodeError:
        return None
