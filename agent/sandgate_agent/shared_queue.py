"""One kernel queue of file events for all watches of this agent.

The kernel allows a user few queues (128, for all sandboxes of a gateway together) and many watched directories. So the
watches share one, and each sees it as if it had it alone: its own records, with numbers of its own, in the kernel's order
and with the kernel's rule for repeated ones; a bound of its own, so that one which is not read loses nothing of others'.

Any thread may call; a call takes turns with the others and waits for nothing else. The queue exists while there is a share.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sandgate_agent.inotify import Inotify, Mask, Record

__all__ = ["Share", "SharedQueue"]

#: As many as the kernel keeps in a queue by default.
_MOST_RECORDS = 16_384
#: Each watch that is removed makes a record, and these must not fill the kernel's queue.
_REMOVED_AT_ONCE = 1024
_FOR_THE_REQUEST = Mask.ONLYDIR | Mask.DONT_FOLLOW
#: Told whether asked for or not.
_ALWAYS = Mask.UNMOUNT | Mask.IGNORED | Mask.Q_OVERFLOW
_LOST = Record(-1, Mask.Q_OVERFLOW, 0, b"")


class _Subscription(NamedTuple):
    number: int
    mask: int


class SharedQueue:
    """See the module. ``on_records`` is called in any thread when a share that had nothing to read has something."""

    def __init__(self, on_records: Callable[[Share], None] = lambda _: None) -> None:
        self._on_records = on_records
        self._lock = threading.Lock()
        self._kernel: Inotify | None = None
        self._shares: set[Share] = set()
        self._subscriptions: dict[int, dict[Share, _Subscription]] = {}
        #: Never used twice: what is left of an ended subscription is not taken for the next one's.
        self._numbers = itertools.count(1)

    def share(self) -> Share:
        """Raises OSError when the kernel gives no queue."""
        share = Share(self)
        with self._lock:
            if self._kernel is None:
                self._kernel = Inotify()
            self._shares.add(share)
        return share

    def fileno(self) -> int:
        """Readable when :meth:`distribute` has something to do; valid while there is a share."""
        if self._kernel is None:
            raise ValueError("nobody shares this queue")
        return self._kernel.fileno()

    def distribute(self) -> None:
        """Give each share what the kernel has to tell by now."""
        with self._lock:
            self._distribute()

    def add(self, share: Share, path: bytes, mask: int) -> int:
        """See :meth:`Share.add`."""
        flags = os.O_PATH | os.O_CLOEXEC
        flags |= os.O_DIRECTORY if mask & Mask.ONLYDIR else 0
        flags |= os.O_NOFOLLOW if mask & Mask.DONT_FOLLOW else 0
        # To find it may take as long as a file system likes, and others must not wait for that.
        found = os.open(path, flags)
        try:
            with self._lock:
                return self._add(share, b"/proc/self/fd/%d" % found, mask & ~_FOR_THE_REQUEST)
        finally:
            os.close(found)

    def remove(self, share: Share, number: int) -> None:
        """See :meth:`Share.remove`."""
        with self._lock:
            # As with the kernel, what was before the end is told.
            self._distribute()
            watch = share.watches.get(number)
            if watch is not None:
                self._unsubscribe(share, watch)

    def leave(self, share: Share) -> None:
        """See :meth:`Share.close`."""
        with self._lock:
            self._shares.discard(share)
            if not self._shares:
                self._end()
                return
            for count, watch in enumerate(list(share.watches.values()), 1):
                self._unsubscribe(share, watch)
                if count % _REMOVED_AT_ONCE == 0:
                    self._distribute()

    def _add(self, share: Share, path: bytes, mask: int) -> int:
        kernel = self._kernel
        if kernel is None or share not in self._shares:
            raise ValueError("this share is closed")
        # Another share may watch the same directory: what happened before now is for that one alone.
        self._distribute()
        watch = kernel.add(path, mask | Mask.MASK_ADD)
        subscribers = self._subscriptions.setdefault(watch, {})
        known = subscribers.get(share)
        number = next(self._numbers) if known is None else known.number
        subscribers[share] = _Subscription(number, mask)
        share.watches[number] = watch
        return number

    def _unsubscribe(self, share: Share, watch: int) -> None:
        subscribers = self._subscriptions[watch]
        del share.watches[subscribers.pop(share).number]
        if not subscribers:
            del self._subscriptions[watch]
            if self._kernel is not None:
                self._kernel.remove(watch)

    def _end(self) -> None:
        """Closing it frees all that it watches."""
        self._subscriptions.clear()
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _distribute(self) -> None:
        if self._kernel is None:
            return
        for record in self._kernel.read():
            if record.mask & Mask.Q_OVERFLOW:
                for share in self._shares:
                    self._give(share, _LOST)
                continue
            for share, (number, mask) in self._subscriptions.get(record.watch, {}).items():
                if record.mask & (mask | _ALWAYS):
                    self._give(share, record._replace(watch=number))
            if record.mask & Mask.IGNORED:
                for share, (number, _) in self._subscriptions.pop(record.watch, {}).items():
                    del share.watches[number]

    def _give(self, share: Share, record: Record) -> None:
        had_none = not share.records
        if share.take_in(record) and had_none:
            self._on_records(share)


class Share:
    """What one watch sees of the queue. Reading is for one thread at a time."""

    def __init__(self, queue: SharedQueue) -> None:
        self._queue = queue
        self._lost = False
        #: For the queue alone: what waits to be read, and the numbers that were given out.
        self.records: deque[Record] = deque()
        self.watches: dict[int, int] = {}

    def add(self, path: bytes, mask: int) -> int:
        """Watch a path; the number of its watch, the same for the same inode. Raises OSError."""
        return self._queue.add(self, path, mask)

    def remove(self, number: int) -> None:
        """End a watch. One that the kernel has ended itself is not an error."""
        self._queue.remove(self, number)

    @property
    def has_records(self) -> bool:
        """Whether there is something to read, as far as was distributed."""
        return bool(self.records)

    @property
    def waiting(self) -> bool:
        """Whether there is something to read, by what the kernel knows now."""
        self._queue.distribute()
        return bool(self.records)

    def read(self) -> Iterator[Record]:
        """The records that wait now, in their order. What comes meanwhile is left: it might never end."""
        self._queue.distribute()
        for _ in range(len(self.records)):
            yield self.records.popleft()

    def close(self) -> None:
        """Ends all its watches. A second time has no effect."""
        self._queue.leave(self)

    def take_in(self, record: Record) -> bool:
        """Whether it was kept. For the queue alone."""
        if self._lost:
            return False
        if self.records and self.records[-1] == record and not record.mask & Mask.IGNORED:
            # The kernel leaves out what its queue ends with already; here another share's record may have come between.
            return False
        self._lost = record is _LOST or len(self.records) >= _MOST_RECORDS
        self.records.append(_LOST if self._lost else record)
        return True
