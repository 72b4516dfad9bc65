"""The agent's services where execd does the work: what differs from those in a sandbox (``sandgate_agent.services``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sandgate_agent.accounts import Account, Accounts
from sandgate_agent.calls import Call
from sandgate_agent.metrics import Usage
from sandgate_agent.paths import resolve
from sandgate_agent.sandbox import Sandbox
from sandgate_agent.services.agent import AgentService
from sandgate_agent.services.filesystem import FilesystemService, entry_info, fill, timestamp
from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_errors import Internal, InvalidArgument, Unauthenticated, Unimplemented
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.records import Records
from sandgate_plugin_opensandbox.by_execd.tree import Tree
from sandgate_plugin_opensandbox.by_execd.watching import PollingWatchers

__all__ = ["FarAgentService", "FarFilesystemService", "OneAccount", "measure"]

_MEBIBYTE = 1024 * 1024
#: Of what execd may say it measures: milliseconds until the year 9999, processors, mebibytes.
_LATEST = 253_402_300_799_000.0
_MOST_CPUS = 65_536.0
_MOST_MEMORY = 2.0**40


class OneAccount(Accounts):
    """execd's own: it starts nothing as anybody else."""

    def __init__(self, account: Account) -> None:
        super().__init__("same", {account.name: account.home})
        self.account = account

    def find(self, name: str) -> Account:
        if name != self.account.name:
            raise Unauthenticated(
                f"user '{name}' cannot be had: without an agent in the sandbox everything is done as '{self.account.name}'"
            )
        return self.account


class FarFilesystemService(FilesystemService):
    """Handlers; the rules stand in :mod:`sandgate_plugin_opensandbox.by_execd.tree`. Watching is as everywhere."""

    def __init__(self, sandbox: Sandbox, tree: Tree) -> None:
        super().__init__(sandbox, PollingWatchers(tree))
        self._tree = tree

    async def stat(self, request: filesystem_pb2.StatRequest, call: Call) -> filesystem_pb2.StatResponse:
        return filesystem_pb2.StatResponse(entry=entry_info(await self._tree.stat(self._path(request.path, call))))

    async def make_dir(self, request: filesystem_pb2.MakeDirRequest, call: Call) -> filesystem_pb2.MakeDirResponse:
        made = await self._tree.make_directory(self._path(request.path, call))
        return filesystem_pb2.MakeDirResponse(entry=entry_info(made))

    async def move(self, request: filesystem_pb2.MoveRequest, call: Call) -> filesystem_pb2.MoveResponse:
        source, destination = self._path(request.source, call), self._path(request.destination, call)
        return filesystem_pb2.MoveResponse(entry=entry_info(await self._tree.move(source, destination)))

    async def list_dir(self, request: filesystem_pb2.ListDirRequest, call: Call) -> filesystem_pb2.ListDirResponse:
        entries = await self._tree.list(self._path(request.path, call), request.depth or 1)

        def answer() -> filesystem_pb2.ListDirResponse:
            response = filesystem_pb2.ListDirResponse()
            for entry in entries:
                fill(response.entries.add(), entry)
            return response

        # Of many entries it takes long, and all sandboxes have this gateway.
        return await asyncio.to_thread(answer)

    async def remove(self, request: filesystem_pb2.RemoveRequest, call: Call) -> filesystem_pb2.RemoveResponse:
        path = self._path(request.path, call)
        if not request.path:
            raise InvalidArgument("the path of what to remove is empty")
        await self._tree.remove(path)
        return filesystem_pb2.RemoveResponse()

    def _path(self, path: str, call: Call) -> str:
        return self._resolve(path, self._sandbox.acting(call.acting_user))


class FarAgentService(AgentService):
    """Handlers; content goes through :mod:`sandgate_plugin_opensandbox.by_execd.tree`."""

    def __init__(self, sandbox: Sandbox, account: Account, *, tree: Tree, records: Records, **parts: Any) -> None:
        super().__init__(sandbox, warm=lambda _: None, **parts)
        self._account = account
        self._tree = tree
        self._records = records

    async def init(self, request: agent_pb2.InitRequest, call: Call) -> agent_pb2.InitResponse:
        response = await super().init(request, call)
        await self._records.keep_identity(
            {
                "sandbox_id": request.sandbox_id,
                "template_id": request.template_id,
                "envs": dict(request.envs),
                "default_user": request.default_user,
                "default_workdir": request.default_workdir,
                "log_commands": int(request.log_commands),
            }
        )
        return response

    def introduce(self, request: agent_pb2.InitRequest) -> None:
        named = agent_pb2.InitRequest()
        named.CopyFrom(request)
        named.default_user = request.default_user or self._account.name
        super().introduce(named)

    def restore(self, identity: Mapping[str, Any]) -> None:
        """What an earlier gateway was told by Init."""
        try:
            self.introduce(agent_pb2.InitRequest(**identity))
        except (TypeError, ValueError, InvalidArgument):
            raise Internal("the sandbox's records are damaged") from None

    async def read_file(self, request: agent_pb2.ReadFileRequest, call: Call) -> None:
        path = self._path(request.path, call)
        length = request.length if request.HasField("length") else None
        if request.header_only:
            length = 0
        async with self._tree.read(path, offset=request.offset, length=length) as content:
            header = agent_pb2.ReadFileResponse.Header(
                path=path,
                name=os.path.basename(path),
                size=content.size,
                modified_time=timestamp(content.entry.modified_ns),
            )
            await call.send(agent_pb2.ReadFileResponse(header=header))
            async for piece in content.pieces:
                await call.send(agent_pb2.ReadFileResponse(data=piece))

    async def write_file(self, call: Call) -> agent_pb2.WriteFileResponse:
        requests = call.requests
        first = await anext(requests, None)
        if first is None or not first.HasField("header"):
            raise InvalidArgument("the first message of WriteFile must be a header")
        path = self._path(first.header.path, call)
        if first.header.metadata:
            raise Unimplemented("metadata of files takes an agent in the sandbox, which this backend does without")
        entry = await self._tree.write(path, _pieces(requests))
        return agent_pb2.WriteFileResponse(entry=entry_info(entry))

    def _path(self, path: str, call: Call) -> str:
        return resolve(path, self._sandbox.acting(call.acting_user), default=self._sandbox.default_workdir)


async def _pieces(requests: AsyncIterator[agent_pb2.WriteFileRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise InvalidArgument("a message of WriteFile after the first is not data")
        yield request.data


async def measure(client: Client) -> Usage:
    """What execd measures; it says nothing of disks."""
    found = await client.ask("GET", "metrics", what="what the sandbox uses")
    try:
        return Usage(
            time_ns=round(_number(found["timestamp"], _LATEST) * 1_000_000),
            cpu_count=max(1, round(_number(found["cpu_count"], _MOST_CPUS))),
            cpu_used_pct=_number(found["cpu_used_pct"], 100.0 * _MOST_CPUS),
            mem_total=round(_number(found["mem_total_mib"], _MOST_MEMORY) * _MEBIBYTE),
            mem_used=round(_number(found["mem_used_mib"], _MOST_MEMORY) * _MEBIBYTE),
            mem_cache=0,
            disk_used=0,
            disk_total=0,
        )
    except (LookupError, TypeError, ValueError, OverflowError):
        raise Internal("what execd measures cannot be read") from None


def _number(value: object, most: float) -> float:
    """Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not 0 <= value <= most:
        raise ValueError
    return float(value)
