"""Watching directories (behaviour.md 8): who reads a watch's records, when, and what becomes of what was read.

A watch of ``WatchDir`` belongs to its stream. One of ``CreateWatcher`` outlives request and connection (F38), so it belongs
to the agent: a task of its own reads the records as they come, because new directories must be watched soon. Asking for
events reads first, so whatever a caller has done before is in the answer (F43).

The kernel's queue is one for all (:mod:`sandgate_agent.shared_queue`). While there are watches the event loop listens to it,
and has what it tells distributed in a thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sandgate_agent.accounts import OwnerNames
from sandgate_agent.entries import Entry, describe
from sandgate_agent.faults import file_error
from sandgate_errors import Internal, InvalidArgument, NotFound, SandgateError

if TYPE_CHECKING:
    from sandgate_agent.shared_queue import Share, SharedQueue
    from sandgate_agent.tree_watch import Change, TreeWatch

__all__ = ["Event", "Watch", "Watchers"]

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
        self._waiting: asyncio.Future[None] | None = None

    @property
    def share(self) -> Share:
        """What it reads."""
        return self._tree.share

    async def readable(self) -> None:
        """Returns when there is something to read. For one caller at a time."""
        if not self.share.has_records:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def wake(self) -> None:
        """There is something to read now."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

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
        """Free the watch, behind a thread that is still reading, and without waiting for it."""
        asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._tree.close()

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
    """All watches, and by id those that callers poll, which live until removed, or as long as the agent."""

    def __init__(self) -> None:
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._open: dict[Share, Watch] = {}
        self._queue: SharedQueue | None = None
        self._making_queue = threading.Lock()
        self._distributing: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def open(self, path: str, *, recursive: bool, network_mounts: bool, entries_by: OwnerNames | None) -> Watch:
        """A watch that is active; :meth:`release` frees it.

        Raises InvalidArgument for what is no directory, or lies on a network file system.
        """
        gone = threading.Event()

        def make() -> Watch:
            # Not at the top: it brings ctypes, see there.
            from sandgate_agent.tree_watch import TreeWatch

            if not network_mounts:
                _refuse_network(path)
            tree = TreeWatch(path, recursive=recursive, cancelled=gone.is_set, queue=self._shared_queue())
            return Watch(tree, entries_by=entries_by)

        watch = await _opened(make, gone)
        self._open[watch.share] = watch
        if len(self._open) == 1:
            self._listen()
        return watch

    def release(self, watch: Watch) -> None:
        """Free a watch. In this order: the event loop must have let go of the queue before its last share is closed."""
        del self._open[watch.share]
        if not self._open:
            self._stop_listening()
        watch.close()

    def add(self, watch: Watch) -> str:
        watcher_id = f"w{os.urandom(8).hex()}"
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
        reading.cancel()
        self.release(watch)

    def close(self) -> None:
        for watcher_id in list(self._watches):
            self.remove(watcher_id)

    def _found(self, watcher_id: str) -> tuple[Watch, asyncio.Task[None]]:
        found = self._watches.get(watcher_id)
        if found is None:
            raise NotFound(f"watcher '{watcher_id[:100]}' does not exist")
        return found

    def _shared_queue(self) -> SharedQueue:
        from sandgate_agent.shared_queue import SharedQueue

        with self._making_queue:
            if self._queue is None:
                self._queue = SharedQueue(self._told)
            return self._queue

    def _told(self, share: Share) -> None:
        """In any thread: this share has something to read."""
        self._loop.call_soon_threadsafe(self._wake, share)

    def _wake(self, share: Share) -> None:
        # One that is still being opened has nobody who waits, and looks before it does.
        if (watch := self._open.get(share)) is not None:
            watch.wake()

    # While there is an open watch, the loop either listens or a thread distributes what it has heard of.

    def _listen(self) -> None:
        if self._distributing is None and self._queue is not None:
            self._loop.add_reader(self._queue.fileno(), self._distribute)

    def _stop_listening(self) -> None:
        if self._queue is not None:
            self._loop.remove_reader(self._queue.fileno())

    def _distribute(self) -> None:
        if self._queue is not None:
            self._stop_listening()
            self._distributing = self._loop.run_in_executor(None, self._queue.distribute)
            self._distributing.add_done_callback(self._distributed)

    def _distributed(self, done: asyncio.Future[None]) -> None:
        self._distributing = None
        if self._open:
            self._listen()
        if not done.cancelled():
            done.result()


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
