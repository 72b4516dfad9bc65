"""From the status of a gRPC call to an error of the taxonomy, for both drivers.

What the core or the agent refused carries their trailing metadata. What carries none and speaks of a broken call was made
by gRPC itself: it becomes a :class:`Cut`, without the transport's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from sandgate.client.steps import Cut
from sandgate_errors import SandgateError
from sandgate_errors.grpc import from_status

__all__ = ["fault_of"]

#: CANCELLED: a core that stops ends the streams of its relay so; our own cancellations are not looked at.
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


def fault_of(
    code: grpc.StatusCode, details: str | None, trailers: Iterable[Any] | None, *, target: str
) -> SandgateError:
    """The error that a call's status stands for."""
    notes = {str(key): value for key, value in trailers or ()}
    if code in _BROKEN and "error-reason" not in notes:
        return Cut(f"the connection to the core at {target} was lost, or there is no gateway")
    return from_status(code, details or "no details", notes)
