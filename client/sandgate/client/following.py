"""Following one command to its end, over any number of connections (behaviour.md X11, X12).

Pieces of output are numbered by the agent. A handle notes the last number it gave out; when its connection breaks, the
next read attaches again from the number after it. So no byte comes twice, and none is missed while the agent retains it.
Where that cannot be shown, the handle fails and says so, and never goes on as if nothing were lost:

* the agent retains later pieces only (a gap), or does not number them at all;
* the pid belongs to another process by now (``incarnation``), or to none;
* the stream's pieces do not follow one another.

A sandbox that is paused is waited for and not woken (X19): the core is asked about it before its agent is called.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sandgate.client.limits import request_limit
from sandgate.client.process_calls import Program, Target
from sandgate.client.records import Output
from sandgate.client.sandbox_calls import is_paused
from sandgate.client.steps import Cut, NoAnswer, Open, Read, Sleep, Steps, Stream
from sandgate_api.envd.v1 import process_pb2 as pb
from sandgate_errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    SandboxNotFound,
    SandgateError,
    Unavailable,
    Unimplemented,
)

__all__ = ["End", "Following"]

#: Seconds to try to attach again before a gateway counts as gone; a restart takes a few.
_PATIENCE = 120.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
#: Seconds for one step of an attempt; a core that hangs is a reason for the next attempt.
_ATTEMPT = 10.0
#: Seconds between two looks at a paused sandbox.
_WHILE_PAUSED = 1.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How the process ended; ``error`` is None when it ended well."""

    exit_code: int
    error: str | None


class Following:
    """One process as a handle knows it. One reader at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stream: Stream | None = None
        self._incarnation = 0
        self._numbered = False
        #: What every further read fails with.
        self._failure: SandgateError | None = None
        self._being_read = False
        self.pid = 0
        #: The number of the last piece that was given out; 0: none yet, or the agent numbers nothing.
        self.last_seq = 0
        self.reconnects = 0
        self.end: End | None = None
        self.disconnected = False

    def start(self, program: Program, timeout: float | None) -> Steps[None]:
        """Start a process and follow it. An attempt that breaks off is not repeated: it may have started one."""
        try:
            yield from self._begin(self._target.start(program), timeout)
        except Cut as error:
            raise Cut(f"the command may run or not: {error.message}, before its start was known") from error
        except NoAnswer as error:
            raise DeadlineExceeded("the command may run or not: its start was not known in time") from error

    def connect(self, pid: int, from_seq: int | None, timeout: float | None) -> Steps[None]:
        """Follow a running process: from now on, or from a piece of output that is still retained (0: the first)."""
        start = yield from self._begin(self._target.connect(pid, from_seq), timeout)
        if not from_seq:
            return
        if not self._numbered:
            self.disconnect()
            raise Unimplemented("the agent of this sandbox does not number its output: leave out from_seq")
        if start.seq > from_seq:
            self.disconnect()
            raise _lost(from_seq, start.seq - 1)

    def _begin(self, opening: Open, timeout: float | None) -> Steps[pb.ProcessEvent.StartEvent]:
        stream: Stream = yield opening
        try:
            start = _start_of((yield Read(stream, request_limit(timeout))))
        except BaseException:
            # Also when the caller was interrupted: nobody would read this stream.
            stream.close()
            raise
        self._stream = stream
        self.pid = start.pid
        self.last_seq = max(0, start.seq - 1)
        self._numbered = start.seq > 0
        self._incarnation = start.incarnation
        return start

    def disconnect(self) -> None:
        """Stop following. The process goes on; a read that is under way ends."""
        self.disconnected = True
        if self._stream is not None:
            self._stream.close()

    def next(self) -> Steps[Output | None]:
        """The next piece of output; None when there is no more."""
        if self._being_read:
            raise FailedPrecondition("this handle is being read already")
        self._being_read = True
        try:
            return (yield from self._next())
        finally:
            self._being_read = False

    def _next(self) -> Steps[Output | None]:
        while self.end is None and not self.disconnected:
            if self._failure is not None:
                raise self._failure
            try:
                event = yield from self._event()
                output = None if event is None else self._taken(event)
            except SandgateError as error:
                if self.disconnected:
                    break
                self._fail(error)
                raise
            if output is not None:
                return output
        return None

    def _event(self) -> Steps[pb.ProcessEvent | None]:
        """The next event, on a new connection if need be; None when it has to be asked again."""
        if self._stream is None:
            self._stream = yield from self._attach_again()
        try:
            reply = yield Read(self._stream)
        except (Unavailable, SandboxNotFound) as error:
            # A paused sandbox is not found by calls to its agent; whether this one is gone, only the core tells.
            self._lose(error)
            return None
        if reply is None:
            # A stream that ends well ends with the process's end. Whoever closed this one did not know it.
            self._lose(Cut("the stream ended before the process"))
            return None
        event: pb.ProcessEvent = reply.event
        return event

    def _taken(self, event: pb.ProcessEvent) -> Output | None:
        kind = event.WhichOneof("event")
        if kind == "data":
            return self._piece(event.data)
        if kind == "end":
            self._ended(event.end)
        return None

    def _piece(self, data: pb.ProcessEvent.DataEvent) -> Output:
        if self._numbered:
            if data.seq != self.last_seq + 1:
                raise DataLoss(f"piece {data.seq} of the output came after piece {self.last_seq}")
            self.last_seq = data.seq
        which = data.WhichOneof("output")
        if which is None:
            raise Internal("the agent sent output of no stream")
        return Output(**{which: getattr(data, which)})

    def _ended(self, end: pb.ProcessEvent.EndEvent) -> None:
        if self._stream is not None:
            self._stream.close()
        if end.timed_out:
            raise DeadlineExceeded("the command ran into its time limit")
        self.end = End(exit_code=end.exit_code, error=end.error if end.HasField("error") else None)

    def _fail(self, error: SandgateError) -> None:
        self._failure = error
        if self._stream is not None:
            self._stream.close()

    def _lose(self, error: SandgateError) -> None:
        """The connection is gone: the next read attaches again, if that can be done without a loss."""
        if self.disconnected:
            return
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        if not self._numbered:
            if isinstance(error, SandboxNotFound):
                raise error
            raise Cut("the connection was lost, and this agent does not number its output") from error

    def _attach_again(self) -> Steps[Stream]:
        give_up = time.monotonic() + _PATIENCE
        pause = _FIRST_PAUSE
        while not self.disconnected:
            try:
                if (yield from self._is_paused()):
                    give_up = time.monotonic() + _PATIENCE
                    pause = _WHILE_PAUSED
                else:
                    return (yield from self._attach())
            except Unavailable as error:
                if time.monotonic() > give_up:
                    raise Cut(f"the connection was lost and did not come back within {_PATIENCE:g} s") from error
            yield Sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise Cut("the handle was disconnected")

    def _is_paused(self) -> Steps[bool]:
        try:
            return (yield from is_paused(self._target.sandbox_id, _ATTEMPT))
        except DeadlineExceeded as error:
            raise Cut("the core did not answer in time") from error

    def _attach(self) -> Steps[Stream]:
        stream: Stream = yield self._target.connect(self.pid, self.last_seq + 1)
        try:
            self._check_same((yield from self._answer(stream)))
        except BaseException:
            stream.close()
            raise
        self.reconnects += 1
        return stream

    def _answer(self, stream: Stream) -> Steps[pb.ProcessEvent.StartEvent]:
        try:
            return _start_of((yield Read(stream, _ATTEMPT)))
        except NoAnswer as error:
            raise Cut("the agent did not answer in time") from error
        except SandboxNotFound as error:
            raise Cut("the sandbox was paused meanwhile") from error
        except NotFound as error:
            raise NotFound(f"process {self.pid} ended while the connection was lost, how is not known") from error

    def _check_same(self, start: pb.ProcessEvent.StartEvent) -> None:
        if start.incarnation != self._incarnation:
            raise NotFound(f"pid {self.pid} belongs to another process by now")
        if start.seq != self.last_seq + 1:
            raise _lost(self.last_seq + 1, start.seq - 1)


def _lost(first: int, last: int) -> DataLoss:
    if last < first:
        return DataLoss("output may be lost: the agent does not say where it goes on")
    return DataLoss(f"output was lost: pieces {first} to {last} are not retained any more")


def _start_of(reply: Any) -> pb.ProcessEvent.StartEvent:
    event = None if reply is None else reply.event
    if event is None or event.WhichOneof("event") != "start":
        raise Internal("the agent did not begin with the process's start")
    start: pb.ProcessEvent.StartEvent = event.start
    return start
