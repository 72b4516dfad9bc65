"""Watching a directory without anybody who tells: it is listed again and again, and what is different has happened.

So what comes and goes between two looks is not seen, a rename is a removal and a creation, and several writes are one. A
named watcher is looked at when its events are asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

from sandgate_agent.accounts import OwnerNames
from sandgate_agent.entries import Entry, Kind
from sandgate_agent.watch import Event
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_errors import NotFound, ResourceExhausted, SandboxUnreachable
from sandgate_plugin_opensandbox.by_execd.tree import Tree

__all__ = ["PollingWatch", "PollingWatchers"]

#: Seconds between two looks.
_INTERVAL = 1.0
_DEEPEST = 64
#: Every look is a listing of all of it.
_MOST_WATCHED = 20_000
_MOST_WATCHERS = 256
#: Seconds that the gateway is at work for an entry of a look, and for a look at all; and how many times as long it then
#: does something else, whoever watches in this sandbox.
_ENTRY_WORK, _LOOK_WORK = 20e-6, 200e-6
_REST = 9

_Seen = dict[str, Entry]


class PollingWatch:
    """One watched tree."""

    def __init__(self, looks: _Looks, path: str, *, recursive: bool, with_entries: bool) -> None:
        self._looks = looks
        self._path = path
        self._depth = _DEEPEST if recursive else 1
        self._with_entries = with_entries
        self._seen: _Seen = {}
        self._events: list[Event] = []
        self._looking = asyncio.Lock()

    async def open(self) -> None:
        """Raises NotFound, InvalidArgument."""
        self._seen = await self._look()

    async def readable(self) -> None:
        while not self._events:
            await asyncio.sleep(_INTERVAL)
            await self.read()

    async def read(self) -> None:
        async with self._looking:
            try:
                now = await self._look()
            except NotFound:
                # It went itself.
                now = {}
            self._events.extend(self._changes(self._seen, now))
            self._seen = now

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    async def _look(self) -> _Seen:
        try:
            entries = await self._looks.look(self._path, self._depth)
        except ResourceExhausted:
            raise ResourceExhausted(
                f"more than {_MOST_WATCHED} entries below path '{self._path}' cannot be watched without an agent",
                should_retry=False,
            ) from None
        return {os.path.relpath(entry.path, self._path): entry for entry in entries}

    def _changes(self, before: _Seen, now: _Seen) -> Iterator[Event]:
        for name in reversed(before):
            if name not in now or now[name].kind is not before[name].kind:
                yield Event(name, pb.EVENT_TYPE_REMOVE, None)
        for name, entry in now.items():
            old = before.get(name)
            if old is None or old.kind is not entry.kind:
                yield self._event(name, pb.EVENT_TYPE_CREATE, entry)
                if entry.kind is Kind.FILE and entry.size:
                    yield self._event(name, pb.EVENT_TYPE_WRITE, entry)
                continue
            if entry.kind is Kind.FILE and (old.size, old.modified_ns) != (entry.size, entry.modified_ns):
                yield self._event(name, pb.EVENT_TYPE_WRITE, entry)
            if (old.permissions, old.owner, old.group) != (entry.permissions, entry.owner, entry.group):
                yield self._event(name, pb.EVENT_TYPE_CHMOD, entry)

    def _event(self, name: str, kind: int, entry: Entry) -> Event:
        return Event(name, kind, entry if self._with_entries else None)


class _Looks:
    """All looks in one sandbox, one after the other: the gateway's time is everybody's."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    async def look(self, path: str, depth: int) -> Sequence[Entry]:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._free_at - loop.time())
            seen = _MOST_WATCHED
            try:
                entries = await self._tree.list(path, depth, most=_MOST_WATCHED)
                seen = len(entries)
            except (NotFound, SandboxUnreachable):
                seen = 0
                raise
            finally:
                self._free_at = loop.time() + _REST * (_LOOK_WORK + _ENTRY_WORK * seen)
        return entries


class PollingWatchers:
    """All of one sandbox."""

    def __init__(self, tree: Tree) -> None:
        self._looks = _Looks(tree)
        self._watches: dict[str, PollingWatch] = {}
        self._opened = 0

    async def open(
        self, path: str, *, recursive: bool, network_mounts: bool, entries_by: OwnerNames | None
    ) -> PollingWatch:
        """Raises NotFound, InvalidArgument, ResourceExhausted. ``network_mounts`` makes no difference: whoever changes something, it is seen."""
        if self._opened >= _MOST_WATCHERS:
            raise ResourceExhausted(f"there are {_MOST_WATCHERS} watchers in this sandbox already")
        watch = PollingWatch(self._looks, path, recursive=recursive, with_entries=entries_by is not None)
        self._opened += 1
        try:
            await watch.open()
        except BaseException:
            self._opened -= 1
            raise
        return watch

    def release(self, watch: PollingWatch) -> None:
        self._opened -= 1

    def add(self, watch: PollingWatch) -> str:
        watcher_id = f"w{os.urandom(8).hex()}"
        self._watches[watcher_id] = watch
        return watcher_id

    async def events(self, watcher_id: str) -> list[Event]:
        watch = self._found(watcher_id)
        await watch.read()
        return watch.take()

    def remove(self, watcher_id: str) -> None:
        self._found(watcher_id)
        self.release(self._watches.pop(watcher_id))

    def _found(self, watcher_id: str) -> PollingWatch:
        watch = self._watches.get(watcher_id)
        if watch is None:
            raise NotFound(f"watcher '{watcher_id[:100]}' does not exist")
        return watch
