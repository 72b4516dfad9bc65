"""What surrounds every route: cross-origin, request ids, the log line, answers to what is no request (W12 to W14)."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_testing import raw_http

STAT = "/filesystem.Filesystem/Stat"


async def test_preflight_is_answered_before_anything_is_checked(edge):
    headers = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-access-token",
    }
    for path in (STAT, "/sandboxes", "/files", "/nowhere"):
        reply = await edge.ask(path, method="OPTIONS", sandbox=None, headers=headers)
        assert (reply.status, reply.body) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["access-control-allow-headers"] == "authorization,x-access-token"
        assert reply.headers["access-control-max-age"] == "7200"
        assert reply.headers["access-control-allow-methods"] == "HEAD, GET, POST, PUT, PATCH, DELETE"
    assert edge.core.asked == []


async def test_every_answer_may_be_read_by_any_page(edge):
    replies = [
        await edge.ask("/health", method="GET"),
        await edge.ask("/nowhere", method="GET", sandbox=None),
        await edge.unary(STAT, sandbox="igone"),
        await edge.stream("/process.Process/Start", b""),
    ]
    assert [reply.status for reply in replies] == [204, 404, 502, 200]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "X-Next-Token" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("given", "kept"), [("req-1.A_b", True), ("a" * 129, False), ("a b", False), ('"x"', False)])
async def test_sane_request_id_is_kept_and_told(edge, given, kept):
    reply = await edge.ask("/health", method="GET", headers={"X-Request-Id": given})
    assert (reply.headers["x-request-id"] == given) is kept
    assert edge.core.asked[0][1]["request-id"] == reply.headers["x-request-id"]


async def test_one_line_for_each_request_and_no_secret_in_it(edge):
    async def stat(_request, _context):
        return filesystem_pb2.StatResponse()

    edge.agent.on["Stat"] = stat
    with structlog.testing.capture_logs() as lines:
        await edge.unary(STAT + "?signature=v1_secret", x_access_token="tok-secret", authorization="Basic c2VjcmV0Og==")
        await edge.ask("/secret/path", method="GET", sandbox=None)
        await edge.unary(STAT, sandbox="igone")
    requests = [line for line in lines if line["event"] == "request"]
    assert [(line["method"], line["route"], line["sandbox"], line["status"]) for line in requests] == [
        ("POST", STAT, "iopen", 200),
        ("GET", "unmatched", None, 404),
        ("POST", STAT, "igone", 502),
    ]
    assert all(line["duration_ms"] >= 0 and line["request_id"] for line in requests)
    assert "secret" not in str(lines)


async def test_client_that_left_is_logged_as_such_and_not_as_an_error(edge):
    async def never(_request, _context):
        await asyncio.Event().wait()

    edge.agent.on["Stat"] = never
    with structlog.testing.capture_logs() as lines:
        _, writer = await asyncio.open_connection(*edge.address)
        writer.write(edge.request(STAT, headers={"Content-Type": "application/json"}, body=b"{}"))
        async with asyncio.timeout(20):
            while not edge.agent.requests:  # noqa: ASYNC110 - the double has no event for this
                await asyncio.sleep(0.01)
            writer.close()
            await edge.agent.ended.wait()
            while not lines:  # noqa: ASYNC110 - written when the handler has ended
                await asyncio.sleep(0.01)
    assert [(line["event"], line["status"], line["log_level"]) for line in lines] == [("request", 499, "info")]


async def test_fault_of_ours_is_an_answer_with_a_reference_and_no_detail(edge):
    edge.agent.on.clear()
    broken = edge.core.sandboxes["iopen"]
    broken.agent.target = "no-such-scheme:///x"
    with structlog.testing.capture_logs() as lines:
        reply = await edge.unary(STAT)
    assert reply.status in {500, 502, 503}
    assert "no-such-scheme" not in reply.body.decode()
    assert lines


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
    ],
)
async def test_bytes_that_are_no_http_are_answered_in_json(edge, data):
    with structlog.testing.capture_logs() as lines:
        reply = await asyncio.to_thread(raw_http.exchange, edge.address, data)
    assert (reply.status, reply.json()) == (400, {"code": 400, "message": "the request is not valid HTTP/1.1"})
    assert "exc_info" not in str(lines)


@pytest.mark.parametrize("headers", [{"X-Long": "x" * 20_000}, {f"X-{n}": "x" for n in range(300)}])
async def test_headers_have_a_limit(edge, headers):
    reply = await edge.ask("/health", method="GET", headers=headers)
    assert (reply.status, reply.json()["code"]) == (431, 431)


async def test_request_line_has_a_limit(edge):
    reply = await edge.ask("/health?" + "x" * 20_000, method="GET")
    assert (reply.status, reply.json()["code"]) == (414, 414)


async def test_long_path_of_a_file_fits_in_the_request_line(edge):
    reply = await edge.ask("/health?path=" + "%C3%A9" * 2000, method="GET")
    assert reply.status == 204


async def test_broken_chunks_are_the_clients_mistake(edge):
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    reply = await edge.ask(STAT, headers=headers, body=b"zz\r\nnonsense\r\n")
    assert reply.status == 400


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT a:1",
        "OPTIONS *",
        "GET http://localhost/nowhere",
        "BREW /nowhere",
        "GET /%00",
        "GET /%ff%fe",
        "GET /a%2fb",
    ],
)
async def test_odd_requests_are_refused_in_json(edge, line):
    data = f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    reply = await asyncio.to_thread(raw_http.exchange, edge.address, data)
    assert reply.status in {400, 404, 405}
    assert reply.json()["code"] == reply.status


async def test_unknown_expectation_is_refused_in_json(edge):
    for expectation in ("miracles", "ü", "100-continue, more"):
        reply = await edge.ask("/health", method="GET", headers={"Expect": expectation})
        assert (reply.status, reply.json()["code"]) == (417, 417)


async def test_client_that_waits_for_continue_gets_its_answer(edge):
    async def stat(_request, _context):
        return filesystem_pb2.StatResponse()

    edge.agent.on["Stat"] = stat
    reader, writer = await asyncio.open_connection(*edge.address)
    request = edge.request(STAT, headers={"Content-Type": "application/json", "Expect": "100-continue"}, body=b"{}")
    head, _, body = request.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(20):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_body_found_broken_after_its_refusal_is_no_error_of_ours(edge, caplog):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with structlog.testing.capture_logs() as lines:
        for path in (STAT, "/filesystem.Filesystem/Nope"):
            reply = await edge.ask(path, headers=headers, body=b"no gzip" * 10_000)
            assert reply.status in {400, 404}
    assert {line["log_level"] for line in lines} == {"info"}
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []


async def test_connection_serves_one_request_after_another(edge):
    reader, writer = await asyncio.open_connection(*edge.address)
    for _ in range(3):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(16) == b'{"status": "ok"}'
    writer.close()


async def test_ready_is_a_question_to_the_core_and_health_is_not(edge):
    """The core of these tests has no health service, as one that is starting or gone."""
    reply = await edge.ask("/ready", method="GET", sandbox=None)
    assert (reply.status, reply.body) == (503, b'{"status": "not ready"}')
    assert (await edge.ask("/health", method="GET", sandbox=None)).status == 200
    assert (await edge.ask("/ready", method="GET")).status == 404


async def test_load_balancers_may_ask_by_head(edge):
    """Many probe by HEAD only. It says what GET does, without a body."""
    for path, status in (("/health", 200), ("/ready", 503)):
        reply = await edge.ask(path, method="HEAD", sandbox=None)
        assert (reply.status, reply.body) == (status, b"")
    assert (await edge.ask("/ready", method="HEAD")).status == 404


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTHY = b'{"status": "ok"}'


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr("sandgate_edge.server._HEAD_SECONDS", 0.3)


@pytest.mark.parametrize(("before", "part"), [(0, b""), (0, HEAD[:14]), (0, HEAD[:-2]), (2, HEAD[:1]), (2, HEAD[:-2])])
@pytest.mark.usefixtures("short_patience")
async def test_connection_whose_request_stays_unfinished_is_closed(edge, part, before):
    """Also behind requests that were answered."""
    reader, writer = await asyncio.open_connection(*edge.address)
    async with asyncio.timeout(20):
        for _ in range(before):
            writer.write(HEAD)
            await reader.readuntil(HEALTHY)
        writer.write(part)
        assert await reader.read() == b""
    writer.close()


@pytest.mark.usefixtures("short_patience")
async def test_request_that_trickles_in_gains_no_time(edge):
    reader, writer = await asyncio.open_connection(*edge.address)

    async def trickle():
        while True:
            for byte in b"GET /" + b"x" * 8000:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(20):
        # Bytes that cross the close are answered with a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    trickling.cancel()
    await asyncio.gather(trickling, return_exceptions=True)
    writer.close()


@pytest.mark.usefixtures("short_patience")
async def test_connection_between_requests_is_kept(edge):
    """W12."""
    reader, writer = await asyncio.open_connection(*edge.address)
    async with asyncio.timeout(20):
        for _ in range(3):
            for piece in (HEAD[:5], HEAD[5:]):
                writer.write(piece)
                await asyncio.sleep(0.05)
            await reader.readuntil(HEALTHY)
            await asyncio.sleep(0.5)
    writer.close()


@pytest.mark.usefixtures("short_patience")
async def test_bodies_and_answers_have_no_deadline(edge):
    """W12; and the request behind them is in time while they last."""

    async def slow(_request, _context):
        await asyncio.sleep(0.8)
        return filesystem_pb2.StatResponse()

    edge.agent.on["Stat"] = slow
    reader, writer = await asyncio.open_connection(*edge.address)
    body = b'{"path":"/x"}'
    head = f"POST {STAT} HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: iopen\r\nE2b-Sandbox-Port: 49983\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        for byte in body:
            await asyncio.sleep(0.05)
            writer.write(bytes([byte]))
        writer.write(HEAD[:9])
        await asyncio.sleep(0.05)
        writer.write(HEAD[9:12])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD[12:])
        await reader.readuntil(HEALTHY)
    writer.close()
