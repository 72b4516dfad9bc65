"""Backends as the core's numbers and traces see them: how long each operation takes, and what comes of it.

A wrapper around any backend, so that neither the core's operations nor the plugins know of it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, cast

from sandgate_core.telemetry import Telemetry
from sandgate_errors import SandgateError
from sandgate_errors.grpc import status_of
from sandgate_plugin_api import Backend
from sandgate_tracing import Tracing

__all__ = ["observed"]


def observed(backend: Backend, *, telemetry: Telemetry, tracing: Tracing | None) -> Backend:
    """The same backend; each of its asynchronous operations is measured."""
    return cast(Backend, _Observed(backend, telemetry, tracing))


class _Observed:
    def __init__(self, backend: Backend, telemetry: Telemetry, tracing: Tracing | None) -> None:
        self._backend = backend
        self._telemetry = telemetry
        self._tracing = tracing

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        # Only the contract's: their names are few, and labels of the numbers.
        if not inspect.iscoroutinefunction(getattr(Backend, name, None)):
            return attribute
        measured = self._measured(name, attribute)
        setattr(self, name, measured)
        return measured

    def _measured(self, operation: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        backend = self._backend.name

        @wraps(method)
        async def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            outcome = "INTERNAL"
            try:
                with self._span(operation):
                    answer = await method(*args, **kwargs)
                outcome = "OK"
                return answer
            except asyncio.CancelledError:
                outcome = "CANCELLED"
                raise
            except SandgateError as error:
                outcome = status_of(error).name
                raise
            finally:
                self._telemetry.backend_did(backend, operation, outcome=outcome, seconds=time.perf_counter() - began)

        return measured

    def _span(self, operation: str) -> Any:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.inside(f"backend {operation}", sandgate_backend=self._backend.name)
