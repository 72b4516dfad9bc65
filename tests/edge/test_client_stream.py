"""Client streams end to end through the edge (behaviour A20, envd.md 10.3)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandgate_api.envd.v1 import process_pb2
from sandgate_errors import DeadlineExceeded, InvalidArgument, NotFound
from sandgate_testing import raw_http

PATH = "/process.Process/StreamInput"
VECTORS = json.loads((Path(__file__).parents[1] / "vectors/connect_frames.json").read_text())
START, DATA = (bytes.fromhex(vector["frame"]) for vector in VECTORS["requests"][1:])
SUCCESS = b"\0\0\0\0\2{}\2\0\0\0\2{}"
CHUNKED = {"Transfer-Encoding": "chunked"}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Sink:
    """An agent's side that takes everything."""

    def __init__(self) -> None:
        self.events: list[process_pb2.StreamInputRequest] = []
        self.arrived = asyncio.Condition()

    async def __call__(self, requests, _context):
        async for request in requests:
            async with self.arrived:
                self.events.append(request)
                self.arrived.notify_all()
        return process_pb2.StreamInputResponse()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(20), self.arrived:
            await self.arrived.wait_for(lambda: len(self.events) >= count)


async def test_input_of_an_sdk_arrives_in_order_and_is_answered_byte_for_byte(edge):
    edge.agent.on["StreamInput"] = sink = Sink()
    body = chunk(START) + chunk(DATA) + chunk(raw_http.envelope({"keepalive": {}})) + chunk(DATA) + b"0\r\n\r\n"
    reply = await edge.stream(PATH, body, transfer_encoding="chunked")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/connect+json")
    assert reply.body == SUCCESS
    assert [event.WhichOneof("event") for event in sink.events] == ["start", "data", "keepalive", "data"]
    assert sink.events[1].data.input.stdin == b"ab"


async def test_each_message_is_passed_on_while_the_client_still_sends(edge):
    edge.agent.on["StreamInput"] = sink = Sink()
    reader, writer = await edge.open_stream(PATH, chunk(START), CHUNKED)
    await sink.wait_for(1)
    for part in (DATA[:4], DATA[4:10], DATA[10:]):
        writer.write(chunk(part))
        await writer.drain()
    await sink.wait_for(2)
    writer.write(b"0\r\n\r\n")
    async with asyncio.timeout(20):
        assert b"\2\0\0\0\2{}" in await reader.read()
    writer.close()


async def test_end_frame_of_the_client_is_an_end(edge):
    edge.agent.on["StreamInput"] = sink = Sink()
    reply = await edge.stream(PATH, START + DATA + raw_http.envelope(b"{}", flags=2))
    assert reply.body == SUCCESS
    assert len(sink.events) == 2


@pytest.mark.parametrize("error", [NotFound("process with pid 42 not found"), DeadlineExceeded("too late")])
async def test_error_of_the_agent_is_told_while_the_client_still_sends(edge, error):
    async def refuse(requests, _context):
        async for _ in requests:
            raise error

    edge.agent.on["StreamInput"] = refuse
    reader, writer = await edge.open_stream(PATH, chunk(START), CHUNKED)
    async with asyncio.timeout(20):
        assert error.message.encode() in await reader.readuntil(b"}}")
    writer.close()


@pytest.mark.parametrize(
    "body",
    [
        START + DATA[:-1],
        START + raw_http.envelope(b"{"),
        START + raw_http.envelope({"data": {"input": {"stdin": "!"}}}),
    ],
    ids=["cut", "no json", "no base64"],
)
async def test_broken_message_is_an_error_and_ends_the_agents_side(edge, body):
    edge.agent.on["StreamInput"] = Sink()
    reply = await edge.stream(PATH, body)
    assert (reply.status, reply.end_error["code"]) == (200, "invalid_argument")
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_data_before_start_is_the_agents_error_and_no_crash(edge):
    async def strict(requests, _context):
        async for request in requests:
            if request.WhichOneof("event") != "start":
                raise InvalidArgument("the first message must be start")

    edge.agent.on["StreamInput"] = strict
    reply = await edge.stream(PATH, DATA)
    assert (reply.status, reply.end_error["code"]) == (200, "invalid_argument")


async def test_client_that_goes_away_ends_the_call_to_the_agent(edge):
    edge.agent.on["StreamInput"] = sink = Sink()
    _, writer = await edge.open_stream(PATH, chunk(START), CHUNKED)
    await sink.wait_for(1)
    writer.close()
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_killed_sandbox_resets_a_waiting_stream_or_says_502(edge):
    edge.agent.on["StreamInput"] = sink = Sink()
    reader, writer = await edge.open_stream(PATH, chunk(START), CHUNKED)
    await sink.wait_for(1)
    edge.core.sandboxes.clear()
    await edge.agent.stop()
    # Nothing was answered yet, so the end of the sandbox can be told in full.
    assert b"502 Bad Gateway" in await asyncio.wait_for(reader.readline(), 20)
    writer.close()
