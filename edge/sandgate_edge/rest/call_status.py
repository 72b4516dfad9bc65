"""The status with which an agent really ended a call that we were still writing to.

grpc.aio races here: when a write fails because the other side has just ended the call, the library puts a status of its
own ("Internal error from Core") in place of the one that was received, or is about to be. A full disk would so be told
as a fault of the gateway (``behaviour.md`` D29). Both orders happen: the real status came first and is noted when it
does, or it comes a moment later and is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

__all__ = ["CallStatus"]

T = TypeVar("T")

_LIBRARYS_OWN = "Internal error from Core"
# The status follows the failed write within a few turns of the event loop; after a second it will not come.
_TURN_SECONDS = 0.005
_TURNS = 200


class CallStatus:
    """To be made together with the call."""

    def __init__(self, call: grpc.aio.StreamUnaryCall[Any, Any]) -> None:
        self._call = call
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    async def behind(self, raised: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """``raised``, or the agent's own status when the library has put itself in its place."""
        if not _is_librarys(raised):
            return raised
        if self._first is not None and not _is_librarys(self._first):
            return self._first
        for _ in range(_TURNS):
            await asyncio.sleep(_TURN_SECONDS)
            code, details = await self._call.code(), await self._call.details()
            found = _error(code, details, await self._call.trailing_metadata())
            if not _is_librarys(found):
                return found
        return raised

    def _note(self, _call: object) -> None:
        # The call is over, so nothing is waited for; a task would only see what has been put in place by then.
        code, details = _at_once(self._call.code()), _at_once(self._call.details())
        if code is not None:
            self._first = _error(code, details, _at_once(self._call.trailing_metadata()))


def _is_librarys(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _LIBRARYS_OWN


def _error(code: grpc.StatusCode, details: str | None, trailing: grpc.aio.Metadata | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details=details)


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine that need not wait; None when it would have to."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    return None
