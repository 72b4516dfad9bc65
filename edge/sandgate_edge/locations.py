"""The edge's question before every request of the data plane, asked on one stream that stays open to the core.

Where a sandbox is, is never remembered here: each request asks anew. A stream makes that cheap, as it spares a gRPC call
with its metadata, its credentials and its end. Questions that come up while others are under way go together in the next
message. Whatever is not simply there is left to the call ``Locate``, and so is every error: an answer from here is a
sandbox that runs, or none. Specified by ``LocateStream`` in ``sandgate_api/core/v1/sandboxes.proto``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import structlog

from sandgate_api.core.v1 import sandboxes_pb2

__all__ = ["Locations", "Stream"]

Stream = grpc.aio.StreamStreamCall[sandboxes_pb2.LocateStreamRequest, sandboxes_pb2.LocateStreamResponse]

# The core answers from memory. One that does not is asked by the call, which waits as long as it may.
_ANSWER_SECONDS = 5.0
# Of one message, so that no answer comes near gRPC's limit of 4 MiB.
_MOST_QUESTIONS = 256

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Question:
    """Of one request."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.answer: asyncio.Future[sandboxes_pb2.LocateResponse | None] = asyncio.get_running_loop().create_future()

    def settle(self, answer: sandboxes_pb2.LocateResponse | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Locations:
    """One stream at a time, opened by ``begin`` when there is something to ask and none is open."""

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin = begin
        self._waiting: list[_Question] = []
        self._asked = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    async def find(self, sandbox_id: str) -> sandboxes_pb2.LocateResponse | None:
        """Where a sandbox that runs is; None when ``Locate`` must be asked."""
        question = _Question(sandbox_id)
        self._waiting.append(question)
        self._asked.set()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="locations")
        return await question.answer

    async def close(self) -> None:
        """Ends the stream; who still waits is sent to ``Locate``."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask(self) -> None:
        """The life of one stream: to its first failure, whatever that is."""
        stream: Stream | None = None
        under_way: list[_Question] = []
        try:
            stream = self._begin()
            while True:
                await self._asked.wait()
                under_way, self._waiting = self._waiting[:_MOST_QUESTIONS], self._waiting[_MOST_QUESTIONS:]
                if not self._waiting:
                    self._asked.clear()
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answers = await _exchange(stream, under_way)
                for question, answer in zip(under_way, answers, strict=True):
                    question.settle(answer if answer.HasField("agent") else None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ValueError) as error:
            # A restart of the core, most of all. Nothing is lost by it, so it is not worth more.
            _log.debug("the stream of locations ended", reason=type(error).__name__)
        finally:
            if stream is not None:
                stream.cancel()
            for question in (*under_way, *self._waiting):
                question.settle(None)
            self._waiting.clear()
            self._asked.clear()


async def _exchange(stream: Stream, questions: list[_Question]) -> list[sandboxes_pb2.LocateResponse]:
    """Raises ValueError when what came is no answer to these questions."""
    await stream.write(sandboxes_pb2.LocateStreamRequest(ids=[question.sandbox_id for question in questions]))
    reply = await stream.read()
    if not isinstance(reply, sandboxes_pb2.LocateStreamResponse) or len(reply.answers) != len(questions):
        raise ValueError("the core did not answer")
    return list(reply.answers)
