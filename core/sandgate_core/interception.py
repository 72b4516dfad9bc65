"""What happens around every gRPC call of the core: who calls, what an error becomes, one line in log and audit.

The only place where errors become gRPC status. What is not of the taxonomy is our fault: it is logged under a reference
id, and the caller gets that id and no text of ours.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from sandgate_core import callers
from sandgate_core.audit import ACTIONS, Audit
from sandgate_core.callers import Callers
from sandgate_core.database import outage_of
from sandgate_core.routing import Routing
from sandgate_core.telemetry import Telemetry
from sandgate_errors import InvalidArgument, SandgateError, Unavailable
from sandgate_errors.grpc import status_of, trailers_of
from sandgate_tracing import Tracing

__all__ = ["Interceptor"]

_HEALTH = "/grpc.health.v1.Health/"
_OURS = "/sandgate_api.core.v1."
#: Characters of a message. It may quote what a caller sent, and gRPC refuses trailers above 8 KiB altogether; one
#: character may take twelve bytes there.
_LONGEST_MESSAGE = 500
_LONGEST_REQUEST_ID = 128
_LONGEST_SPAN_NAME = 64
#: Seconds until a client should ask again that met a database which cannot be asked: a server that is started again is back.
_OUTAGE = 5.0
#: Calls that wait for something to happen: how long they take says nothing.
_HELD = frozenset({f"{_OURS}EdgeService/Report", f"{_OURS}SandboxService/LocateStream"})
_log = structlog.get_logger(__name__)

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all services but health, which anybody may ask."""

    def __init__(
        self, known: Callers, audit: Audit, telemetry: Telemetry, routing: Routing, tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing
        self._routing = routing
        self._callers = known
        self._audit = audit
        self._telemetry = telemetry

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return None  # the library answers "unimplemented"
        if method.startswith(_HEALTH):
            return _asked_by_anybody(handler)
        if handler.request_streaming != handler.response_streaming:
            raise TypeError(f"{method}: only unary calls and streams both ways are served here")
        if handler.request_streaming and method.startswith(_OURS):
            return grpc.stream_stream_rpc_method_handler(
                self._around(method, handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(self._relayed(method, handler.stream_stream))
        return grpc.unary_unary_rpc_method_handler(
            # The message is read within: the library tells of one that is none in words of its own, and in the log.
            self._around(method, self._routed(method, handler.unary_unary), read=handler.request_deserializer),
            None,
            # What another core answered is bytes already.
            lambda answer: answer if isinstance(answer, bytes) else handler.response_serializer(answer),
        )

    def _routed(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        """By this core or, where the sandbox is another one's, by that."""

        async def routed(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            answer = await self._routing.answer(
                method,
                request,
                callers.current(),
                request_id=str(structlog.contextvars.get_contextvars()["request_id"]),
                timeout=context.time_remaining(),
            )
            return await behaviour(request, context) if answer is None else answer

        return routed

    def _relayed(self, method: str, behaviour: _Behaviour) -> Any:
        guarded = self._around(method, behaviour, relayed=True)

        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._telemetry.relaying():
                return await guarded(request, context)

        return counted

    def _around(
        self, method: str, behaviour: _Behaviour, *, read: Callable[[bytes], Any] | None = None, relayed: bool = False
    ) -> Any:
        async def guarded(given: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            request_id = _request_id(metadata)
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                began = time.perf_counter()
                outcome = "CANCELLED"
                caller = request = answer = None
                try:
                    caller = self._callers.identify(metadata, relayed=relayed)
                    callers.enter(caller)
                    request = given if read is None else _message(read, given)
                    answer = await behaviour(request, context)
                    outcome = "OK"
                    return answer
                except asyncio.CancelledError:
                    raise
                except grpc.aio.AbortError:
                    outcome = "passed on"
                    raise
                except SandgateError as error:
                    outcome = status_of(error).name
                    await _refuse(context, error)
                except Exception as error:
                    if (reason := outage_of(error)) is not None:
                        outcome = grpc.StatusCode.UNAVAILABLE.name
                        _log.error("the database cannot be asked", method=method, reason=reason)
                        await _refuse(context, _outage())
                    outcome = "INTERNAL"
                    await _fail(context, method)
                finally:
                    # What another core passes on is noted there; what cannot be read asks for nothing.
                    if caller is not None and request is not None and not caller.forwarded and method in ACTIONS:
                        self._audit.note(
                            method, caller, request=request, answer=answer, outcome=outcome, request_id=request_id
                        )
                    seconds = time.perf_counter() - began
                    if method not in _HELD:
                        self._telemetry.call_ended(method, relayed=relayed, outcome=outcome, seconds=seconds)
                    _log.debug("call", method=method, outcome=outcome, ms=round(1000 * seconds, 2))

        if self._tracing is None or method in _HELD:
            return guarded
        return _traced(method, guarded, self._tracing)


def _traced(method: str, behaviour: _Behaviour, tracing: Tracing) -> Any:
    """Below the caller's span, if it sent one."""
    # The relay takes any name.
    name = method.rpartition("/")[2][:_LONGEST_SPAN_NAME]

    async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        carried = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with tracing.incoming(name, carried, rpc_system="grpc"):
            return await behaviour(request, context)

    return traced


def _message(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        raise InvalidArgument("the request is not a message of this method") from None


def _asked_by_anybody(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Health. Bytes that are no question ask for a service that is not there, or strangers could fill the log."""
    read = handler.request_deserializer

    def question(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return health_pb2.HealthCheckRequest(service="?")

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(handler.unary_stream, question, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(handler.unary_unary, question, handler.response_serializer)


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: SandgateError) -> NoReturn:
    await context.abort(status_of(error), _bounded(error.message), trailers_of(error))


def _outage() -> Unavailable:
    """Whether to ask again is not said: a write may have come through whose answer was lost."""
    return Unavailable("the gateway's database does not answer", retry_after=_OUTAGE)


async def _fail(context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
    reference = secrets.token_hex(6)
    _log.exception("internal error", reference=reference, method=method)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error, reference {reference}")


def _bounded(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"


def _request_id(metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    given = next((str(value) for key, value in metadata if key == "request-id"), "")
    return given[:_LONGEST_REQUEST_ID] or secrets.token_hex(8)
