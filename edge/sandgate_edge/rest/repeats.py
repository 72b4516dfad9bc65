"""Whether a client may repeat by itself what makes something new (``rest.md`` 1.4).

SDKs repeat a request whose answer was lost, unless the answer says that they must not. What may have been made although it
failed would then be made twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandgate_errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SandgateError,
    Unauthenticated,
    Unimplemented,
)

__all__ = ["made_once"]

#: With these the core says that it started nothing; the client may decide by itself to repeat.
_NOTHING_STARTED = (InvalidArgument, Unauthenticated, PermissionDenied, NotFound, ResourceExhausted, Unimplemented)


@contextmanager
def made_once(*, repeatable: bool) -> Iterator[None]:
    """Around a call that makes something; ``repeatable``: a second one would find what the first has made."""
    try:
        yield
    except SandgateError as error:
        if error.should_retry is None and not repeatable and not isinstance(error, _NOTHING_STARTED):
            error.should_retry = False
        raise
