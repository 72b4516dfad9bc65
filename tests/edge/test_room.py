"""Large messages share a room, so that any number of them that are begun and never finished takes only so much memory."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_edge.keys import ROOM
from sandgate_edge.room import Room
from sandgate_errors import ResourceExhausted
from sandgate_testing import raw_http

STAT = "/filesystem.Filesystem/Stat"
START = "/process.Process/Start"
LIMIT = 100_000
#: As many as have room, each nearly as large as one may be.
MANY, PART = 8, 99_000


async def stat(request, _context):
    return filesystem_pb2.StatResponse(entry=filesystem_pb2.EntryInfo(path=request.path))


async def start(_request, _context):
    yield process_pb2.StartResponse(event=process_pb2.ProcessEvent(end=process_pb2.ProcessEvent.EndEvent(exited=True)))


async def silent(_request, _context):
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def begun(edge, path, kind, body):
    """Requests whose bodies never end, when all have their room: one that comes while another asks could be refused."""
    headers = {"Content-Type": kind, "Transfer-Encoding": "chunked"}
    data = edge.request(path, headers=headers, body=b"%x\r\n%b\r\n" % (len(body), body))
    writers = []
    try:
        for _ in range(MANY):
            _, writer = await asyncio.open_connection(*edge.address)
            writers.append(writer)
            writer.write(data)
            await writer.drain()
        room = edge.server._runner.app[ROOM]
        async with asyncio.timeout(20):
            while room._free > MANY * (LIMIT - PART):  # noqa: ASYNC110 - the edge reads them in its own time
                await asyncio.sleep(0.02)
        yield
    finally:
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (STAT, "application/json", b'{"path":"' + b"x" * PART),
        (START, "application/connect+json", raw_http.envelope(b'{"path":"' + b"x" * PART, announced=LIMIT)),
        # Whole, and the end of the body is yet to come.
        (START, "application/connect+json", raw_http.envelope(b'{"later":"' + b"x" * PART + b'"}')),
        ("/process.Process/StreamInput", "application/connect+json", raw_http.envelope(b"x" * PART, announced=LIMIT)),
    ],
    ids=["unary", "envelope", "whole envelope", "client stream"],
)
async def test_one_more_is_told_to_come_again_and_small_ones_pass(edge, path, kind, body):
    edge.agent.on |= {"Stat": stat, "Start": start, "StreamInput": silent}
    large = b'{"path":"' + b"x" * PART + b'"}'
    async with begun(edge, path, kind, body):
        refused = await edge.unary(STAT, large)
        assert refused.status == 429
        assert refused.json() == {"code": "resource_exhausted", "message": "too many large messages are under way"}
        assert (refused.headers["should-retry"], refused.headers["retry-after"]) == ("true", "1")
        assert (await edge.unary(STAT, b'{"path":"/x"}')).status == 200
    # Those who gave up have given their room back.
    async with asyncio.timeout(20):
        while (await edge.unary(STAT, large)).status != 200:  # noqa: ASYNC110 - so does a client
            await asyncio.sleep(0.02)


async def test_a_stream_keeps_no_room_for_its_request(edge):
    going_on = asyncio.Event()

    async def lasting(_request, _context):
        yield process_pb2.StartResponse(
            event=process_pb2.ProcessEvent(start=process_pb2.ProcessEvent.StartEvent(pid=1))
        )
        await going_on.wait()

    edge.agent.on |= {"Stat": stat, "Start": lasting}
    message = raw_http.envelope(b'{"later":"' + b"x" * PART + b'"}')
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MANY):
            reader, writer = await edge.open_stream(START, message)
            stack.callback(writer.close)
            async with asyncio.timeout(20):
                await reader.readuntil(b"\r\n\r\n")
        assert (await edge.unary(STAT, b'{"path":"' + b"x" * PART + b'"}')).status == 200
        going_on.set()


def test_a_place_holds_what_was_said_last_and_frees_it_at_its_end():
    room = Room(64_000)
    with room.place() as first, room.place() as second, room.place() as third:
        first.hold(8 * 64_000)
        with pytest.raises(ResourceExhausted):
            second.hold(1_001)
        second.hold(1_000)  # the usual size needs no room
        first.hold(7 * 64_000)
        second.hold(64_000)
        with pytest.raises(ResourceExhausted):
            third.hold(64_000)
        first.hold(0)
        third.hold(64_000)
    with room.place() as place:
        place.hold(8 * 64_000)
