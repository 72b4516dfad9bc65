"""The end of an edge: what is under way is answered, what comes is sent away with a time to ask again, streams are reset."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_testing import raw_http

pytestmark = pytest.mark.timeout(60)
#: Of any end, with room for a slow machine; the edge's own bounds are 5 s and 1 s.
BOUND = 20
STAT = "/filesystem.Filesystem/Stat"
START = raw_http.envelope({"process": {"cmd": "sleep", "args": ["9"]}})
JSON = {"Content-Type": "application/json"}


class Gate:
    """Holds every Stat at the agent until it is opened."""

    def __init__(self, edge):
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        edge.agent.on["Stat"] = self._stat

    async def _stat(self, _request, _context):
        self.reached.set()
        await self.open.wait()
        return filesystem_pb2.StatResponse(entry=filesystem_pb2.EntryInfo(name="a", path="/a"))


@asynccontextmanager
async def draining(edge):
    """An edge at its end, held up by one call that is under way: the gate, the call's answer, and the end."""
    gate = Gate(edge)
    asking = asyncio.create_task(edge.unary(STAT, b'{"path":"a"}'))
    await gate.reached.wait()
    ending = asyncio.create_task(edge.server.close())
    await asyncio.sleep(0)
    try:
        yield gate, asking, ending
    finally:
        gate.open.set()
        async with asyncio.timeout(BOUND):
            await asyncio.gather(asking, ending)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v2/sandboxes", {"method": "GET", "sandbox": None}),
        ("/sandboxes/iopen", {"method": "DELETE", "sandbox": None}),
        ("/ready", {"method": "GET", "sandbox": None}),
        ("/files?path=a", {"method": "GET"}),
        (STAT, {"headers": JSON, "body": b'{"path":"a"}'}),
        ("/process.Process/Start", {"headers": {"Content-Type": "application/connect+json"}, "body": START}),
        ("/", {"method": "GET", "sandbox": None, "headers": {"Host": "3000-iopen.box.test"}}),
    ],
)
async def test_request_that_comes_then_is_told_when_to_ask_again(edge, path, asked):
    async with draining(edge):
        reply = await edge.ask(path, **asked)
    assert reply.status == 503
    assert reply.json() == {"code": 503, "message": "the gateway is stopping"}
    assert (reply.headers["retry-after"], reply.headers["should-retry"]) == ("2", "true")
    assert reply.headers["connection"] == "close"


async def test_call_that_is_under_way_is_answered_and_then_nobody_listens(edge):
    async with draining(edge) as (gate, asking, ending):
        await asyncio.sleep(0.2)
        assert not ending.done()
        gate.open.set()
        reply = await asking
        assert (reply.status, reply.json()["entry"]["path"]) == (200, "/a")
        await ending
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*edge.address)


async def test_connection_that_was_idle_gets_its_refusal_too(edge):
    reader, writer = await asyncio.open_connection(*edge.address)
    keep = {"Connection": "keep-alive"}
    writer.write(edge.request("/health", method="GET", sandbox=None, headers=keep))
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    async with draining(edge):
        writer.write(edge.request("/v2/sandboxes", method="GET", sandbox=None, headers=keep))
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    writer.close()


async def test_call_that_does_not_end_is_cut_off_in_bounded_time(edge):
    gate = Gate(edge)
    asking = asyncio.create_task(edge.unary(STAT, b'{"path":"a"}'))
    await gate.reached.wait()
    async with asyncio.timeout(BOUND):
        await edge.server.close()
        assert (await asking).status == 0


async def test_stream_is_reset_while_other_calls_go_on(edge):
    """R13: a reset, so that the client asks for health, which says that the sandbox is not gone."""

    async def start(_request, _context):
        yield process_pb2.StartResponse(
            event=process_pb2.ProcessEvent(start=process_pb2.ProcessEvent.StartEvent(pid=7))
        )
        await asyncio.Event().wait()

    edge.agent.on["Start"] = start
    reader, writer = await edge.open_stream("/process.Process/Start", START)
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    async with draining(edge) as (_, asking, _ending):
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert not asking.done()
        # Not that it is gone, which would be 502.
        assert (await edge.ask("/health", method="GET")).status == 204
    writer.close()


async def test_stream_that_has_not_begun_is_not_begun_any_more(edge):
    ending = []
    # Between the question where its sandbox is and the answer.
    edge.core.after_answer = lambda: ending.append(asyncio.create_task(edge.server.close()))
    async with asyncio.timeout(BOUND):
        reply = await edge.ask(
            "/process.Process/Start", headers={"Content-Type": "application/connect+json"}, body=START
        )
        await asyncio.gather(*ending)
    assert reply.status == 503
    assert edge.agent.requests == []


async def test_edge_without_work_ends_at_once(edge):
    _, writer = await asyncio.open_connection(*edge.address)
    async with asyncio.timeout(4):
        await edge.server.close()
    writer.close()
