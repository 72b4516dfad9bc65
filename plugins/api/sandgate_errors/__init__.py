"""The one taxonomy of errors that a user can meet.

Domain code in core, edge, agent and plugins raises these and knows no status numbers. Each boundary has one translator:
``sandgate_errors.grpc`` for gRPC, ``sandgate_edge.responses`` for REST, Connect and plain HTTP. A class says what the
caller can do about it::

    SandgateError
    |-- InvalidArgument          change the request
    |   |-- CapabilityMissing    choose another backend, or do without
    |   `-- RequestMismatch      what is repeated must be the same; use a new key for something else
    |-- Unauthenticated          give a valid key, token, signature or user
    |-- PermissionDenied         this caller may not, ever
    |-- NotFound                 no such thing, or not yours
    |   `-- SandboxNotFound      the sandbox is gone
    |-- AlreadyExists            it is there already
    |-- FailedPrecondition       bring the thing into another state first
    |-- Conflict                 another operation on the same thing is under way: try again
    |-- ResourceExhausted        over a limit: wait, or free something
    |   `-- NoSpace              the sandbox's disk is full
    |-- Canceled                 the caller went away
    |-- DeadlineExceeded         the time limit passed
    |-- Unavailable              try again later
    |   `-- SandboxUnreachable   the sandbox is there, its agent does not answer
    |-- Unimplemented            this gateway does not offer it
    |-- DataLoss                 what was kept for the caller is gone
    `-- Internal                 our fault

``Internal`` raised on purpose carries a text that is meant for the caller. An exception outside this tree never reaches
a caller as text: the translators log it and answer with a reference id.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "Canceled",
    "CapabilityMissing",
    "Conflict",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NoSpace",
    "NotFound",
    "PermissionDenied",
    "RequestMismatch",
    "ResourceExhausted",
    "SandboxNotFound",
    "SandboxUnreachable",
    "SandgateError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "all_errors",
]


class SandgateError(Exception):
    """An error that is meant for the caller.

    ``message`` is one sentence in the caller's terms. ``error_code`` is a published slug (``contract/rest.md`` 1.3) for
    clients that branch on it. ``retry_after`` is in seconds. ``should_retry`` False tells an SDK not to repeat a request
    that may have taken effect; None leaves it to the client's own rules.
    """

    def __init__(
        self,
        message: str,
        *,
        error_code: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code
        self.retry_after = retry_after
        self.should_retry = should_retry


class InvalidArgument(SandgateError):
    """The request is wrong whatever the state of the system."""


class CapabilityMissing(InvalidArgument):
    """The backend cannot do what was asked; the message names both."""

    @classmethod
    def of(cls, backend: str, capability: str) -> CapabilityMissing:
        return cls(f"backend '{backend}' does not offer {capability}")


class RequestMismatch(InvalidArgument):
    """The request claims to repeat an earlier one and differs from it."""


class Unauthenticated(SandgateError):
    """Key, token, signature or user name is missing or wrong."""


class PermissionDenied(SandgateError):
    """The caller is known and may not do this."""


class NotFound(SandgateError):
    """There is no such thing, or it is not the caller's."""


class SandboxNotFound(NotFound):
    """The sandbox is unknown, ended, or another owner's."""

    @classmethod
    def of(cls, sandbox_id: str) -> SandboxNotFound:
        return cls(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


class AlreadyExists(SandgateError):
    """What was to be made is there already."""


class FailedPrecondition(SandgateError):
    """The thing is not in a state that allows this."""


class Conflict(SandgateError):
    """Another operation on the same thing is under way."""


class ResourceExhausted(SandgateError):
    """A quota, rate or size limit was reached.

    ``limit`` is the number that was reached, for a quota or rate of the caller's team.
    """

    def __init__(
        self,
        message: str,
        *,
        error_code: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, error_code=error_code, retry_after=retry_after, should_retry=should_retry)
        self.limit = limit


class NoSpace(ResourceExhausted):
    """No space or inodes are left on the sandbox's disk."""


class Canceled(SandgateError):
    """The caller cancelled."""


class DeadlineExceeded(SandgateError):
    """The time limit of the call or command passed."""


class Unavailable(SandgateError):
    """A part that is needed does not answer now."""


class SandboxUnreachable(Unavailable):
    """The sandbox exists but its agent, or the port asked for, does not answer."""


class Unimplemented(SandgateError):
    """Known to the protocol, not offered here."""


class DataLoss(SandgateError):
    """Something kept for the caller is gone for good."""


class Internal(SandgateError):
    """The gateway or agent failed; raised on purpose, the text is meant for the caller."""


def all_errors() -> list[type[SandgateError]]:
    """Every class of the tree, parents before children; the translators' tests check that none is unmapped."""
    found: list[type[SandgateError]] = [SandgateError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found
