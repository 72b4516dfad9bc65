"""``envd.v1.Filesystem``: messages to and from :mod:`sandgate_agent.files`. File work runs in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_agent import files
from sandgate_agent.accounts import Account, OwnerNames
from sandgate_agent.calls import Call, Method, ServerStream, Unary
from sandgate_agent.entries import Entry
from sandgate_agent.paths import resolve
from sandgate_agent.sandbox import Sandbox
from sandgate_agent.watch import Event
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_errors import DeadlineExceeded, InvalidArgument

__all__ = ["FilesystemService", "Watch", "Watchers", "entry_info", "fill", "in_thread", "timestamp"]

T = TypeVar("T")

_START = pb.WatchDirResponse(start=pb.WatchDirResponse.StartEvent())
_KEEPALIVE = pb.WatchDirResponse(keepalive=pb.WatchDirResponse.KeepAlive())


class Watch(Protocol):
    """One watched tree (:class:`sandgate_agent.watch.Watch`)."""

    async def readable(self) -> None:
        """Returns when there is something to read."""

    async def read(self) -> None:
        """Take over all that has happened."""

    def take(self) -> list[Event]:
        """The events so far, once."""


W = TypeVar("W", bound=Watch)


class Watchers(Protocol[W]):
    """All of them (:class:`sandgate_agent.watch.Watchers`)."""

    async def open(self, path: str, *, recursive: bool, network_mounts: bool, entries_by: OwnerNames | None) -> W:
        """A new one, which belongs to the caller until it is added or released."""

    def release(self, watch: W) -> None:
        """Free it."""

    def add(self, watch: W) -> str:
        """Keep it under a name."""

    async def events(self, watcher_id: str) -> list[Event]:
        """What has happened since the last call."""

    def remove(self, watcher_id: str) -> None:
        """Free one that has a name."""


class FilesystemService:
    """Handlers; the rules stand in :mod:`sandgate_agent.files`."""

    name = "sandgate_api.envd.v1.Filesystem"

    def __init__(self, sandbox: Sandbox, watchers: Watchers[Any]) -> None:
        self._sandbox = sandbox
        self._watchers = watchers

    def methods(self) -> Mapping[str, Method]:
        return {
            "Stat": Unary(pb.StatRequest, self.stat),
            "MakeDir": Unary(pb.MakeDirRequest, self.make_dir),
            "Move": Unary(pb.MoveRequest, self.move),
            "ListDir": Unary(pb.ListDirRequest, self.list_dir),
            "Remove": Unary(pb.RemoveRequest, self.remove),
            "WatchDir": ServerStream(pb.WatchDirRequest, self.watch_dir),
            "CreateWatcher": Unary(pb.CreateWatcherRequest, self.create_watcher),
            "GetWatcherEvents": Unary(pb.GetWatcherEventsRequest, self.get_watcher_events),
            "RemoveWatcher": Unary(pb.RemoveWatcherRequest, self.remove_watcher),
        }

    async def stat(self, request: pb.StatRequest, call: Call) -> pb.StatResponse:
        account = self._sandbox.acting(call.acting_user)
        path = self._resolve(request.path, account)
        entry = await asyncio.to_thread(files.stat_entry, path, self._names(account))
        return pb.StatResponse(entry=entry_info(entry))

    async def make_dir(self, request: pb.MakeDirRequest, call: Call) -> pb.MakeDirResponse:
        account = self._sandbox.acting(call.acting_user)
        path = self._resolve(request.path, account)
        entry = await asyncio.to_thread(files.make_directory, path, self._owner(account), self._names(account))
        return pb.MakeDirResponse(entry=entry_info(entry))

    async def move(self, request: pb.MoveRequest, call: Call) -> pb.MoveResponse:
        account = self._sandbox.acting(call.acting_user)
        source = self._resolve(request.source, account)
        destination = self._resolve(request.destination, account)
        entry = await asyncio.to_thread(files.move, source, destination, self._owner(account), self._names(account))
        return pb.MoveResponse(entry=entry_info(entry))

    async def list_dir(self, request: pb.ListDirRequest, call: Call) -> pb.ListDirResponse:
        account = self._sandbox.acting(call.acting_user)
        path = self._resolve(request.path, account)
        names = self._names(account)

        def work(cancelled: Callable[[], bool]) -> pb.ListDirResponse:
            entries = files.list_directory(path, request.depth or 1, names, cancelled=cancelled)
            response = pb.ListDirResponse()
            for entry in entries:
                fill(response.entries.add(), entry)
            return response

        return await in_thread(work)

    async def remove(self, request: pb.RemoveRequest, call: Call) -> pb.RemoveResponse:
        account = self._sandbox.acting(call.acting_user)
        if not request.path:
            raise InvalidArgument("the path of what to remove is empty")
        await asyncio.to_thread(files.remove, self._resolve(request.path, account))
        return pb.RemoveResponse()

    async def watch_dir(self, request: pb.WatchDirRequest, call: Call) -> None:
        account = self._sandbox.acting(call.acting_user)
        limit = call.limit()
        try:
            async with asyncio.timeout(limit) as bound:
                watch = await self._open_watch(request, account)
                try:
                    await _follow(watch, call)
                finally:
                    self._watchers.release(watch)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded(f"the watch ran into its time limit of {limit:g} s") from None

    async def create_watcher(self, request: pb.CreateWatcherRequest, call: Call) -> pb.CreateWatcherResponse:
        watch = await self._open_watch(request, self._sandbox.acting(call.acting_user))
        return pb.CreateWatcherResponse(watcher_id=self._watchers.add(watch))

    async def get_watcher_events(self, request: pb.GetWatcherEventsRequest, call: Call) -> pb.GetWatcherEventsResponse:
        self._sandbox.check_named(call.acting_user)
        events = await self._watchers.events(request.watcher_id)
        return pb.GetWatcherEventsResponse(events=map(_event_message, events))

    async def remove_watcher(self, request: pb.RemoveWatcherRequest, call: Call) -> pb.RemoveWatcherResponse:
        self._sandbox.check_named(call.acting_user)
        self._watchers.remove(request.watcher_id)
        return pb.RemoveWatcherResponse()

    async def _open_watch(self, request: pb.WatchDirRequest | pb.CreateWatcherRequest, account: Account) -> Watch:
        watch: Watch = await self._watchers.open(
            self._resolve(request.path, account),
            recursive=request.recursive,
            network_mounts=request.allow_network_mounts,
            entries_by=self._names(account) if request.include_entry else None,
        )
        return watch

    def _resolve(self, path: str, account: Account) -> str:
        return resolve(path, account, default=self._sandbox.default_workdir)

    def _owner(self, account: Account) -> files.Owner:
        return (account.uid, account.gid) if self._sandbox.accounts.owns_files else None

    def _names(self, account: Account) -> OwnerNames:
        return OwnerNames(self._sandbox.accounts, account)


async def _follow(watch: Watch, call: Call) -> None:
    """Send events as they come. A caller that does not read leaves them in the kernel's queue, which is bounded (F46)."""
    interval = call.keepalive()
    await call.send(_START)
    while True:
        try:
            async with asyncio.timeout(interval) as quiet:
                await watch.readable()
        except TimeoutError:
            if not quiet.expired():
                raise
            await call.send(_KEEPALIVE)
            continue
        await watch.read()
        for event in watch.take():
            await call.send(pb.WatchDirResponse(filesystem=_event_message(event)))


def _event_message(event: Event) -> pb.FilesystemEvent:
    entry = None if event.entry is None else entry_info(event.entry)
    return pb.FilesystemEvent(name=event.name, type=event.kind, entry=entry)  # type: ignore[arg-type]


async def in_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Long work that stops by itself when its caller has gone: a thread cannot be cancelled."""
    gone = False
    try:
        return await asyncio.to_thread(work, lambda: gone)
    finally:
        gone = True


#: What a Timestamp can say: the years 1 to 9999. File systems go further, and anybody may set a file's time.
_EARLIEST, _LATEST = -62_135_596_800, 253_402_300_799


def timestamp(nanoseconds: int) -> Timestamp:
    message = Timestamp()
    _set_time(message, nanoseconds)
    return message


def _set_time(message: Timestamp, nanoseconds: int) -> None:
    seconds, message.nanos = divmod(nanoseconds, 1_000_000_000)
    message.seconds = min(max(seconds, _EARLIEST), _LATEST)


def entry_info(entry: Entry) -> pb.EntryInfo:
    message = pb.EntryInfo()
    fill(message, entry)
    return message


def fill(message: pb.EntryInfo, entry: Entry) -> None:
    """In place: a listing is thousands of these, and making each first and copying it then takes three times as long."""
    message.name = entry.name
    message.type = int(entry.kind)  # type: ignore[assignment]
    message.path = entry.path
    message.size = entry.size
    message.mode = entry.mode
    message.permissions = entry.permissions
    message.owner = entry.owner
    message.group = entry.group
    _set_time(message.modified_time, entry.modified_ns)
    if entry.symlink_target is not None:
        message.symlink_target = entry.symlink_target
    if entry.metadata is not None:
        message.metadata.update(entry.metadata)
    message.is_symlink = entry.is_symlink
