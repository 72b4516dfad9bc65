"""Channels from the core to the agents of sandboxes: for the first call to a new one, and for the relay.

A channel is shared by the calls that are under way and kept for a while after the last, because making one costs more
than a call. The number of idle ones is bounded; one in use is never closed for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import grpc
import structlog

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_core import clock
from sandgate_core.records import SandboxRecord
from sandgate_core.samples import Sample, percent
from sandgate_errors import Internal, SandboxUnreachable
from sandgate_plugin_api import AgentAddress
from sandgate_tracing import Tracing

__all__ = ["AGENT_TOKEN", "CHANNEL_OPTIONS", "MAX_MESSAGE_BYTES", "Agents", "LogCommands"]

#: Of which commands agents keep lines.
LogCommands: TypeAlias = Literal["none", "tagged", "all"]

AGENT_TOKEN = "agent-token"  # noqa: S105 - the name of a metadata key
#: Of one message, either way. Pieces of files and output are far smaller; a single input may be large.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
#: Seconds. A backend gives an agent that accepts calls, so Init is a round trip on the same machine or network.
_INIT_TIMEOUT = 10.0
#: Each sandbox is asked for measurements every few seconds; that must not cost a new connection each time.
_IDLE_CHANNELS = 1024
#: Of a channel from a core to an agent, or to another core.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # What a core calls is on this machine or in its cluster; a proxy from the environment is for the outside.
    ("grpc.enable_http_proxy", 0),
    # What is sent ahead of its reader, on each stream. Left to itself the library measures how fast a connection is and
    # grows this to tens of megabytes, which callers of the relay that do not read would leave here.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
    # Shared subchannels carry one sandbox's connection backoff over to the next one at the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_LOG_COMMANDS: Mapping[LogCommands, agent_pb2.LogCommands.ValueType] = {
    "none": agent_pb2.LOG_COMMANDS_NONE,
    "tagged": agent_pb2.LOG_COMMANDS_TAGGED,
    "all": agent_pb2.LOG_COMMANDS_ALL,
}
_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0
    #: To be closed when the last user is done.
    forgotten: bool = False


class Agents:
    """The channels, by target."""

    def __init__(self, tracing: Tracing | None = None, *, log_commands: LogCommands = "none") -> None:
        self._tracing = tracing
        self._log_commands = _LOG_COMMANDS[log_commands]
        #: Called with each agent that has been told whose it is.
        self.on_init: Callable[[str, AgentAddress], None] | None = None
        # Oldest use first.
        self._by_target: OrderedDict[str, _Shared] = OrderedDict()

    @asynccontextmanager
    async def channel(self, target: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to ``target``, open for as long as the block runs."""
        shared = self._by_target.get(target)
        if shared is None:
            shared = self._by_target[target] = _Shared(grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS))
        self._by_target.move_to_end(target)
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            if shared.forgotten and not shared.users:
                await shared.channel.close()
            await self._shrink()

    async def forget(self, target: str) -> None:
        """The agent at ``target`` is gone: close its channel, now or after the calls that still use it."""
        shared = self._by_target.pop(target, None)
        if shared is None:
            return
        shared.forgotten = True
        if not shared.users:
            await shared.channel.close()

    async def close(self) -> None:
        channels = [shared.channel for shared in self._by_target.values()]
        self._by_target.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def init(self, address: AgentAddress, record: SandboxRecord) -> None:
        """Tell a new agent whose sandbox it is in. Raises Internal when it does not answer as an agent does."""
        # Another one may have been there before, whose connection has not been seen to end so far.
        await self.forget(address.target)
        request = agent_pb2.InitRequest(
            sandbox_id=record.id,
            template_id=record.template_id,
            envs=record.envs,
            default_user=record.setup.default_user,
            default_workdir=record.setup.workdir,
            log_commands=self._log_commands,
        )
        async with self.channel(address.target) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)
            try:
                if self._tracing is None:
                    await stub.Init(request, timeout=_INIT_TIMEOUT, metadata=((AGENT_TOKEN, address.token),))
                else:
                    await self._tracing.call(
                        "agent Init",
                        stub.Init,
                        request,
                        metadata=((AGENT_TOKEN, address.token),),
                        timeout=_INIT_TIMEOUT,
                    )
            except grpc.aio.AioRpcError as error:
                _log.error("an agent refused Init", sandbox=record.id, code=error.code().name, details=error.details())
                raise Internal("the sandbox could not be started: its agent does not answer") from error
        if self.on_init is not None:
            self.on_init(record.id, address)

    async def answers(self, address: AgentAddress, *, patience: float) -> bool:
        """Whether the agent does its work, shown by a small piece of it."""
        try:
            await self.sample(address, patience=patience)
        except SandboxUnreachable as error:
            _log.warning("an agent does not answer", target=address.target, reason=error.message)
            return False
        return True

    async def sample(self, address: AgentAddress, *, patience: float) -> Sample:
        """What the sandbox uses now. Raises SandboxUnreachable."""
        async with self.channel(address.target) as channel:
            try:
                usage = await agent_pb2_grpc.AgentStub(channel).Metrics(
                    agent_pb2.MetricsRequest(), timeout=patience, metadata=((AGENT_TOKEN, address.token),)
                )
            except grpc.aio.AioRpcError as error:
                raise SandboxUnreachable(f"the agent does not measure: {error.code().name}") from error
        return Sample(
            # Not the agent's: what comes from a sandbox is not to be trusted with the order of things.
            at=clock.now(),
            cpu_count=usage.cpu_count,
            cpu_used_pct=percent(usage.cpu_used_pct),
            mem_total=usage.mem_total,
            mem_used=usage.mem_used,
            mem_cache=usage.mem_cache,
            disk_used=usage.disk_used,
            disk_total=usage.disk_total,
        )

    async def _shrink(self) -> None:
        idle = [target for target, shared in self._by_target.items() if not shared.users]
        for target in idle[: max(0, len(idle) - _IDLE_CHANNELS)]:
            await self.forget(target)
