"""Carries out the steps of the client's logic with the synchronous gRPC."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

import grpc

from sandgate.client.address import Address
from sandgate.client.exceptions import exception_of
from sandgate.client.faults import fault_of
from sandgate.client.steps import OPTIONS, Ask, Effect, NoAnswer, Open, Read, Sleep, Steps, Upload
from sandgate_errors import FailedPrecondition, SandgateError

__all__ = ["Core"]

_Result = TypeVar("_Result")


class Core:
    """A connection to one core. Any number of threads may use it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._closed = False
        self._channel = grpc.insecure_channel(address.target, options=OPTIONS)

    def run(self, steps: Steps[_Result]) -> _Result:
        """The result of ``steps``. Raises SandboxException."""
        try:
            return self._run(steps)
        except SandgateError as error:
            raise exception_of(error) from error
        finally:
            steps.close()

    def close(self) -> None:
        """End every call that is under way. A second time does nothing."""
        self._closed = True
        self._channel.close()

    def _run(self, steps: Steps[_Result]) -> _Result:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = self._carry_out(effect)
                except SandgateError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration as end:
            result: _Result = end.value
            return result

    def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Read):
            assert isinstance(effect.stream, _Stream)  # noqa: S101 - made by this driver's own Open
            return effect.stream.read(effect.timeout)
        if self._closed:
            raise FailedPrecondition("the connection of this sandbox object was closed")
        if isinstance(effect, Sleep):
            return time.sleep(effect.seconds)
        if isinstance(effect, Open):
            return self._open(effect)
        return self._ask(effect)

    def _open(self, effect: Open) -> _Stream:
        call = self._channel.unary_stream(
            effect.method.path, type(effect.request).SerializeToString, effect.method.reply.FromString
        )
        return _Stream(call(effect.request, metadata=self._metadata(effect)), self._address)

    def _ask(self, effect: Ask | Upload) -> Any:
        path, parse = effect.method.path, effect.method.reply.FromString
        metadata = self._metadata(effect)
        try:
            if isinstance(effect, Upload):
                # Each request knows best how it is written.
                uploading: Any = self._channel.stream_unary(path, lambda request: request.SerializeToString(), parse)
                return uploading(iter(effect.requests), metadata=metadata, timeout=effect.timeout)
            asking: Any = self._channel.unary_unary(path, type(effect.request).SerializeToString, parse)
            return asking(effect.request, metadata=metadata, timeout=effect.timeout)
        except grpc.RpcError as error:
            raise _translated(error, self._address) from error

    def _metadata(self, effect: Ask | Upload | Open) -> Any:
        return (*self._address.credentials, *effect.metadata)


class _Stream:
    """Replies of one call. One thread reads; any may close."""

    def __init__(self, call: Any, address: Address) -> None:
        self._call = call
        self._address = address
        self._expired = False

    def read(self, timeout: float | None) -> Any:
        # One that fired while the answer before was given out has cut this stream, which is another matter.
        self._expired = False
        timer = None if timeout is None else threading.Timer(timeout, self._expire)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            if self._expired:
                raise NoAnswer("the request was not answered in time") from None
            raise _translated(error, self._address) from error
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        self._call.cancel()

    def _expire(self) -> None:
        # gRPC's blocking streams cannot wait for a while only.
        self._expired = True
        self._call.cancel()


def _translated(error: grpc.RpcError, address: Address) -> SandgateError:
    # What a sync call raises is a Call too; grpc's own types do not say so.
    assert isinstance(error, grpc.Call)  # noqa: S101
    return fault_of(error.code(), error.details(), error.trailing_metadata(), target=address.target)
