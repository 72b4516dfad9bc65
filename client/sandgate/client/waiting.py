"""Carries out the steps of the client's logic with the asynchronous gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from sandgate.client.address import Address
from sandgate.client.exceptions import exception_of
from sandgate.client.faults import fault_of
from sandgate.client.steps import OPTIONS, Ask, Effect, NoAnswer, Open, Read, Sleep, Steps, Upload
from sandgate_errors import FailedPrecondition, SandgateError

__all__ = ["AsyncCore"]

_Result = TypeVar("_Result")


class AsyncCore:
    """A connection to one core, for the event loop that it was made in."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._closed = False
        self._channel = grpc.aio.insecure_channel(address.target, options=OPTIONS)

    async def run(self, steps: Steps[_Result]) -> _Result:
        """The result of ``steps``. Raises SandboxException."""
        try:
            return await self._run(steps)
        except SandgateError as error:
            raise exception_of(error) from error
        finally:
            steps.close()

    async def close(self) -> None:
        """End every call that is under way. A second time does nothing."""
        self._closed = True
        await self._channel.close()

    async def _run(self, steps: Steps[_Result]) -> _Result:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = await self._carry_out(effect)
                except SandgateError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration as end:
            result: _Result = end.value
            return result

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Read):
            assert isinstance(effect.stream, _Stream)  # noqa: S101 - made by this driver's own Open
            return await effect.stream.read(effect.timeout)
        if self._closed:
            raise FailedPrecondition("the connection of this sandbox object was closed")
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Open):
            return self._open(effect)
        return await self._ask(effect)

    def _open(self, effect: Open) -> _Stream:
        call: Any = self._channel.unary_stream(
            effect.method.path, type(effect.request).SerializeToString, effect.method.reply.FromString
        )
        return _Stream(call(effect.request, metadata=self._metadata(effect)), self._address)

    async def _ask(self, effect: Ask | Upload) -> Any:
        path, parse = effect.method.path, effect.method.reply.FromString
        metadata = self._metadata(effect)
        try:
            if isinstance(effect, Upload):
                # Each request knows best how it is written.
                uploading: Any = self._channel.stream_unary(path, lambda request: request.SerializeToString(), parse)
                return await uploading(_requests(effect), metadata=metadata, timeout=effect.timeout)
            asking: Any = self._channel.unary_unary(path, type(effect.request).SerializeToString, parse)
            return await asking(effect.request, metadata=metadata, timeout=effect.timeout)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from error

    def _metadata(self, effect: Ask | Upload | Open) -> Any:
        return (*self._address.credentials, *effect.metadata)


async def _requests(upload: Upload) -> AsyncIterator[Message]:
    requests = iter(upload.requests)
    while True:
        request = await asyncio.to_thread(next, requests, None) if upload.blocking else next(requests, None)
        if request is None:
            return
        yield request


class _Stream:
    """Replies of one call. One task reads at a time; any may close."""

    def __init__(self, call: Any, address: Address) -> None:
        self._call = call
        self._address = address
        #: A read whose reader was cancelled: the next one takes it over. gRPC ends the whole call with a cancelled read.
        self._reading: asyncio.Task[Any] | None = None

    async def read(self, timeout: float | None) -> Any:
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
            # Nobody may come back for it after a close, and then its error is nobody's.
            self._reading.add_done_callback(_take_notice)
        done, _ = await asyncio.wait({self._reading}, timeout=timeout)
        if not done:
            self.close()
            raise NoAnswer("the request was not answered in time")
        reading, self._reading = self._reading, None
        try:
            message = reading.result()
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from error
        except asyncio.CancelledError:
            # Not our own cancellation, which would have ended the wait: somebody closed the stream.
            raise fault_of(grpc.StatusCode.CANCELLED, None, None, target=self._address.target) from None
        return None if message is grpc.aio.EOF else message

    def close(self) -> None:
        self._call.cancel()


def _take_notice(reading: asyncio.Task[Any]) -> None:
    if not reading.cancelled():
        reading.exception()


def _translated(error: grpc.aio.AioRpcError, address: Address) -> SandgateError:
    return fault_of(error.code(), error.details(), error.trailing_metadata(), target=address.target)
