"""Requests to ports of a sandbox as its server and its clients see them (behaviour.md 12, traps B50 and B52)."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os

import pytest

from sandgate_testing import raw_http
from sandgate_testing.agent_process import eventually


async def test_request_arrives_as_it_was_sent(ports):
    """B52: raw path and query byte for byte, headers in order and in their own spelling."""
    target = '//a%2Fb/../c%00;p?q=%zz&x="<>&empty=#f'
    told = await ports.told(target, X_oDd="1", Cookie="a=1; b=2", Authorization="Bearer x", X_Access_Token="kept")
    assert told["first"] == f"GET {target} HTTP/1.1"
    seen = told["headers"]
    assert seen[0] == ["Host", ports.host]
    for pair in (["X-oDd", "1"], ["Cookie", "a=1; b=2"], ["Authorization", "Bearer x"], ["X-Access-Token", "kept"]):
        assert pair in seen


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "REPORT", "TRACE"])
async def test_every_method_passes_with_its_body(ports, method):
    body = b"" if method == "TRACE" else os.urandom(5000)
    told = await ports.told("/echo", method, body=body)
    assert told["first"] == f"{method} /echo HTTP/1.1"
    assert (told["size"], told["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())


@pytest.mark.parametrize("path", ["/health", "/files", "/sandboxes", "/process.Process/Start", "/init", "/ready"])
async def test_no_path_of_a_port_is_the_gateways(ports, path):
    for method in ("GET", "POST"):
        assert (await ports.told(path, method))["first"] == f"{method} {path} HTTP/1.1"


async def test_preflight_is_the_servers_own(ports):
    told = await ports.told("/", "OPTIONS", Origin="https://a.test", Access_Control_Request_Method="PUT")
    assert told["first"] == "OPTIONS / HTTP/1.1"


async def test_head_has_the_length_and_no_body(ports):
    reply = await ports.send(ports.request("/", "HEAD"))
    assert (reply.status, reply.headers["content-length"], reply.body) == (200, "1234", b"")


async def test_chunked_body_passes_with_a_framing_of_its_own(ports):
    head = ports.request("/echo", "POST", Transfer_Encoding="chunked")
    reply = await ports.send(head + b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n")
    told = reply.json()
    assert (told["size"], told["sha256"]) == (5, hashlib.sha256(b"abcde").hexdigest())
    names = [name.lower() for name, _ in told["headers"]]
    assert names.count("transfer-encoding") == 1
    assert "content-length" not in names


async def test_hop_by_hop_headers_stay_on_their_hop(ports):
    told = await ports.told(
        "/", Connection="close, X-Mine", X_Mine="1", Keep_Alive="5", TE="gzip", Proxy_Authorization="x", X_Yours="2"
    )
    names = [name.lower() for name, _ in told["headers"]]
    assert "x-yours" in names
    assert not {"x-mine", "keep-alive", "te", "proxy-authorization"} & set(names)
    assert dict(told["headers"])["Connection"] == "close"


async def test_forwarded_headers_of_the_client_are_replaced(ports):
    """R9."""
    told = await ports.told(
        "/",
        Forwarded="for=6.6.6.6",
        X_Forwarded_For="6.6.6.6",
        X_Forwarded_Host="evil.test",
        X_Forwarded_Proto="https",
        X_Forwarded_Port="1",
        X_Real_Ip="6.6.6.6",
    )
    seen = [pair for pair in told["headers"] if pair[0].lower().startswith(("forwarded", "x-forwarded", "x-real"))]
    assert sorted(seen) == [
        ["X-Forwarded-For", "127.0.0.1"],
        ["X-Forwarded-Host", ports.host],
        ["X-Forwarded-Proto", "http"],
    ]


async def test_answer_arrives_as_it_was_sent(ports):
    """B52: status, reason, several cookies, the gateway adds nothing of its own."""
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/plain"))
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first == b"HTTP/1.1 299 Nearly Fine"
    assert lines == [
        b"Location: /next",
        b"Set-Cookie: a=1; Path=/",
        b"set-cookie: b=2",
        b"X-hEADER: odd \xe4",
        b"Content-Length: 5",
        b"Connection: close",
    ]
    assert body == b"plain"


async def test_compressed_body_stays_as_it_is(ports):
    reply = await ports.ask("/gzip", Accept_Encoding="gzip")
    assert reply.headers["content-encoding"] == "gzip"
    assert gzip.decompress(reply.body) == b"text " * 100


@pytest.mark.parametrize(("path", "status"), [("/no-content", 204), ("/not-modified", 304)])
async def test_answer_without_a_body_leaves_the_connection_usable(ports, path, status):
    async with ports.connected() as (reader, writer):
        request = ports.request(path, Connection="keep-alive")
        for _ in range(2):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" %d " % status in head
            assert b"chunked" not in head.lower()


async def test_requests_follow_one_another_on_a_connection(ports):
    """Also sent at once, before any answer."""
    async with ports.connected() as (reader, writer):
        writer.write(b"".join(ports.request(f"/{n}", Connection="keep-alive") for n in range(5)))
        for n in range(5):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.split(b"\r\n") if b"Content-Length" in line).split()[1])
            assert json.loads(await reader.readexactly(length))["first"] == f"GET /{n} HTTP/1.1"


async def test_connection_serves_port_and_gateway_in_turn(ports):
    """As a proxy in front uses it."""
    async with ports.connected() as (reader, writer):
        for head in (
            ports.request("/health", Connection="keep-alive"),
            raw_http.request("GET", "/health", {"Connection": "keep-alive"}),
            ports.request("/health", Connection="close"),
        ):
            writer.write(head)
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.count(b'"status"') == 1


async def test_body_that_ends_with_the_connection_is_whole(ports):
    reply = await ports.ask("/until-close")
    assert (reply.headers["transfer-encoding"], reply.body) == ("chunked", b"all there is")
    # An old client is told by the end of the connection, as the gateway was.
    async with ports.connected() as (reader, writer):
        writer.write(f"GET /until-close HTTP/1.0\r\nHost: {ports.host}\r\n\r\n".encode())
        assert (await reader.read()).endswith(b"Connection: close\r\n\r\nall there is")


async def test_trailers_pass(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/trailers"))
        answer = await reader.read()
    assert b"Trailer: X-Sum\r\n" in answer
    assert answer.endswith(b"3\r\nabc\r\n0\r\nX-Sum: 6\r\n\r\n")


async def test_early_hints_pass(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/hints"))
        assert await reader.readuntil(b"\r\n\r\n") == (
            b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
        )
        assert (await reader.read()).endswith(b"hinted")


async def test_expectation_is_met_by_the_server_and_nobody_else(ports):
    async with ports.connected() as (reader, writer):
        head, _ = ports.request("/expect", "POST", Expect="100-continue", body=b"12345").split(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Go on\r\n\r\n"
        writer.write(b"12345")
        assert json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["size"] == 5


async def test_expectation_that_is_refused_costs_no_body(ports):
    async with ports.connected() as (reader, writer):
        head, _ = ports.request("/early", "POST", Expect="100-continue", body=b"12345").split(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 Enough\r\n")
        assert b"Connection: close" in head
        assert await reader.readexactly(8) == b"too much"


async def test_early_answer_to_a_large_body_arrives(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/early", "POST", Content_Length=str(1 << 30)) + b"x" * 100_000)
        assert (await reader.readuntil(b"too much")).startswith(b"HTTP/1.1 413 Enough\r\n")


async def test_event_stream_is_not_held_back(ports):
    """R12: each event arrives while the server waits for the client."""
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/events"))
        async with asyncio.timeout(10):
            await reader.readuntil(b"data: 0\n\n")
            await reader.readuntil(b"data: 1\n\n")
            await reader.readuntil(b"data: 2\n\n")
            assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_answer_flows_while_the_request_does(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/duplex", "POST", Transfer_Encoding="chunked"))
        for n in range(3):
            writer.write(b"4\r\nno %d\r\n" % n)
            async with asyncio.timeout(10):
                await reader.readuntil(b"no %d\r\n" % n)
        writer.write(b"0\r\n\r\n")
        assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_hundred_megabytes_pass_both_ways(ports):
    piece, count = os.urandom(1 << 20), 100
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/duplex", "POST", Content_Length=str(count * len(piece))))

        async def send() -> None:
            for _ in range(count):
                writer.write(piece)
                await writer.drain()

        async def receive() -> str:
            await reader.readuntil(b"\r\n\r\n")
            digest = hashlib.sha256()
            while size := int(await reader.readuntil(b"\r\n"), 16):
                digest.update((await reader.readexactly(size + 2))[:-2])
            return digest.hexdigest()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            received = group.create_task(receive())
    expected = hashlib.sha256()
    for _ in range(count):
        expected.update(piece)
    assert received.result() == expected.hexdigest()


async def test_slow_reader_slows_the_server_and_nobody_else(ports):
    """R12: nothing of a stream piles up on the way."""
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/pour"))
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await eventually(ports.progress.exists)
        size = -1
        while (now := int(ports.progress.read_text() or "0")) != size:
            size = now
            await asyncio.sleep(0.3)
        assert size < 64 << 20
        assert (await ports.told("/"))["first"] == "GET / HTTP/1.1"


async def test_client_that_leaves_ends_the_connection_in_the_sandbox(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/pour"))
        await reader.readuntil(b"\r\n\r\n")
    assert b"left" in await ports.running.read_until(b"left")


@pytest.mark.parametrize("protocol", ["websocket", "own-protocol"])
async def test_change_of_protocol_lets_bytes_pass_both_ways(ports, protocol):
    """R12. Each side ends by itself."""
    async with ports.connected() as (reader, writer):
        # Some clients do not wait for the answer; only of the protocol that aiohttp knows are such bytes kept.
        early = b"early " if protocol == "websocket" else b""
        writer.write(ports.request("/upgrade", Connection="keep-alive, Upgrade", Upgrade=protocol) + early)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 Changing\r\n")
        assert b"X-Own: 1\r\n" in head
        assert f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n".encode() in head
        assert await reader.readexactly(6 + len(early)) == b"hello " + early
        blob = os.urandom(1 << 20)
        writer.write(blob)
        assert await reader.readexactly(len(blob)) == blob
        writer.write_eof()
        assert await reader.read() == b" bye"


async def test_refused_change_of_protocol_is_an_ordinary_answer(ports):
    async with ports.connected() as (reader, writer):
        headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
        writer.write(ports.request("/plain", **headers) + ports.request("/plain"))
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 299") == 2


async def test_changed_protocol_ends_when_the_edge_does(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/upgrade", Connection="Upgrade", Upgrade="websocket"))
        await reader.readuntil(b"hello ")
        async with asyncio.timeout(4):
            await ports.edge.server.close()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


async def test_host_can_be_masked(ports):
    """R8."""
    ports.edge.core.sandboxes["ibox"].sandbox.network.mask_request_host = "app-${PORT}.internal:${PORT}"
    told = dict((await ports.told("/"))["headers"])
    assert told["Host"] == f"app-{ports.port}.internal:{ports.port}"
    assert told["X-Forwarded-Host"] == ports.host


async def test_port_is_named_by_headers_where_the_host_cannot(ports):
    """R2, B50, and the code interpreter's way to its port."""
    named = {"Host": "127.0.0.1", "E2b-Sandbox-Id": "ibox", "E2b-Sandbox-Port": str(ports.port)}
    reply = await ports.send(raw_http.request("POST", "/execute", named, body=b"{}"))
    assert reply.json()["first"] == "POST /execute HTTP/1.1"
    # On a host of a sandbox they have no effect.
    other = {**named, "E2b-Sandbox-Id": "iother", "E2b-Sandbox-Port": "1", "Host": ports.host}
    assert (await ports.send(raw_http.request("GET", "/", other))).status == 200


async def test_target_with_scheme_and_host_passes_as_a_path(ports):
    assert (await ports.told(f"http://{ports.host}/a?b"))["first"] == "GET /a?b HTTP/1.1"
    assert (await ports.told(f"http://{ports.host}"))["first"] == "GET / HTTP/1.1"
    assert (await ports.ask("http://evil.test/a")).status == 400


async def test_log_line_names_no_path_of_a_users(ports, capsys):
    await ports.ask("/secret-path?token=x")
    assert "secret-path" not in capsys.readouterr().err
