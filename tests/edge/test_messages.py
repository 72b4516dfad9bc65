"""Large messages are read and written beside the event loop, so that nobody's request waits for somebody else's."""

from __future__ import annotations

import asyncio
import threading

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.connect.codec import JSON, Codec
from sandgate_edge.rpc.messages import decoded, encoded

LARGE = 200_000


class Waiting(Codec):
    """The real one, which answers only once the event loop has gone on."""

    name = JSON.name

    def __init__(self) -> None:
        self.gone_on = threading.Event()
        asyncio.get_running_loop().call_soon(self.gone_on.set)

    def decode(self, kind, data):
        assert self.gone_on.wait(20), "the event loop waits for this message"
        return JSON.decode(kind, data)

    def encode(self, message):
        assert self.gone_on.wait(20), "the event loop waits for this message"
        return JSON.encode(message)


async def test_large_message_holds_nobody_up():
    message = filesystem_pb2.StatRequest(path="x" * LARGE)
    data = JSON.encode(message)
    assert await encoded(Waiting(), message) == data
    assert await decoded(Waiting(), filesystem_pb2.StatRequest, data) == message


async def test_small_message_takes_no_thread(monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", None)
    message = filesystem_pb2.StatRequest(path="x")
    assert await decoded(JSON, filesystem_pb2.StatRequest, await encoded(JSON, message)) == message
