"""``envd.v1.Filesystem``: messages to and from :mod:`sandgate_agent.files`. File work runs in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_agent import files
from sandgate_agent.accounts import Account, OwnerNames
from sandgate_agent.calls import Call, Method, ServerStream, Unary
from sandgate_agent.entries import Entry
from sandgate_agent.paths import resolve
from sandgate_agent.sandbox import Sandbox
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_errors import InvalidArgument, Unimplemented

__all__ = ["FilesystemService", "entry_info", "timestamp"]

T = TypeVar("T")


class FilesystemService:
    """Handlers; the rules stand in :mod:`sandgate_agent.files`."""

    name = "sandgate_api.envd.v1.Filesystem"

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def methods(self) -> Mapping[str, Method]:
        return {
            "Stat": Unary(pb.StatRequest, self.stat),
            "MakeDir": Unary(pb.MakeDirRequest, self.make_dir),
            "Move": Unary(pb.MoveRequest, self.move),
            "ListDir": Unary(pb.ListDirRequest, self.list_dir),
            "Remove": Unary(pb.RemoveRequest, self.remove),
            "WatchDir": ServerStream(pb.WatchDirRequest, _no_watching),
            "CreateWatcher": Unary(pb.CreateWatcherRequest, _no_watching),
            "GetWatcherEvents": Unary(pb.GetWatcherEventsRequest, _no_watching),
            "RemoveWatcher": Unary(pb.RemoveWatcherRequest, _no_watching),
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
            return pb.ListDirResponse(entries=[entry_info(entry) for entry in entries])

        return await _in_thread(work)

    async def remove(self, request: pb.RemoveRequest, call: Call) -> pb.RemoveResponse:
        account = self._sandbox.acting(call.acting_user)
        if not request.path:
            raise InvalidArgument("the path of what to remove is empty")
        await asyncio.to_thread(files.remove, self._resolve(request.path, account))
        return pb.RemoveResponse()

    def _resolve(self, path: str, account: Account) -> str:
        return resolve(path, account, default=self._sandbox.default_workdir)

    def _owner(self, account: Account) -> files.Owner:
        return (account.uid, account.gid) if self._sandbox.accounts.owns_files else None

    def _names(self, account: Account) -> OwnerNames:
        return OwnerNames(self._sandbox.accounts, account)


async def _no_watching(_request: object, _call: Call) -> NoReturn:
    raise Unimplemented("watching is not offered by this version of the agent")


async def _in_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Long work that stops by itself when its caller has gone: a thread cannot be cancelled."""
    gone = False
    try:
        return await asyncio.to_thread(work, lambda: gone)
    finally:
        gone = True


def timestamp(nanoseconds: int) -> Timestamp:
    return Timestamp(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def entry_info(entry: Entry) -> pb.EntryInfo:
    return pb.EntryInfo(
        name=entry.name,
        type=int(entry.kind),  # type: ignore[arg-type]
        path=entry.path,
        size=entry.size,
        mode=entry.mode,
        permissions=entry.permissions,
        owner=entry.owner,
        group=entry.group,
        modified_time=timestamp(entry.modified_ns),
        symlink_target=entry.symlink_target,
        metadata=entry.metadata,
        is_symlink=entry.is_symlink,
    )
