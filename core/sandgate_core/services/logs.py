"""``LogService``: what happened in a sandbox, changes of its state and what commands wrote, in the order of time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import logs_pb2, logs_pb2_grpc
from sandgate_core import clock
from sandgate_core.callers import current
from sandgate_core.command_logs import CommandLogs, Line
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.sandboxes import Sandboxes
from sandgate_core.states import State
from sandgate_core.store import Change
from sandgate_errors import InvalidArgument

__all__ = ["LogService"]

_LARGEST_LIMIT = 1000
#: Bytes of an answer; gRPC's own limit, and beyond what anybody reads at once.
_LARGEST_ANSWER = 4 * 1024 * 1024 - 64 * 1024


class LogService(logs_pb2_grpc.LogServiceServicer):
    """protobuf <-> the history of :class:`Sandboxes` and :class:`CommandLogs`."""

    def __init__(self, sandboxes: Sandboxes, logs: CommandLogs) -> None:
        self._sandboxes = sandboxes
        self._logs = logs

    async def GetLogs(self, request: logs_pb2.GetLogsRequest, context: Any) -> logs_pb2.GetLogsResponse:  # noqa: N802
        if not 1 <= request.limit <= _LARGEST_LIMIT:
            raise InvalidArgument(f"limit must be 1 to {_LARGEST_LIMIT}")
        if request.level not in logs_pb2.LogLevel.values():
            raise InvalidArgument(f"level {request.level} is not known")
        since = _instant(request.since) if request.HasField("since") else None
        until = _instant(request.until) if request.HasField("until") else None
        # The history first: it refuses who may not see the sandbox.
        changes = await self._sandboxes.questions.events(request.id, current())
        history = map(_of_change, reversed(changes) if request.backward else changes)
        answer = logs_pb2.GetLogsResponse()
        size = 0
        lines = self._logs.lines(parse_sandbox_id(request.id), since=since, until=until, backward=request.backward)
        async with aclosing(_merged(lines, _within(history, since, until), backward=request.backward)) as merged:
            async for line in merged:
                if line.level < request.level or request.search not in line.message:
                    continue
                size += line.ByteSize() + 8
                if size > _LARGEST_ANSWER:
                    break
                answer.lines.append(line)
                if len(answer.lines) == request.limit:
                    break
        return answer


async def _merged(
    written: AsyncIterator[Line], history: Iterator[tuple[int, logs_pb2.LogLine]], *, backward: bool
) -> AsyncGenerator[logs_pb2.LogLine, None]:
    """Both in one order; of the same time, a change of state before what was written."""
    pending = next(history, None)
    async for line in written:
        while pending is not None and (pending[0] > line.at if backward else pending[0] <= line.at):
            yield pending[1]
            pending = next(history, None)
        yield _of_line(line)
    while pending is not None:
        yield pending[1]
        pending = next(history, None)


def _within(
    history: Iterable[tuple[int, logs_pb2.LogLine]], since: int | None, until: int | None
) -> Iterator[tuple[int, logs_pb2.LogLine]]:
    return ((at, line) for at, line in history if (since is None or at >= since) and (until is None or at <= until))


def _of_change(change: Change) -> tuple[int, logs_pb2.LogLine]:
    return change.at, logs_pb2.LogLine(
        time=_timestamp(change.at),
        level=logs_pb2.LOG_LEVEL_ERROR if change.to == State.FAILED.value else logs_pb2.LOG_LEVEL_INFO,
        logger="sandgate",
        message=f"the sandbox is {change.to}: {change.note}",
        fields={"from": change.came_from or "", "to": change.to, "reason": change.note},
    )


def _of_line(line: Line) -> logs_pb2.LogLine:
    fields = {"pid": str(line.pid), "stream": line.stream, "tag": line.tag}
    return logs_pb2.LogLine(
        time=_timestamp(line.at),
        # Programs tell their progress on stderr as well as their errors.
        level=logs_pb2.LOG_LEVEL_INFO if line.stream in {"stdout", "pty"} else logs_pb2.LOG_LEVEL_WARN,
        logger="terminal" if line.stream == "pty" else "process",
        message=line.text,
        fields={name: value for name, value in fields.items() if value not in {"", "0"}},
    )


def _instant(timestamp: Timestamp) -> int:
    return int(timestamp.seconds) * clock.MICROSECONDS + int(timestamp.nanos) // 1_000


def _timestamp(microseconds: int) -> Timestamp:
    seconds, rest = divmod(microseconds, clock.MICROSECONDS)
    return Timestamp(seconds=seconds, nanos=rest * 1_000)
