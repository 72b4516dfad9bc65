"""One gRPC call as the services see it: who acts, for how long, how to answer; and the border where errors become status.

Services raise errors of the taxonomy and know neither grpc nor status numbers. Handlers write to their stream with
:meth:`Call.send` instead of yielding: a cancelled coroutine is cleaned up at once, a dropped generator whenever the loop
gets to it.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from sandgate_errors import Canceled, InvalidArgument, SandgateError, Unauthenticated
from sandgate_errors.grpc import status_of, trailers_of

__all__ = ["BothStreams", "Call", "ClientStream", "Method", "ServerStream", "Unary", "generic_handler"]

log = logging.getLogger(__name__)

_DEFAULT_KEEPALIVE = 90.0
_MOST_TIMEOUT_DIGITS = 10
#: W3C Trace Context of a caller whose trace is recorded.
_RECORDED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]", re.ASCII)
#: Status texts travel as a header, and peers refuse headers above 8 KiB; one character may take 12 bytes there.
_LONGEST_MESSAGE = 500


class Call:
    """What a call brings besides its request."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], requests: AsyncIterator[Any] | None = None) -> None:
        self._context = context
        self._metadata = dict(context.invocation_metadata() or ())
        self._began = time.time_ns() if _RECORDED.fullmatch(self._text("traceparent")) else None
        self._requests = requests

    @property
    def acting_user(self) -> str | None:
        """The name that the caller acts under; None: the default user."""
        name = self._metadata.get("acting-user-bin")
        if not name:
            return None
        try:
            return name.decode() if isinstance(name, bytes) else name
        except UnicodeDecodeError:
            raise Unauthenticated("the user's name is not UTF-8") from None

    def limit(self) -> float | None:
        """``timeout-ms`` in seconds; None for none. Raises InvalidArgument when it is not a number (T4)."""
        text = self._text("timeout-ms") or "0"
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_TIMEOUT_DIGITS):
            raise InvalidArgument("the timeout is not a number of milliseconds of at most 10 digits")
        return int(text) / 1000 or None

    def keepalive(self) -> float:
        """Seconds between signs of life; absent or unreadable: 90 (O14)."""
        text = self._text("keepalive-interval")
        readable = text.isascii() and text.isdigit() and len(text) <= _MOST_TIMEOUT_DIGITS
        return float(int(text) if readable else 0) or _DEFAULT_KEEPALIVE

    async def send(self, message: Message) -> None:
        await self.send_encoded(message.SerializeToString())

    async def send_encoded(self, message: bytes) -> None:
        """Send a message that is on the wire's form already."""
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise _ended(error) from None

    @property
    def requests(self) -> AsyncIterator[Any]:
        """The messages of a client stream."""
        if self._requests is None:
            raise TypeError("a call with one request has no stream of them")
        return self._requests

    def authenticate(self, token: bytes) -> None:
        given = self._metadata.get("agent-token", "")
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token):
            raise Unauthenticated("the agent token is missing or wrong")

    def succeed(self) -> None:
        """The call has done its work; what it returns is the answer."""
        if self._began is not None:
            self._context.set_trailing_metadata(self._span())

    def _span(self) -> tuple[tuple[str, str], ...]:
        """When the call was worked on, for the caller's trace. To send spans is not for something inside a sandbox."""
        return () if self._began is None else (("agent-span", f"{self._began}-{time.time_ns()}"),)

    async def refuse(self, error: Exception) -> None:
        """End the call with an error. What is not of the taxonomy is our fault and stays in the log."""
        if not isinstance(error, SandgateError):
            reference = os.urandom(6).hex()
            log.error(
                "reference %s, request %s: unexpected error", reference, self._text("request-id") or "-", exc_info=error
            )
            text = f"internal error, reference {reference}"
            await self._context.abort(grpc.StatusCode.INTERNAL, text, self._span())
        if not isinstance(error, Canceled):
            await self._context.abort(
                status_of(error), _status_text(error.message), (*trailers_of(error), *self._span())
            )

    def _text(self, key: str) -> str:
        value = self._metadata.get(key, "")
        return value if isinstance(value, str) else ""


def _ended(error: grpc.aio.BaseError) -> Exception:
    """What reading or writing has met: mostly that the caller left meanwhile, or the server stops, which is nobody's fault."""
    return error if isinstance(error, grpc.aio.UsageError) else Canceled("the caller went away")


def _status_text(message: str) -> str:
    text = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "…"
    # Names that are not UTF-8 come with surrogates, which no header can carry.
    return text.encode(errors="replace").decode()


# Requests come as bytes and are read inside the guard: after the token was checked, and so that bytes which are no message
# are the caller's fault like any other bad request.


@dataclass(frozen=True)
class Unary:
    """One request, one reply."""

    request: type[Message]
    serve: Callable[[Any, Call], Awaitable[Message]]

    def handler(self, token: bytes) -> grpc.RpcMethodHandler[Any, Any]:
        async def guarded(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            call = Call(context)
            try:
                call.authenticate(token)
                answer = await self.serve(_read(self.request, request), call)
                call.succeed()
                return answer.SerializeToString()
            except Exception as error:
                await call.refuse(error)
                return b""

        return grpc.unary_unary_rpc_method_handler(guarded)


@dataclass(frozen=True)
class ServerStream:
    """One request, any number of replies, sent through the call."""

    request: type[Message]
    serve: Callable[[Any, Call], Awaitable[None]]

    def handler(self, token: bytes) -> grpc.RpcMethodHandler[Any, Any]:
        async def guarded(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            call = Call(context)
            try:
                call.authenticate(token)
                await self.serve(_read(self.request, request), call)
                call.succeed()
            except Exception as error:
                await call.refuse(error)

        return grpc.unary_stream_rpc_method_handler(guarded)


@dataclass(frozen=True)
class ClientStream:
    """Any number of requests, taken from the call, one reply."""

    request: type[Message]
    serve: Callable[[Call], Awaitable[Message]]

    def handler(self, token: bytes) -> grpc.RpcMethodHandler[Any, Any]:
        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            call = Call(context, _read_all(self.request, requests))
            try:
                call.authenticate(token)
                answer = await self.serve(call)
                call.succeed()
                return answer.SerializeToString()
            except Exception as error:
                await call.refuse(error)
                return b""

        return grpc.stream_unary_rpc_method_handler(guarded)


@dataclass(frozen=True)
class BothStreams:
    """Requests are taken from the call and replies sent through it, each at its own pace."""

    request: type[Message]
    serve: Callable[[Call], Awaitable[None]]

    def handler(self, token: bytes) -> grpc.RpcMethodHandler[Any, Any]:
        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            call = Call(context, _read_all(self.request, requests))
            try:
                call.authenticate(token)
                await self.serve(call)
                call.succeed()
            except Exception as error:
                await call.refuse(error)

        return grpc.stream_stream_rpc_method_handler(guarded)


def _read(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidArgument(f"the request is not a {kind.DESCRIPTOR.name}") from None


async def _read_all(kind: type[Message], requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    try:
        async for data in requests:
            yield _read(kind, data)
    except grpc.aio.BaseError as error:
        raise _ended(error) from None


Method = Unary | ServerStream | ClientStream | BothStreams


def generic_handler(service: str, methods: Mapping[str, Method], token: bytes) -> grpc.GenericRpcHandler:
    """A service of guarded methods. The generated servicers are not used: they take an import and cannot be guarded."""
    return grpc.method_handlers_generic_handler(
        service, {name: method.handler(token) for name, method in methods.items()}
    )
