"""Watching directories (behaviour.md 8): who reads a watch's queue, when, and what becomes of what was read.

A watch of ``WatchDir`` belongs to its stream. One of ``CreateWatcher`` outlives request and connection (F38), so it belongs
to the agent: a task of its own reads the queue as it fills, because the kernel's queue is short and new directories must
be watched soon. Asking for events reads the queue first, so whatever a caller has done before is in the answer (F43).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sandgate_agent.accounts import OwnerNames
from sandgate_agent.entries import Entry, describe
from sandgate_agent.faults import file_error
from sandgate_errors import Internal, InvalidArgument, NotFound, SandgateError

if TYPE_CHECKING:
    from sandgate_agent.tree_watch import Change, TreeWatch

__all__ = ["Event", "Watch", "Watchers", "open_watch"]

#: What a watcher keeps for its caller; about 50 MB with entries.
_MOST_EVENTS = 100_000
#: NFS, CIFS, SMB, SMB2, FUSE (F35): the kernel does not hear of what other machines do there.
_NETWORK_FILE_SYSTEMS = frozenset({0x6969, 0xFF534D42, 0x517B, 0xFE534D42, 0x65735546})


class Event(NamedTuple):
    """``kind`` has the numbers of ``EventType``; the entry is there when asked for and the thing still is (F45)."""

    name: str
    kind: int
    entry: Entry | None


class Watch:
    """One watch and the events read from it that nobody has taken yet.

    A reader that is cancelled leaves while its thread may still be at work, so reading and closing take turns, and what
    was read is kept here and not handed to the one who asked for reading.
    """

    def __init__(self, tree: TreeWatch, *, entries_by: OwnerNames | None, most_events: int = _MOST_EVENTS) -> None:
        self._tree = tree
        self._entries_by = entries_by
        self._most_events = most_events
        self._lock = threading.Lock()
        self._closed = False
        self._events: deque[Event] = deque()
        self._failure: SandgateError | None = None

    async def readable(self) -> None:
        """Returns when the kernel has something to tell."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        fd = self._tree.fileno()
        loop.add_reader(fd, _wake, waiting)
        try:
            await waiting
        finally:
            loop.remove_reader(fd)

    async def read(self) -> None:
        """Take over all that the kernel has to tell."""
        await asyncio.to_thread(self._read)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def take(self) -> list[Event]:
        """The events so far, once. Raises what the watch has failed with, from then on (F46)."""
        if self._failure is not None:
            raise self._failure
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def close(self) -> None:
        """Free the watch; without waiting for a thread that is still reading."""
        if self._lock.acquire(blocking=False):
            self._close_and_release()
        else:
            asyncio.get_running_loop().run_in_executor(None, self._close_in_turn)

    def _close_in_turn(self) -> None:
        self._lock.acquire()
        self._close_and_release()

    def _close_and_release(self) -> None:
        try:
            self._closed = True
            self._tree.close()
        finally:
            self._lock.release()

    def _read(self) -> None:
        with self._lock:
            if self._closed or self._failure is not None:
                return
            try:
                for change in self._tree.changes():
                    self._events.append(self._event(change))
                    if len(self._events) > self._most_events:
                        raise Internal(f"more than {self._most_events} events were not fetched: the watch has ended")
            except SandgateError as error:
                self._fail(error)
            except OSError as error:
                self._fail(Internal(f"the watch failed: {error.strerror}"))

    def _fail(self, error: SandgateError) -> None:
        self._failure = error
        self._events.clear()

    def _event(self, change: Change) -> Event:
        return Event(change.name.decode(errors="replace"), int(change.kind), self._entry(change))

    def _entry(self, change: Change) -> Entry | None:
        if self._entries_by is None or not change.keeps_entry:
            return None
        path = self._tree.path_of(change.name)
        try:
            return describe(path, os.path.basename(path), os.lstat(path), self._entries_by)
        except OSError:
            return None


class Watchers:
    """The watches that callers poll, by id. They live until removed, or as long as the agent."""

    def __init__(self) -> None:
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}

    def add(self, watch: Watch) -> str:
        watcher_id = f"w{secrets.token_hex(8)}"
        self._watches[watcher_id] = watch, asyncio.create_task(_keep_reading(watch), name=f"watcher {watcher_id}")
        return watcher_id

    async def events(self, watcher_id: str) -> list[Event]:
        """What has happened since the last call, up to now."""
        watch, _ = self._found(watcher_id)
        await watch.read()
        return watch.take()

    def remove(self, watcher_id: str) -> None:
        watch, reading = self._found(watcher_id)
        del self._watches[watcher_id]
        # In this order: the event loop must have let go of the descriptor before its number can be another's.
        reading.add_done_callback(lambda _: watch.close())
        reading.cancel()

    def close(self) -> None:
        for watcher_id in list(self._watches):
            self.remove(watcher_id)

    def _found(self, watcher_id: str) -> tuple[Watch, asyncio.Task[None]]:
        found = self._watches.get(watcher_id)
        if found is None:
            raise NotFound(f"watcher '{watcher_id[:100]}' does not exist")
        return found


async def open_watch(path: str, *, recursive: bool, network_mounts: bool, entries_by: OwnerNames | None) -> Watch:
    """A watch that is active. Raises InvalidArgument for what is no directory, or lies on a network file system."""
    gone = threading.Event()

    def make() -> Watch:
        # Not at the top: it brings ctypes, see there.
        from sandgate_agent.tree_watch import TreeWatch

        if not network_mounts:
            _refuse_network(path)
        return Watch(TreeWatch(path, recursive=recursive, cancelled=gone.is_set), entries_by=entries_by)

    return await _opened(make, gone)


async def _opened(make: Callable[[], Watch], gone: threading.Event) -> Watch:
    """Open in a thread; what is opened for a caller who has gone meanwhile is closed again."""

    def leave(opened: asyncio.Future[Watch]) -> None:
        if opened.exception() is None:
            opened.result().close()

    opening = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        gone.set()
        opening.add_done_callback(leave)
        raise


def _refuse_network(path: str) -> None:
    from sandgate_agent.kernel import file_system_type

    try:
        kind = file_system_type(os.fsencode(path))
    except OSError as error:
        raise file_error(error, path) from None
    if kind in _NETWORK_FILE_SYSTEMS:
        raise InvalidArgument(f"path '{path}' is on a network file system, where changes by others are not seen")


async def _keep_reading(watch: Watch) -> None:
    while not watch.failed:
        await watch.readable()
        await watch.read()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
