"""The error codes of the Connect protocol and the HTTP status of each (envd.md 2.6)."""

from __future__ import annotations

from enum import Enum

__all__ = ["Code"]


class Code(Enum):
    """A code as it stands on the wire."""

    CANCELED = "canceled"
    """The caller cancelled."""
    UNKNOWN = "unknown"
    """No other code fits."""
    INVALID_ARGUMENT = "invalid_argument"
    """The request is wrong whatever the state of the system."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The time limit passed."""
    NOT_FOUND = "not_found"
    """There is no such thing."""
    ALREADY_EXISTS = "already_exists"
    """What was to be made is there."""
    PERMISSION_DENIED = "permission_denied"
    """The caller is known and may not."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """A limit was reached."""
    FAILED_PRECONDITION = "failed_precondition"
    """The system is not in the state that this needs."""
    ABORTED = "aborted"
    """A conflict with another operation."""
    OUT_OF_RANGE = "out_of_range"
    """Past the end of something."""
    UNIMPLEMENTED = "unimplemented"
    """Not offered here."""
    INTERNAL = "internal"
    """The server failed."""
    UNAVAILABLE = "unavailable"
    """Try again later."""
    DATA_LOSS = "data_loss"
    """Something is lost for good."""
    UNAUTHENTICATED = "unauthenticated"
    """Who the caller is was not shown."""

    @property
    def http_status(self) -> int:
        """The status of a unary answer with this code."""
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    Code.CANCELED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}
