"""Errors of ``sandgate_errors`` as clients read them: the translator of the edge.

One table says what a class is on each plane. REST and plain HTTP carry the status as an integer ``code``; a unary
Connect call carries the code's name and its documented status; a Connect stream answers 200 and carries the error in
its end frame. Specified by rest.md 1.3, envd.md 1.3 and 2.5 to 2.7, and behaviour rules W2, W6, W7, D3 and R4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple
from uuid import uuid4

import structlog
from aiohttp import web

from sandgate_edge.connect.code import Code
from sandgate_edge.connect.envelope import END_STREAM, pack
from sandgate_edge.routing import PortClosed, SandboxGone
from sandgate_errors import (
    AlreadyExists,
    Canceled,
    CapabilityMissing,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoSpace,
    NotFound,
    PermissionDenied,
    RequestMismatch,
    ResourceExhausted,
    SandboxNotFound,
    SandboxUnreachable,
    SandgateError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

__all__ = [
    "TABLE",
    "bad_request",
    "connect_error",
    "end_frame",
    "files_error",
    "http_error",
    "internal",
    "meaning_of",
    "port_closed",
    "rest_error",
    "rpc_http_error",
    "sandbox_gone",
]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Meaning(NamedTuple):
    """What an error is on each plane."""

    rest: int
    """Status of the control plane: only ones that Python's ``http.HTTPStatus`` knows, or its SDK fails to read them."""
    connect: Code
    plain: int
    """Status of file transfer and of answers in front of the agent."""


TABLE: dict[type[SandgateError], Meaning] = {
    InvalidArgument: Meaning(400, Code.INVALID_ARGUMENT, 400),
    CapabilityMissing: Meaning(400, Code.INVALID_ARGUMENT, 400),
    RequestMismatch: Meaning(422, Code.INVALID_ARGUMENT, 400),
    Unauthenticated: Meaning(401, Code.UNAUTHENTICATED, 401),
    PermissionDenied: Meaning(403, Code.PERMISSION_DENIED, 403),
    NotFound: Meaning(404, Code.NOT_FOUND, 404),
    # On the data plane a missing sandbox is a gateway fault to every SDK: `is_running` is false for 502 only (H2).
    SandboxNotFound: Meaning(404, Code.UNAVAILABLE, 502),
    SandboxGone: Meaning(404, Code.UNAVAILABLE, 502),
    AlreadyExists: Meaning(409, Code.ALREADY_EXISTS, 409),
    FailedPrecondition: Meaning(409, Code.FAILED_PRECONDITION, 400),
    Conflict: Meaning(409, Code.ABORTED, 409),
    ResourceExhausted: Meaning(429, Code.RESOURCE_EXHAUSTED, 429),
    NoSpace: Meaning(507, Code.RESOURCE_EXHAUSTED, 507),
    # 499 is no status to Python; nobody reads this answer unless the gateway itself gave up the call.
    Canceled: Meaning(503, Code.CANCELED, 503),
    DeadlineExceeded: Meaning(504, Code.DEADLINE_EXCEEDED, 504),
    Unavailable: Meaning(503, Code.UNAVAILABLE, 503),
    SandboxUnreachable: Meaning(503, Code.UNAVAILABLE, 502),
    Unimplemented: Meaning(501, Code.UNIMPLEMENTED, 501),
    DataLoss: Meaning(500, Code.DATA_LOSS, 500),
    Internal: Meaning(500, Code.INTERNAL, 500),
    SandgateError: Meaning(500, Code.UNKNOWN, 500),
}


#: What another time may succeed, as statuses that say so, and seconds until then where nobody knows better.
_NOT_NOW = (Canceled, Conflict, ResourceExhausted, Unavailable)
_NOT_NOW_STATUSES = frozenset({409, 429, 503})
_RETRY_AFTER = 2.0
_HTTP_MESSAGES = {
    404: "there is no such route",
    405: "the method is not allowed on this route",
    415: "the content type is not supported on this route",
}
_RPC_CODES = {
    400: Code.INVALID_ARGUMENT,
    404: Code.UNIMPLEMENTED,
    405: Code.UNIMPLEMENTED,
    413: Code.RESOURCE_EXHAUSTED,
    415: Code.INVALID_ARGUMENT,
}


def meaning_of(error: SandgateError) -> Meaning:
    """The table's entry of the class, else of its nearest parent: a plugin may raise a class of its own."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def rest_error(error: SandgateError) -> web.Response:
    """``{"code", "message"[, "error_code"]}`` of the control plane, with ``Should-Retry`` and ``Retry-After``."""
    status = meaning_of(error).rest
    body: dict[str, object] = {"code": status, "message": error.message or HTTPStatus(status).phrase}
    if error.error_code is not None:
        body["error_code"] = error.error_code
    return _json(body, status=status, headers=_retry_headers(error, status))


def files_error(error: SandgateError) -> web.Response:
    """``{"code", "message"}`` exactly (D3): file transfer, and answers in front of the agent on every agent route."""
    if isinstance(error, SandboxGone):
        return sandbox_gone(error.sandbox_id)
    if isinstance(error, PortClosed):
        return port_closed(error.sandbox_id, error.port)
    status = meaning_of(error).plain
    body = {"code": status, "message": error.message or HTTPStatus(status).phrase}
    return _json(body, status=status, headers=_retry_headers(error, status))


def connect_error(error: SandgateError) -> web.Response:
    """A failed unary call: the code's status and ``{"code": "<name>", "message"}`` (W6)."""
    code = meaning_of(error).connect
    # No charset: connect clients compare the content type of errors, too.
    body = _dump(_connect_body(error))
    headers = {"Content-Type": "application/json", **_retry_headers(error, code.http_status)}
    return web.Response(status=code.http_status, body=body, headers=headers)


def end_frame(error: SandgateError | None) -> bytes:
    """The last frame of a Connect stream (W2). Without an error the payload is ``{}``: JSON null crashes one SDK."""
    return pack(END_STREAM, b"{}" if error is None else _dump({"error": _connect_body(error)}))


def sandbox_gone(sandbox_id: str) -> web.Response:
    """The sandbox is unknown, killed, expired, or paused and not to be woken (R4)."""
    return _json({"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}, status=502)


def port_closed(sandbox_id: str, port: int) -> web.Response:
    """The sandbox runs and nothing answers on the port (R5)."""
    message = "The sandbox is running but port is not open"
    return _json({"sandboxId": sandbox_id, "message": message, "port": port, "code": 502}, status=502)


def bad_request(status: int) -> web.Response:
    """Bytes that are no request: nobody can say which plane was meant, and this form serves both."""
    message = "the request is not valid HTTP/1.1" if status == 400 else HTTPStatus(status).phrase
    return _json({"code": status, "message": message}, status=status)


def http_error(error: web.HTTPException) -> web.Response:
    """An error that the HTTP server itself found, such as an unknown path, in the words of REST and of plain HTTP."""
    body = {"code": error.status, "message": _http_message(error)}
    return _json(body, status=error.status, headers=_kept(error))


def rpc_http_error(error: web.HTTPException) -> web.Response:
    """The same on the path of an RPC: the status is HTTP's, the body Connect's (W14)."""
    code = _RPC_CODES.get(error.status, Code.UNKNOWN)
    body = _dump({"code": code.value, "message": _http_message(error)})
    return web.Response(status=error.status, body=body, headers={"Content-Type": "application/json", **_kept(error)})


def _http_message(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        # It names the limit.
        return error.text or error.reason
    return _HTTP_MESSAGES.get(error.status, error.reason)


def internal(error: BaseException, *, request_id: str) -> Internal:
    """An exception outside the taxonomy: its text goes to the log, a reference id to the caller."""
    reference = uuid4().hex[:12]
    _log.error("internal error", reference=reference, request_id=request_id, exc_info=error)
    return Internal(f"internal error, reference {reference}")


def _kept(error: web.HTTPException) -> dict[str, str]:
    """The headers that say what would have been right."""
    return {name: error.headers[name] for name in ("Allow", "Accept-Post") if name in error.headers}


def _connect_body(error: SandgateError) -> dict[str, str]:
    return {"code": meaning_of(error).connect.value, "message": error.message}


def _retry_headers(error: SandgateError, status: int) -> dict[str, str]:
    """Whether to ask again, and when. What is "not now" always says when (errors.md 2.1), unless asking again is no use."""
    headers: dict[str, str] = {}
    if error.should_retry is not None:
        headers["Should-Retry"] = "true" if error.should_retry else "false"
    wait = error.retry_after
    # A full disk is 429 to Connect, which has no other code for it, and gets no emptier by waiting.
    not_now = isinstance(error, _NOT_NOW) and not isinstance(error, NoSpace) and status in _NOT_NOW_STATUSES
    if wait is None and not_now and error.should_retry is not False:
        wait = _RETRY_AFTER
    if wait is not None and math.isfinite(wait):
        headers["Retry-After"] = str(max(0, math.ceil(wait)))
    if isinstance(error, ResourceExhausted) and error.limit is not None:
        # C57. It was reached, so nothing of it remains.
        headers |= {"RateLimit-Limit": str(error.limit), "RateLimit-Remaining": "0"}
        headers["RateLimit-Reset"] = headers.get("Retry-After", "0")
    return headers


def _json(body: Mapping[str, object], *, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=_dump(body), headers={"Content-Type": "application/json; charset=utf-8", **(headers or {})}
    )


def _dump(body: object) -> bytes:
    # Escaped to ASCII: a message may hold half a surrogate pair from a file name, which UTF-8 cannot carry.
    return json.dumps(body, separators=(",", ":")).encode()
