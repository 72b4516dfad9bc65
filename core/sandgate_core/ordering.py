"""Sandboxes in the order in which lists show them, kept while they change (C18), so that a page costs what is on it.

Newest first, equal times by id. Running and paused ones of each owner stand in rows of their own, so how many run is the
length of a row (C20), and a list of one state passes none of the other. Whoever changes a record puts it here too
(:mod:`sandgate_core.live`); what a query asks beside state and time is looked at one record after the other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from sandgate_core.listing import Query, place_of, position_of, shown_state
from sandgate_core.records import SandboxRecord
from sandgate_core.states import State

__all__ = ["Found", "Ordering", "together"]

#: Whose, and what callers see of their state.
_Row: TypeAlias = tuple[str, State]
#: A place, and who stands there. No two have the same place, so records are never compared.
_Entry: TypeAlias = tuple[int, str, SandboxRecord]

_PLACE = itemgetter(0, 1)
_RECORD = itemgetter(2)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What matches a query."""

    #: In the order of the list, from where its page begins: all, or one more than the page holds.
    records: list[SandboxRecord]
    #: How many run, before paging.
    running: int


class Ordering:
    """Records that callers may see, each in its place."""

    def __init__(self, records: Iterable[SandboxRecord] = ()) -> None:
        self._rows: dict[_Row, list[_Entry]] = {}
        #: Where each is, by id.
        self._known: dict[str, tuple[_Row, _Entry]] = {}
        for record in records:
            self.put(record)

    def __len__(self) -> int:
        return len(self._known)

    def put(self, record: SandboxRecord) -> None:
        """A sandbox as it is now. In a state that callers may not see it has no place."""
        self.drop(record.id)
        if record.state.shown:
            row, entry = (record.owner, shown_state(record.state)), (*place_of(record), record)
            insort(self._rows.setdefault(row, []), entry)
            self._known[record.id] = row, entry

    def drop(self, sandbox_id: str) -> None:
        known = self._known.pop(sandbox_id, None)
        if known is not None:
            row, entry = known
            entries = self._rows[row]
            # What has the same place and is shorter comes first.
            del entries[bisect_left(entries, entry[:2])]
            if not entries:
                del self._rows[row]

    def find(self, query: Query, *, owner: str | None, where: Callable[[SandboxRecord], bool] | None = None) -> Found:
        """What an owner's list holds; of all owners where there is None. ``where``: what else must hold of a sandbox.

        Raises InvalidArgument for a page token that is not ours.
        """
        after = position_of(query)
        running = 0
        entries: list[_Entry] = []
        for (_, state), row in self._rows_of(query, owner):
            matching = _matching(row, query, where)
            if state is State.RUNNING:
                running += len(matching)
            entries += _from(matching, after, query)
        entries.sort(key=_PLACE, reverse=query.ascending)
        return Found(records=[entry[2] for entry in entries[: _most(query)]], running=running)

    def _rows_of(self, query: Query, owner: str | None) -> Iterator[tuple[_Row, list[_Entry]]]:
        if owner is None:
            yield from (found for found in self._rows.items() if not query.states or found[0][1] in query.states)
            return
        for state in query.states or (State.RUNNING, State.PAUSED):
            if (entries := self._rows.get((owner, state))) is not None:
                yield (owner, state), entries


def together(query: Query, parts: Sequence[Found]) -> Found:
    """What several places found for one query, none of them in two."""
    records = [record for part in parts for record in part.records]
    records.sort(key=place_of, reverse=query.ascending)
    return Found(records=records[: _most(query)], running=sum(part.running for part in parts))


def _matching(row: list[_Entry], query: Query, where: Callable[[SandboxRecord], bool] | None) -> Sequence[_Entry]:
    """One filter after another, and only those that are asked for: most lists ask for none."""
    found = row
    if query.started_after is not None:
        # The newest come first.
        found = found[: bisect_left(found, (1 - query.started_after,))]
    if query.templates is not None:
        found = [entry for entry in found if entry[2].template_id in query.templates]
    for key, value in query.metadata.items():
        found = [entry for entry in found if entry[2].metadata.get(key) == value]
    if where is not None:
        found = [entry for entry in found if where(entry[2])]
    return found


def _from(entries: Sequence[_Entry], after: tuple[int, str] | None, query: Query) -> Sequence[_Entry]:
    """Those behind a place in the direction of the list, no more than a page may need."""
    most = _most(query)
    if query.ascending:
        end = len(entries) if after is None else bisect_left(entries, after)
        return entries[0 if most is None else max(0, end - most) : end]
    begin = 0 if after is None else bisect_right(entries, after, key=_PLACE)
    return entries[begin : None if most is None else begin + most]


def _most(query: Query) -> int | None:
    """One more than the page holds tells that there is another."""
    return None if query.page_size is None else query.page_size + 1
