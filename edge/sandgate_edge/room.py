"""Room for large messages: how much of them this process holds at once, whosever they are.

A message may have tens of megabytes, and is whole in memory before it can be read or while its reader takes it. One is no
trouble; a hundred, begun and never finished, would be the end of a process that serves other people's sandboxes too. So
they share a room: who finds it full is told to come again (``ResourceExhausted``). Messages of usual size need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandgate_errors import ResourceExhausted

__all__ = ["Place", "Room"]

# Of the largest message there may be: how many have room at once, and the part of one that needs none.
_LARGEST_AT_ONCE = 8
_USUAL_PART = 64
# Seconds; a message that is sent in one go is through by then.
_RETRY_AFTER = 1.0


class Room:
    """``largest``: bytes of the largest single message."""

    def __init__(self, largest: int) -> None:
        self._free = _LARGEST_AT_ONCE * largest
        self._usual = largest // _USUAL_PART

    @contextmanager
    def place(self) -> Iterator[Place]:
        """What one call holds, until it ends."""
        place = Place(self)
        try:
            yield place
        finally:
            place.hold(0)

    def _take(self, size: int, *, instead_of: int) -> int:
        size = size if size > self._usual else 0
        more = size - instead_of
        if more > self._free:
            raise ResourceExhausted(
                "too many large messages are under way", should_retry=True, retry_after=_RETRY_AFTER
            )
        self._free -= more
        return size


class Place:
    """What one call holds of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held = 0

    def hold(self, size: int) -> None:
        """Says how many bytes the call holds from now on. Raises ResourceExhausted when there is no room for more."""
        self._held = self._room._take(size, instead_of=self._held)  # noqa: SLF001 - the two are one concept
