"""Commands: the one form they have, their time limit, and how many there are at a time (K20 to K27).

Terminals, input and signals are no part of ROCK; what the gateway offers of them beside stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sandgate_api.envd.v1 import process_pb2
from sandgate_errors import InvalidArgument, ResourceExhausted, Unimplemented
from sandgate_plugin_api import AgentRequest

__all__ = ["LONGEST_SECONDS", "Places", "accepted_command"]

#: The largest time limit that is accepted.
LONGEST_SECONDS = 85.0
#: Seconds beyond its limit after which a command of which nothing is heard has ended: what kills it takes a moment.
_SLACK = 5.0


def accepted_command(request: AgentRequest, message: process_pb2.StartRequest) -> float:
    """The time limit of a command in seconds. Raises InvalidArgument or Unimplemented."""
    args = message.process.args
    if message.process.cmd != "/bin/bash" or len(args) != 3 or list(args[:2]) != ["-l", "-c"]:
        raise InvalidArgument("a command must be /bin/bash -l -c and one text")
    if message.stdin:
        raise Unimplemented("commands have no standard input")
    # Where nothing is said E2B gives a pipe that nobody could write to.
    message.stdin = False
    return _limit(request.header("Connect-Timeout-Ms"))


def _limit(header: str | None) -> float:
    text = (header or "0").strip()
    milliseconds = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
    if not 0 < milliseconds <= LONGEST_SECONDS * 1000:
        raise InvalidArgument(f"the time limit of a command must be above 0 and at most {LONGEST_SECONDS:g} seconds")
    return milliseconds / 1000


@dataclass(frozen=True)
class _Place:
    request: AgentRequest
    free_at: float


class Places:
    """The commands that are active; each has a place until it ends, whether or not its client waits for that (K25, K26)."""

    def __init__(self, most: int, *, clock: Callable[[], float] | None = None) -> None:
        self._most = most
        self._clock = clock
        #: By the identity of the request, which is the same object in every hook.
        self._taken: dict[int, _Place] = {}

    def take(self, request: AgentRequest, *, limit: float) -> None:
        """Raises ResourceExhausted when all are taken."""
        now = self._now()
        if len(self._taken) >= self._most:
            self._taken = {key: place for key, place in self._taken.items() if place.free_at > now}
        if len(self._taken) >= self._most:
            raise ResourceExhausted(f"{self._most} commands are active already")
        self._taken[id(request)] = _Place(request, now + limit + _SLACK)

    def free(self, request: AgentRequest) -> None:
        """Its command has ended. Of a request without a place: nothing."""
        self._taken.pop(id(request), None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()
