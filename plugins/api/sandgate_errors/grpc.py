"""Errors to and from gRPC status: the translator of the core, the agent and their callers.

The status code carries the kind, the status details the message, and trailing metadata what a code cannot say::

    error-reason   the class, for those that share a code with their parent or with gRPC itself
    error-code     the published slug
    retry-after    seconds
    should-retry   true | false
    limit          the number of a quota or rate that was reached
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc

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

__all__ = ["from_status", "status_of", "trailers_of"]

_CODES: dict[type[SandgateError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    Conflict: grpc.StatusCode.ABORTED,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Canceled: grpc.StatusCode.CANCELLED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    Internal: grpc.StatusCode.INTERNAL,
    SandgateError: grpc.StatusCode.UNKNOWN,
}
_KINDS: dict[grpc.StatusCode, type[SandgateError]] = {
    **{code: cls for cls, code in _CODES.items()},
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
}
# Classes that share their parent's code travel by name. So do two whose codes gRPC itself uses, for a broken connection and
# for a message that is too large: a caller can tell those by their lack of a name.
_REASONS: dict[str, type[SandgateError]] = {
    "unavailable": Unavailable,
    "resource_exhausted": ResourceExhausted,
    "capability_missing": CapabilityMissing,
    "request_mismatch": RequestMismatch,
    "sandbox_not_found": SandboxNotFound,
    "no_space": NoSpace,
    "sandbox_unreachable": SandboxUnreachable,
}
_REASON_OF = {cls: reason for reason, cls in _REASONS.items()}


def status_of(error: SandgateError) -> grpc.StatusCode:
    """The status code of an error: its own class's, else that of the nearest parent."""
    return next(_CODES[cls] for cls in type(error).__mro__ if cls in _CODES)


def trailers_of(error: SandgateError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that lets :func:`from_status` build the same error again."""
    trailers: list[tuple[str, str]] = []
    if (reason := _REASON_OF.get(type(error))) is not None:
        trailers.append(("error-reason", reason))
    if error.error_code is not None:
        trailers.append(("error-code", error.error_code))
    if error.retry_after is not None:
        trailers.append(("retry-after", f"{error.retry_after:g}"))
    if error.should_retry is not None:
        trailers.append(("should-retry", "true" if error.should_retry else "false"))
    if isinstance(error, ResourceExhausted) and error.limit is not None:
        trailers.append(("limit", str(error.limit)))
    return tuple(trailers)


def from_status(
    code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]] | Mapping[str, str | bytes] | None
) -> SandgateError:
    """The error that the other side raised. Unknown reasons fall back to the code, unknown codes to the root class."""
    pairs = trailers.items() if isinstance(trailers, Mapping) else (trailers or ())
    notes = {key: value for key, value in pairs if isinstance(value, str)}
    cls = _REASONS.get(notes.get("error-reason", ""), _KINDS.get(code, SandgateError))
    retry = notes.get("should-retry")
    error = cls(
        message,
        error_code=notes.get("error-code"),
        retry_after=_seconds(notes.get("retry-after")),
        should_retry=None if retry is None else retry == "true",
    )
    if isinstance(error, ResourceExhausted) and notes.get("limit", "").isdecimal():
        error.limit = int(notes["limit"])
    return error


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
