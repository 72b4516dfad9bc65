"""The end of an edge: what is under way is finished, what comes is sent away, and both within a bounded time.

From the order to stop on, every new request is refused with 503, a time after which to ask again and ``Should-Retry: true``,
since nothing was begun for it; its connection is closed behind the answer. Streams are reset: they have no end worth waiting
for, and their clients attach again. Health goes on being answered, since whoever was reset asks for it, to learn whether the
sandbox is gone (R13, R14). When the last request that was under way has its answer, or its time
is over, nobody is listened to any more (``server.py``).
"""

from __future__ import annotations

from aiohttp import hdrs, web

from sandgate_edge import routing
from sandgate_edge.keys import DRAIN, STREAMS
from sandgate_errors import Unavailable

__all__ = ["Drain", "add_header", "check"]

# A gateway that is started again is there by then.
_RETRY_AFTER = 2.0


class Drain:
    """Whether the edge is at its end."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self, app: web.Application) -> None:
        self.begun = True
        streams = app[STREAMS]
        for transport in tuple(streams):
            routing.reset(transport)


def check(request: web.Request) -> None:
    """Raises Unavailable for a request that comes too late."""
    if request.app[DRAIN].begun:
        raise Unavailable("the gateway is stopping", retry_after=_RETRY_AFTER, should_retry=True)


async def add_header(request: web.Request, response: web.StreamResponse) -> None:
    """A signal of every response: whose connection is about to be closed should know."""
    if request.app[DRAIN].begun:
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
