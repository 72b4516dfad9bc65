"""The edge's channels to the agents of sandboxes.

A channel is kept for the next request to the same sandbox: a new one costs more than the whole call. Their number is
bounded; the one that was idle longest goes first, and one in use never. Where a sandbox is another core's, the target is
that core, whose relay wants other credentials (docs/architecture.md, metadata); one channel serves all its sandboxes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import filesystem_pb2_grpc, process_pb2_grpc
from sandgate_edge.core_client import MAX_METADATA_BYTES, Located
from sandgate_edge.rest.file_parts import Part, part_of
from sandgate_errors import SandgateError
from sandgate_errors.grpc import from_status
from sandgate_tracing import Tracing

__all__ = ["Agents", "ReadFile", "error_of"]

ReadFile: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[agent_pb2.ReadFileRequest, Part]"

_MAX_CHANNELS = 1024
# An agent ends its side of a stream right after the last message.
_LAST_WORD_SECONDS = 1.0
# Room for what surrounds the largest payload: field tags, a second field, framing.
_SLACK_BYTES = 1024 * 1024
_READ_FILE = "/sandgate_api.agent.v1.Agent/ReadFile"
# Enough for a gigabyte a second in one data centre.
_READ_AHEAD_BYTES = 1024 * 1024
# A host that lost its power says nothing: without being asked, its connection looks well.
_TO_ANOTHER_HOST = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))


class Agents:
    """Stubs for the agent of a located sandbox, reached directly or by a core's relay."""

    def __init__(
        self,
        *,
        max_rpc_bytes: int,
        max_channels: int = _MAX_CHANNELS,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._max_channels = max_channels
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._options = (
            ("grpc.max_send_message_length", max_rpc_bytes + _SLACK_BYTES),
            ("grpc.max_receive_message_length", max_rpc_bytes + _SLACK_BYTES),
            # A piece of a file in one frame, not in thirty.
            ("grpc.http2.max_frame_size", 1024 * 1024),
            # What an agent may send ahead of its reader, on each stream. Left to itself the library measures how fast a
            # connection is and grows this to tens of megabytes, which a client that does not read then leaves here.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _READ_AHEAD_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # Shared subchannels would let one closed channel's back-off delay another's first call.
            ("grpc.use_local_subchannel_pool", 1),
        )

    def process(self, located: Located) -> process_pb2_grpc.ProcessAsyncStub:
        return self._line(located).process

    def filesystem(self, located: Located) -> filesystem_pb2_grpc.FilesystemAsyncStub:
        return self._line(located).filesystem

    def agent(self, located: Located) -> agent_pb2_grpc.AgentAsyncStub:
        return self._line(located).agent

    def read_file(self, located: Located) -> ReadFile:
        """``Agent.ReadFile``, whose content does not pass through protobuf."""
        return self._line(located).read_file

    def metadata(
        self,
        located: Located,
        *,
        request_id: str,
        acting_user: str | None = None,
        timeout_ms: str | None = None,
        keepalive: int | None = None,
    ) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of a call to the agent; None leaves a key out."""
        pairs: list[tuple[str, str | bytes]] = [("request-id", request_id)]
        if located.relayed:
            pairs += [("sandbox-id", located.sandbox.id), ("relay-token", located.agent_token)]
        else:
            pairs.append(("agent-token", located.agent_token))
        if acting_user is not None:
            pairs.append(("acting-user-bin", acting_user.encode()))
        if timeout_ms is not None:
            pairs.append(("timeout-ms", timeout_ms))
        if keepalive is not None:
            pairs.append(("keepalive-interval", str(keepalive)))
        return tuple(pairs)

    async def last_word(self, call: Any) -> None:
        """Where calls are traced: waits until the agent has told its part, which comes after its last message."""
        if self._tracing is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    await call.code()

    def forget(self, located: Located) -> None:
        """Lets go of the channel of an agent that is gone.

        Other calls on it find out by themselves: closing under them would look like a cancellation of their own.
        """
        if not located.relayed:
            self._retire(located.agent_target)

    async def close(self) -> None:
        """Ends everything: calls, channels, and the closing of those let go before."""
        await asyncio.gather(*(line.channel.close() for line in self._lines.values()), *self._closing)
        self._lines.clear()

    def _line(self, located: Located) -> _Line:
        line = self._lines.get(located.agent_target)
        if line is None:
            self._make_room()
            options = (*self._options, *_TO_ANOTHER_HOST) if located.relayed else self._options
            line = self._lines[located.agent_target] = _Line(located.agent_target, options, self._tracing)
        else:
            self._lines.move_to_end(located.agent_target)
        return line

    def _make_room(self) -> None:
        if len(self._lines) < self._max_channels:
            return
        idle = next((target for target, line in self._lines.items() if line.calls == 0), None)
        if idle is not None:
            self._retire(idle)

    def _retire(self, target: str) -> None:
        """Closes a channel once nothing runs on it."""
        line = self._lines.pop(target, None)
        if line is None:
            return
        if line.calls == 0:
            self._close_soon(line)
        else:
            line.when_idle = self._close_soon

    def _close_soon(self, line: _Line) -> None:
        # Closing awaits, and stubs are handed out where nothing can: these tasks live as long as the process.
        closing = asyncio.create_task(line.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class _Line:
    """One channel, its stubs, and the number of calls on it."""

    def __init__(self, target: str, options: tuple[tuple[str, int], ...], tracing: Tracing | None) -> None:
        self._tracing = tracing
        self.calls = 0
        self.when_idle: Callable[[_Line], None] | None = None
        self.channel = grpc.aio.insecure_channel(target, options=options)
        self.process: process_pb2_grpc.ProcessAsyncStub = self._counted(process_pb2_grpc.ProcessStub(self.channel))
        self.filesystem: filesystem_pb2_grpc.FilesystemAsyncStub = self._counted(
            filesystem_pb2_grpc.FilesystemStub(self.channel)
        )
        self.agent: agent_pb2_grpc.AgentAsyncStub = self._counted(agent_pb2_grpc.AgentStub(self.channel))
        self.read_file: ReadFile = self._watched(
            "ReadFile",
            self.channel.unary_stream(
                _READ_FILE,
                request_serializer=agent_pb2.ReadFileRequest.SerializeToString,
                response_deserializer=part_of,
            ),
        )

    def _counted(self, stub: Any) -> Any:
        for name, method in vars(stub).items():
            setattr(stub, name, self._watched(name, method))
        return stub

    def _watched(self, name: str, method: Callable[..., Any]) -> Any:
        counted = self._counting(method)
        return counted if self._tracing is None else self._traced(name, counted, self._tracing)

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            call = method(*args, **kwargs)
            self.calls += 1
            call.add_done_callback(self._ended)
            return call

        return begin

    def _traced(self, name: str, method: Callable[..., Any], tracing: Tracing) -> Callable[..., Any]:
        def begin(*args: Any, metadata: tuple[tuple[str, str | bytes], ...], **kwargs: Any) -> Any:
            outgoing = tracing.outgoing(f"agent {name}")
            call = method(*args, metadata=(*metadata, *outgoing.metadata), **kwargs)
            outgoing.follow(call)
            return call

        return begin

    def _ended(self, _call: object) -> None:
        self.calls -= 1
        if self.calls == 0 and self.when_idle is not None:
            self.when_idle(self)


def error_of(error: grpc.aio.AioRpcError) -> SandgateError:
    """What the agent raised. A broken connection is not among it: ``routing.lost`` finds out what that means."""
    return from_status(error.code(), error.details() or "", error.trailing_metadata())
