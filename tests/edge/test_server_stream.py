"""Server streams end to end through the edge (behaviour W2, W10, R13, R14, T1, T8, O14, P32)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from pathlib import Path

import pytest

from sandgate_api.envd.v1 import process_pb2
from sandgate_edge.connect import COMPRESSED
from sandgate_errors import DeadlineExceeded, InvalidArgument
from sandgate_testing import raw_http

START = "/process.Process/Start"
TOKEN, LIMIT = "tok123", 100_000
VECTORS = json.loads((Path(__file__).parents[1] / "vectors/connect_frames.json").read_text())
REQUEST = bytes.fromhex(VECTORS["requests"][0]["frame"])
ANSWER = (
    b'\0\0\0\0\x1e{"event":{"start":{"pid":42}}}'
    b'\0\0\0\0\x24{"event":{"data":{"stdout":"aGkK"}}}'
    b'\0\0\0\0\x3a{"event":{"end":{"exited":true,"status":"exit status 0"}}}'
    b"\2\0\0\0\2{}"
)

Event = process_pb2.ProcessEvent


def response(**event: object) -> process_pb2.StartResponse:
    return process_pb2.StartResponse(event=Event(**event))


STARTED = response(start=Event.StartEvent(pid=42))


async def echo_hi(_request, _context):
    yield STARTED
    yield response(data=Event.DataEvent(stdout=b"hi\n"))
    yield response(end=Event.EndEvent(exited=True, status="exit status 0"))


async def endless(_request, _context):
    yield STARTED
    await asyncio.Event().wait()


async def test_command_of_an_sdk_is_answered_byte_for_byte(edge):
    edge.agent.on["Start"] = echo_hi
    reply = await edge.stream(START, REQUEST)
    assert reply.status == 200
    # With a charset one SDK refuses the stream.
    assert reply.headers["content-type"] == "application/connect+json"
    assert "content-encoding" not in reply.headers
    assert reply.body == ANSWER
    _, request = edge.agent.requests[0]
    assert (request.process.cmd, list(request.process.args)) == ("/bin/bash", ["-l", "-c", "echo hi"])
    assert request.HasField("stdin")
    assert not request.stdin


async def test_command_in_protobuf_is_answered_in_protobuf(edge):
    edge.agent.on["Start"] = echo_hi
    message = process_pb2.StartRequest(process=process_pb2.ProcessConfig(cmd="true")).SerializeToString()
    reply = await edge.stream(START, raw_http.envelope(message), kind="proto")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/connect+proto")
    *events, end = raw_http.envelopes(reply.body)
    assert [process_pb2.StartResponse.FromString(data).event.WhichOneof("event") for _, data in events] == [
        "start",
        "data",
        "end",
    ]
    assert end == (2, b"{}")


async def test_request_may_come_in_chunks_of_one_byte(edge):
    edge.agent.on["Start"] = echo_hi
    headers = {"Content-Type": "application/connect+json", "Transfer-Encoding": "chunked"}
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in REQUEST) + b"0\r\n\r\n"
    assert (await edge.ask(START, headers=headers, body=chunks)).body == ANSWER


async def test_compressed_request_is_read_when_announced(edge):
    edge.agent.on["Start"] = echo_hi
    body = raw_http.envelope(gzip.compress(REQUEST[5:]), flags=COMPRESSED)
    assert (await edge.stream(START, body, connect_content_encoding="gzip")).body == ANSWER
    refused = await edge.stream(START, body)
    assert (refused.status, refused.end_error["code"]) == (200, "invalid_argument")
    unknown = await edge.stream(START, body, connect_content_encoding="zstd")
    assert (unknown.status, unknown.end_error["code"]) == (200, "unimplemented")


async def test_first_event_is_there_while_the_command_runs(edge):
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST)
    async with asyncio.timeout(20):
        assert b'{"event":{"start":{"pid":42}}}' in await reader.readuntil(b"}}}")
    writer.close()


async def test_client_that_goes_away_ends_the_call_to_the_agent(edge):
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST)
    await reader.readuntil(b"}}}")
    assert not edge.agent.ended.is_set()
    writer.close()
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_client_that_goes_away_before_the_first_event_ends_the_call_as_well(edge):
    asked = asyncio.Event()

    async def silent(_request, _context):
        asked.set()
        await asyncio.Event().wait()
        yield STARTED

    edge.agent.on["Start"] = silent
    _, writer = await edge.open_stream(START, REQUEST)
    await asyncio.wait_for(asked.wait(), 20)
    writer.close()
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(edge):
    """Trap B08: no task, no open connection, no call on the agent's channel."""
    edge.agent.on["Start"] = endless
    writers = []
    for number in range(60):
        reader, writer = await edge.open_stream(START, REQUEST)
        writers.append(writer)
        if number % 3 == 1:
            await asyncio.sleep(0.001 * (number % 7))
        if number % 3 == 2:
            await reader.readuntil(b"}}}")
    for writer in writers:
        writer.close()
        await writer.wait_closed()

    def left() -> list[str]:
        coroutines = [str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return [name for name in coroutines if "RequestHandler" in name or "server_stream" in name]

    async with asyncio.timeout(30):
        while left():  # noqa: ASYNC110 - tasks have no event for their end
            await asyncio.sleep(0.05)
    assert (await edge.ask("/health", method="GET")).status == 204


async def test_slow_reader_holds_the_agent_back(edge):
    sent = 0

    async def flood(_request, _context):
        nonlocal sent
        yield STARTED
        while True:
            yield response(data=Event.DataEvent(stdout=b"x" * 32768))
            sent += 32768

    edge.agent.on["Start"] = flood
    reader, writer = await edge.open_stream(START, REQUEST)
    await reader.readuntil(b"}}}")
    before = -1
    async with asyncio.timeout(60):
        while before != sent:
            before = sent
            await asyncio.sleep(0.5)
    # Socket buffers and one gRPC window, not the memory of the edge.
    assert sent < 64 * 1024 * 1024
    writer.close()
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


@pytest.mark.parametrize("begun", [False, True])
async def test_error_of_the_agent_comes_in_the_end_frame(edge, begun):
    async def refuse(_request, _context):
        if begun:
            yield STARTED
        raise InvalidArgument("cwd '/no' does not exist")

    edge.agent.on["Start"] = refuse
    reply = await edge.stream(START, REQUEST)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/connect+json")
    assert reply.end_error == {"code": "invalid_argument", "message": "cwd '/no' does not exist"}
    assert len(raw_http.envelopes(reply.body)) == 1 + begun


async def test_time_limit_and_keepalive_are_the_agents_business(edge):
    async def overrun(_request, _context):
        yield STARTED
        raise DeadlineExceeded("the time limit passed")

    edge.agent.on["Start"] = overrun
    reply = await edge.stream(START, REQUEST, connect_timeout_ms="1500", keepalive_ping_interval="50")
    assert reply.end_error["code"] == "deadline_exceeded"
    metadata = edge.agent.metadata[0]
    assert (metadata["timeout-ms"], metadata["keepalive-interval"]) == ("1500", "50")


async def test_no_limit_and_an_unreadable_interval_are_left_out(edge):
    edge.agent.on["Start"] = echo_hi
    await edge.stream(START, REQUEST, connect_timeout_ms="0", keepalive_ping_interval="often")
    assert {"timeout-ms", "keepalive-interval"} & set(edge.agent.metadata[0]) == set()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (REQUEST[:-1], "invalid_argument"),
        (REQUEST[:3], "invalid_argument"),
        (REQUEST + REQUEST, "invalid_argument"),
        (raw_http.envelope(b"{"), "invalid_argument"),
        (raw_http.envelope(b"{}", flags=0x40), "invalid_argument"),
        (raw_http.envelope(b"{}", flags=2), "invalid_argument"),
        (raw_http.envelope(b"", announced=LIMIT + 1), "resource_exhausted"),
        (raw_http.envelope(b"x" * (LIMIT + 1)), "resource_exhausted"),
    ],
    ids=["empty", "cut payload", "cut prefix", "two", "no json", "flags", "end only", "announced", "large"],
)
async def test_broken_request_ends_in_the_end_frame_and_starts_nothing(edge, body, code):
    reply = await edge.stream(START, body)
    assert (reply.status, reply.end_error["code"]) == (200, code)
    assert edge.agent.requests == []


async def test_unreadable_limit_is_the_agents_to_refuse(edge):
    """P27, T4: it looks at the user first; what no metadata can carry does not pass."""

    async def refuse(_request, _context):
        raise InvalidArgument("the timeout is not a number")
        yield STARTED

    edge.agent.on["Start"] = refuse
    for header in ("x", "-1", "9" * 11, "1 2", "é"):
        reply = await edge.stream(START, REQUEST, connect_timeout_ms=header)
        assert (reply.status, reply.end_error["code"]) == (200, "invalid_argument")
    assert {metadata["timeout-ms"] for metadata in edge.agent.metadata} == {"unreadable"}


async def test_refusals_in_front_of_the_agent_are_plain_http(edge):
    gone = await edge.stream(START, REQUEST, sandbox="igone")
    assert (gone.status, gone.json()["message"]) == (502, "The sandbox was not found")
    token = await edge.stream(START, REQUEST, sandbox="isecured")
    assert (token.status, token.json()["code"]) == (401, 401)
    kind = await edge.ask(START, headers={"Content-Type": "application/json"}, body=b"{}")
    assert kind.status == 415
    assert kind.headers["accept-post"] == "application/connect+json, application/connect+proto"


async def test_killed_sandbox_resets_its_stream_and_health_says_502(edge):
    """R13 and R14: only a reset makes the SDKs ask for health and say that the sandbox is gone."""
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST)
    await reader.readuntil(b"}}}")
    edge.core.sandboxes.clear()
    await edge.agent.stop()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 20)
    writer.close()
    health = await edge.ask("/health", method="GET")
    assert (health.status, health.json()["message"]) == (502, "The sandbox was not found")


async def test_client_that_cannot_read_a_reset_gets_its_body_broken_off(edge):
    """The oldest SDK asks for health only when the body ends before its last chunk."""
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST, {"User-Agent": "e2b-python-sdk/2.34.0"})
    await reader.readuntil(b"}}}")
    edge.core.sandboxes.clear()
    await edge.agent.stop()
    rest = await asyncio.wait_for(reader.read(), 20)
    assert not rest.endswith(b"0\r\n\r\n")
    assert b"\x02" not in rest
    writer.close()


async def test_killed_sandbox_resets_each_of_its_streams(edge):
    edge.agent.on["Start"] = endless
    streams = [await edge.open_stream(START, REQUEST) for _ in range(8)]
    for reader, _ in streams:
        await reader.readuntil(b"}}}")
    edge.core.sandboxes.clear()
    await edge.agent.stop()
    for reader, writer in streams:
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        writer.close()


async def test_sandbox_that_ends_before_the_first_event_is_a_plain_502(edge):
    edge.core.sandboxes["iopen"].agent.target += ".gone"
    edge.core.after_answer = edge.core.sandboxes.clear
    reply = await edge.stream(START, REQUEST)
    assert (reply.status, reply.json()["message"]) == (502, "The sandbox was not found")


async def test_lost_agent_of_a_running_sandbox_is_unavailable_in_the_end_frame(edge):
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST)
    await reader.readuntil(b"}}}")
    await edge.agent.stop()
    rest = await asyncio.wait_for(reader.read(), 20)
    expected = b'{"error":{"code":"unavailable","message":"The sandbox is running but port is not open"}}'
    assert b"\2\0\0\0%c%b" % (len(expected), expected) in rest
    writer.close()


async def test_stopping_edge_resets_streams_at_once(edge):
    edge.agent.on["Start"] = endless
    reader, writer = await edge.open_stream(START, REQUEST)
    await reader.readuntil(b"}}}")
    async with asyncio.timeout(4):
        await edge.server.close()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("limit", [{}, {"connect_timeout_ms": "60000"}])
async def test_agent_that_sends_no_first_event_is_given_up(edge, monkeypatch, limit):
    """R5, T9: one that root has stopped inside its sandbox keeps no time limit either."""

    async def silent(_request, _context):
        await asyncio.Event().wait()
        yield STARTED

    monkeypatch.setattr("sandgate_edge.routing.FIRST_MESSAGE_SECONDS", 0.2)
    for method in ("/process.Process/Start", "/process.Process/Connect", "/filesystem.Filesystem/WatchDir"):
        edge.agent.on[method.rsplit("/", 1)[1]] = silent
        edge.agent.ended.clear()
        reply = await edge.stream(method, raw_http.envelope(b"{}"), **limit)
        assert (reply.status, reply.end_error["code"]) == (200, "unavailable")
        assert reply.end_error["message"] == "The sandbox is running but port is not open"
        await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_silent_agent_of_a_sandbox_that_ended_is_told_as_gone(edge, monkeypatch):
    """R4: a call that was under way when its sandbox was paused or killed."""

    async def silent(_request, _context):
        edge.core.sandboxes.clear()
        await asyncio.Event().wait()
        yield STARTED

    monkeypatch.setattr("sandgate_edge.routing.FIRST_MESSAGE_SECONDS", 0.2)
    edge.agent.on["Start"] = silent
    reply = await edge.stream(START, REQUEST)
    assert (reply.status, reply.json()["message"]) == (502, "The sandbox was not found")


async def test_event_after_the_first_may_take_its_time(edge, monkeypatch):
    async def late(_request, _context):
        yield STARTED
        await asyncio.sleep(1)
        yield response(end=Event.EndEvent(exited=True, status="exit status 0"))

    monkeypatch.setattr("sandgate_edge.routing.FIRST_MESSAGE_SECONDS", 0.5)
    edge.agent.on["Start"] = late
    reply = await edge.stream(START, REQUEST)
    assert reply.body.endswith(b"\2\0\0\0\2{}")


async def test_client_that_does_not_read_leaves_little_in_memory(edge):
    """The agent is held up instead, and with it whoever writes: W10, and what B11 means for the gateway."""
    piece, sent, clients = b"y" * 32 * 1024, 0, 10

    async def unending(_request, _context):
        nonlocal sent
        while True:
            yield process_pb2.StartResponse(
                event=process_pb2.ProcessEvent(data=process_pb2.ProcessEvent.DataEvent(stdout=piece))
            )
            sent += len(piece)

    edge.agent.on["Start"] = unending
    headers = {"Content-Type": "application/connect+json"}
    request = edge.request(START, headers=headers, body=raw_http.envelope({"process": {"cmd": "yes"}}))
    with contextlib.ExitStack() as stack:
        for _ in range(clients):
            client = stack.enter_context(socket.socket())
            # As little as can be: what the kernel holds is not the edge's.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(edge.address)
            client.sendall(request)
        before = -1
        async with asyncio.timeout(60):
            while sent > before:
                before = sent
                await asyncio.sleep(1)
    kernels = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    assert sent < clients * (kernels + 2 * 1024 * 1024)
