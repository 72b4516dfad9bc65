"""What the gateway itself says about ports, and what it never passes on (behaviour.md R3 to R6, R10, R13, R16)."""

from __future__ import annotations

import asyncio
import json

import pytest

from sandgate_testing import raw_http

BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


async def read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def test_port_without_a_listener_is_said_so(ports, reserve_port):
    """R5, B50."""
    port = reserve_port()
    reply = await ports.ask("/", Host=f"{port}-ibox.box.test")
    assert reply.status == 502
    assert reply.json() == {
        "sandboxId": "ibox",
        "message": "The sandbox is running but port is not open",
        "port": port,
        "code": 502,
    }
    assert reply.headers["cache-control"] == "no-store"


async def test_listener_that_starts_late_is_found(ports, reserve_port):
    """R5."""
    port = reserve_port()
    asking = asyncio.create_task(ports.ask("/", Host=f"{port}-ibox.box.test"))
    script = (
        f"import socket; s = socket.create_server(('127.0.0.1', {port})); p = s.accept()[0]; p.recv(999);"
        "p.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n'); p.recv(1)"
    )
    async with ports.agent.running("python3", "-c", script):
        assert (await asking).status == 200


async def test_unknown_sandbox_is_said_so(ports):
    """R4."""
    reply = await ports.ask("/", Host=f"{ports.port}-inobody.box.test")
    assert (reply.status, reply.json()) == (
        502,
        {"sandboxId": "inobody", "message": "The sandbox was not found", "code": 502},
    )


@pytest.mark.parametrize(
    ("headers", "page"),
    [
        ({"User-Agent": BROWSER, "Sec-Fetch-Mode": "navigate"}, True),
        ({"User-Agent": BROWSER, "Accept": "text/html,*/*"}, True),
        ({"User-Agent": BROWSER, "Accept": "*/*"}, False),
        ({"User-Agent": BROWSER, "Sec-Fetch-Mode": "cors", "Accept": "text/html"}, False),
        ({"User-Agent": BROWSER, "Sec-Fetch-Mode": "navigate", "Accept": "application/json"}, False),
        ({"User-Agent": BROWSER, "Accept": "text/html", "X-Requested-With": "XMLHttpRequest"}, False),
        ({"User-Agent": "curl/8.0", "Accept": "text/html"}, False),
        ({"Accept": "text/html"}, False),
    ],
)
async def test_page_is_for_people_and_json_for_programs(ports, headers, page, reserve_port):
    """R6, B50: for a closed port and for a sandbox that is not there."""
    for host in (f"{reserve_port()}-ibox.box.test", "3000-inobody.box.test"):
        reply = await ports.send(raw_http.request("GET", "/", {"Host": host, **headers}))
        assert reply.status == 502
        assert reply.headers["content-type"].startswith("text/html" if page else "application/json")
        assert (b"<!DOCTYPE html>" in reply.body) is page
        assert (b"port is not open" in reply.body) or (b"was not found" in reply.body)


async def test_page_of_a_closed_port_has_the_title_that_programs_look_for(ports, reserve_port):
    """R6: E2B's own tests and tools that probe a preview know the page by it."""
    head = {"Host": f"{reserve_port()}-ibox.box.test", "User-Agent": BROWSER, "Sec-Fetch-Mode": "navigate"}
    page = (await ports.send(raw_http.request("GET", "/", head))).body
    assert b"<title>Closed Port Error</title>" in page
    assert b"<p>The sandbox is running but port is not open</p>" in page


async def test_link_to_a_file_of_a_gone_sandbox_leads_to_a_page(ports):
    """R6, on the agent's port."""
    named = {"Host": "49983-inobody.box.test"}
    reply = await ports.send(
        raw_http.request("GET", "/files?path=x", {**named, "User-Agent": BROWSER, "Accept": "text/html"})
    )
    assert (reply.status, reply.headers["content-type"]) == (502, "text/html; charset=utf-8")
    reply = await ports.send(raw_http.request("GET", "/files?path=x", named))
    assert (reply.status, reply.json()["code"]) == (502, 502)


async def test_old_client_cannot_change_the_protocol(ports):
    head = f"GET / HTTP/1.0\r\nHost: {ports.host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    told = dict((await ports.send(head.encode())).json()["headers"])
    assert told["Connection"] == "close"
    assert "Upgrade" not in told


@pytest.mark.parametrize("path", ["/nothing", "/garbage", "/huge-head", "/two-lengths"])
async def test_server_that_gives_no_valid_answer_is_said_so(ports, path):
    reply = await ports.ask(path)
    assert reply.status == 502
    told = reply.json()
    assert (told["code"], told["port"], told["sandboxId"]) == (502, ports.port, "ibox")
    # The SDKs take these two for something else.
    assert "was not found" not in told["message"]
    assert "port is not open" not in told["message"]


async def test_answer_with_two_framings_passes_with_one(ports):
    """RFC 9112 section 6.3: chunks win, and the length is not passed on."""
    reply = await ports.ask("/both-framings")
    assert reply.body == b"abcde"
    assert "content-length" not in reply.headers


async def test_answer_that_breaks_off_is_not_passed_off_as_whole(ports):
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/cut"))
        await reader.readuntil(b"part")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


@pytest.mark.parametrize("path", ["/pour", "/upgrade"])
async def test_kill_resets_what_is_open(ports, path):
    """R13, R14: when the agent is gone and the core knows it."""
    async with ports.connected() as (reader, writer):
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"} if path == "/upgrade" else {}
        writer.write(ports.request(path, **upgrade))
        await reader.readuntil(b"\r\n\r\n")
        del ports.edge.core.sandboxes["ibox"]
        ports.agent.process.terminate()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(read_all(reader), 10)


async def test_end_that_the_sandboxes_death_caused_is_no_end(ports):
    """R13, where the end of the connection is the end of the body."""
    ports.edge.core.after_answer = lambda: ports.edge.core.sandboxes.pop("ibox", None)
    async with ports.connected() as (reader, writer):
        writer.write(ports.request("/until-close"))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(10):
                await reader.read()


async def test_private_ports_take_the_token(ports):
    """R10: every port but the agent's, with the texts of the contract."""
    ports.edge.core.sandboxes["ibox"].sandbox.traffic_access_token = "open-sesame"
    missing = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
    invalid = "Provided token in header 'e2b-traffic-access-token' is invalid"
    reply = await ports.ask("/")
    assert (reply.status, reply.json()) == (403, {"code": 403, "message": missing})
    reply = await ports.ask("/", E2b_Traffic_Access_Token="öpen")
    assert (reply.status, reply.json()) == (403, {"code": 403, "message": invalid})
    told = await ports.told("/", E2B_TRAFFIC_ACCESS_TOKEN="open-sesame")
    assert "open-sesame" not in json.dumps(told), "the code in the sandbox has no use for it"
    health = {"Host": "127.0.0.1", "E2b-Sandbox-Id": "ibox", "E2b-Sandbox-Port": "49983"}
    assert (await ports.send(raw_http.request("GET", "/health", health))).status == 204


async def test_sleeping_sandbox_is_woken_by_who_may_reach_it(ports):
    """R15: without the token it sleeps on."""
    core = ports.edge.core
    core.sandboxes["ibox"].sandbox.traffic_access_token = "open-sesame"
    core.asleep.add("ibox")
    assert (await ports.ask("/")).status == 403
    assert core.asleep
    assert (await ports.ask("/", E2b_Traffic_Access_Token="open-sesame")).status == 200
    assert not core.asleep


HOST = "Host: {host}\r\n"
SMUGGLED = {
    "length and coding": "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "two lengths": "Content-Length: 0\r\nContent-Length: 5\r\n",
    "length with a sign": "Content-Length: +5\r\n",
    "length list": "Content-Length: 5, 5\r\n",
    "coding behind another": "Transfer-Encoding: chunked, identity\r\n",
    "unknown coding": "Transfer-Encoding: gzip, chunked\r\n",
    "space before the colon": "Transfer-Encoding : chunked\r\n",
    "folded line": "X: a\r\n b: c\r\nTransfer-Encoding:\r\n chunked\r\n",
    "bare line feed": "X: a\nTransfer-Encoding: chunked\r\n",
    "second host": "Host: other.test\r\n",
    "name with a blank": "X Y: 1\r\n",
    "null": "X: a\0b\r\n",
    "coding twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "coding with a quote": 'Transfer-Encoding: "chunked"\r\n',
    "vertical tab": "Transfer-Encoding: \x0bchunked\r\n",
}


@pytest.mark.parametrize("fields", SMUGGLED.values(), ids=SMUGGLED)
async def test_ambiguous_request_is_refused_and_nothing_smuggled(ports, fields):
    """The request hidden in the body must never be one of its own to the server, nor to the gateway."""
    hidden = "GET /hidden HTTP/1.1\r\nHost: {host}\r\n\r\n"
    data = f"POST /echo HTTP/1.1\r\n{HOST}Connection: close\r\n{fields}\r\n0\r\n\r\n{hidden}".replace(
        "{host}", ports.host
    ).encode("latin-1")
    async with ports.connected() as (reader, writer):
        writer.write(data)
        try:
            async with asyncio.timeout(20):
                answer = await reader.read()
        except ConnectionResetError:
            answer = b"HTTP/1.1 400 reset"
    assert answer[8:12] in {b" 400", b" 501"}, answer
    assert b"/hidden" not in answer


@pytest.mark.parametrize("method", ["CONNECT", "GET /x HTTP/1.1\r\nX"])
async def test_what_is_no_request_for_a_server_is_refused(ports, method):
    reply = await ports.send(f"{method} {ports.host}:80 HTTP/1.1\r\nHost: {ports.host}\r\n\r\n".encode())
    assert reply.status == 400


@pytest.mark.parametrize("host", ["0-ibox", "70000-ibox", "99999999999999-ibox", "3000-IBOX_"])
async def test_host_that_cannot_be_read_is_refused(ports, host):
    """R3, B50: never a server error."""
    assert (await ports.ask("/", Host=f"{host}.box.test")).status == 400


async def test_broken_body_is_the_clients_fault(ports):
    reply = await ports.send(ports.request("/echo", "POST", Transfer_Encoding="chunked") + b"zz\r\n")
    assert reply.status == 400
