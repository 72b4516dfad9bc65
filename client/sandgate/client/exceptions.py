"""What the native client raises: few classes that say what the caller can do, over the taxonomy of ``sandgate_errors``.

::

    SandboxException                the root; also everything that none of the others says
    |-- InvalidArgumentException    change the call
    |-- NotFoundException           no such sandbox, process or file, or not yours
    |-- RateLimitException          over a limit: wait ``retry_after`` seconds, or free something
    |-- TimeoutException            the command's time limit passed, or that of one request
    `-- CommandExitException        the command ran and failed; carries its output

``__cause__`` is the error of the taxonomy, for callers that want the finer kind.
"""

from __future__ import annotations

from sandgate_errors import DeadlineExceeded, InvalidArgument, NoSpace, NotFound, ResourceExhausted, SandgateError

__all__ = [
    "CommandExitException",
    "InvalidArgumentException",
    "NotFoundException",
    "RateLimitException",
    "SandboxException",
    "TimeoutException",
    "exception_of",
]


class SandboxException(Exception):
    """A call failed. ``retry_after`` is in seconds, and None where the gateway named no time."""

    def __init__(self, message: str, *, error_code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code
        self.retry_after = retry_after


class InvalidArgumentException(SandboxException):
    """The call is wrong whatever the state of the sandbox."""


class NotFoundException(SandboxException):
    """The sandbox, process or file does not exist, or belongs to somebody else."""


class RateLimitException(SandboxException):
    """A quota or limit was reached, for example the number of live processes."""


class TimeoutException(SandboxException):
    """The time limit of the command passed, or a request was not answered within its own."""


class CommandExitException(SandboxException):
    """The command ended with an exit status other than 0, or by a signal (``exit_code`` -1)."""

    def __init__(self, *, stdout: str, stderr: str, exit_code: int, error: str | None, truncated: bool) -> None:
        super().__init__(f"Command exited with code {exit_code} and error:\n{stderr or error or ''}")
        self.stdout = stdout
        self.stderr = stderr
        self.exit_code = exit_code
        self.error = error
        self.truncated = truncated

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled by their positional arguments otherwise, which this class does not take.
        state = (self.stdout, self.stderr, self.exit_code, self.error, self.truncated)
        return (_exit_exception, state)


def _exit_exception(
    stdout: str, stderr: str, exit_code: int, error: str | None, truncated: bool
) -> CommandExitException:
    return CommandExitException(stdout=stdout, stderr=stderr, exit_code=exit_code, error=error, truncated=truncated)


# The nearest class of an error's own line decides, so a new class of the taxonomy is told as its parent is.
_CLASSES: dict[type[SandgateError], type[SandboxException]] = {
    InvalidArgument: InvalidArgumentException,
    NotFound: NotFoundException,
    ResourceExhausted: RateLimitException,
    # Waiting does not help against a full disk.
    NoSpace: SandboxException,
    DeadlineExceeded: TimeoutException,
    SandgateError: SandboxException,
}


def exception_of(error: SandgateError) -> SandboxException:
    """The exception that stands for an error of the taxonomy; raise it ``from`` that error."""
    kind = next(_CLASSES[cls] for cls in type(error).__mro__ if cls in _CLASSES)
    return kind(error.message, error_code=error.error_code, retry_after=error.retry_after)
