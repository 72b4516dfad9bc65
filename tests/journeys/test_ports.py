"""Servers in sandboxes, reached by ``sbx.get_host(port)``: on a whole gateway, with the official SDK (behaviour.md 12)."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import grpc
import httpx
import pytest
from e2b import Sandbox, SandboxException

from sandgate.runtime import core_socket
from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_testing.gateway import Gateway

#: Pages, an upload that is hashed, a download without end, an event stream and a web socket that echoes.
SERVER = """
import base64, hashlib, http.server, json, os, struct, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/ws":
            return self.web_socket()
        if self.path == "/zeros":
            return self.pour()
        if self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            while True:
                self.wfile.write(b"data: tick\\n\\n")
        self.say({"headers": dict(self.headers), "path": self.path, "name": os.environ.get("NAME")})

    def do_POST(self):
        digest, left = hashlib.sha256(), int(self.headers["Content-Length"])
        while left:
            piece = self.rfile.read(min(left, 1 << 20))
            digest.update(piece)
            left -= len(piece)
        self.say({"sha256": digest.hexdigest()})

    def say(self, told):
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def pour(self):
        size = 100 << 20
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        for _ in range(100):
            self.wfile.write(bytes(1 << 20))

    def web_socket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:
            first, second = self.rfile.read(2)
            length = second & 127
            if length == 126:
                length, = struct.unpack(">H", self.rfile.read(2))
            elif length == 127:
                length, = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(length)))
            head = bytes([first, length]) if length < 126 else struct.pack(">BBH", first, 126, length)
            self.wfile.write(head + data)
            if first & 15 == 8:
                return

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def read_all(stream: socket.socket) -> None:
    while stream.recv(1 << 20):
        pass


def serve(sandbox: Sandbox, port: int, **envs: str) -> None:
    sandbox.files.write("/tmp/server.py", SERVER)
    start(sandbox, f"python3 /tmp/server.py {port}", port, envs=envs)


def start(sandbox: Sandbox, command: str, port: int, **options: Any) -> None:
    """Returns once it listens: how long an interpreter takes to start is not what is tested here."""
    sandbox.commands.run(command, background=True, timeout=0, **options)
    sandbox.commands.run(f"until (: > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done", timeout=30)


def get(gateway: Gateway, sandbox: Sandbox, port: int, path: str = "/", **headers: str) -> httpx.Response:
    """As a client does whose DNS leads the sandbox's host to the gateway."""
    fields = {"Host": sandbox.get_host(port), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.get(gateway.url + path, headers=fields, timeout=30)


@pytest.fixture(scope="module")
def sandbox(gateway: Gateway) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300, **gateway.sdk_options)
    yield box
    box.kill()


@pytest.fixture(scope="module")
def port(sandbox: Sandbox, reserve_port: Callable[[], int]) -> int:
    number = reserve_port()
    serve(sandbox, number)
    return number


def test_server_in_a_sandbox_is_reached_by_its_host(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    reply = get(gateway, sandbox, port, "/a?b=c")
    assert reply.status_code == 200
    told = reply.json()
    assert told["path"] == "/a?b=c"
    assert told["headers"]["Host"] == sandbox.get_host(port)
    assert told["headers"]["X-Forwarded-Host"] == sandbox.get_host(port)


def test_closed_port_and_gone_sandbox_can_be_told_apart(
    gateway: Gateway, sandbox: Sandbox, reserve_port: Callable[[], int]
) -> None:
    """R4, R5, B50."""
    closed = reserve_port()
    reply = get(gateway, sandbox, closed)
    assert (reply.status_code, reply.json()["port"]) == (502, closed)
    assert "port is not open" in reply.json()["message"]
    other = Sandbox.create(timeout=60, **gateway.sdk_options)
    other.kill()
    reply = get(gateway, other, closed)
    assert (reply.status_code, reply.json()["message"]) == (502, "The sandbox was not found")


def test_hundred_megabytes_pass_each_way(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    headers = {"Host": sandbox.get_host(port)}
    body = os.urandom(1 << 20) * 100
    reply = httpx.post(gateway.url, headers=headers, content=body, timeout=120)
    assert reply.json()["sha256"] == hashlib.sha256(body).hexdigest()
    with httpx.stream("GET", gateway.url + "/zeros", headers=headers, timeout=120) as stream:
        assert sum(map(len, stream.iter_bytes())) == 100 << 20


async def test_web_socket_echoes(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    """R12."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(gateway.url + "/ws", headers={"Host": sandbox.get_host(port)}) as ws,
    ):
        for message in (b"x", b"y" * 1000, b"z" * 60000):
            await ws.send_bytes(message)
            assert await ws.receive_bytes(timeout=20) == message


def test_kill_resets_a_stream(gateway: Gateway, reserve_port: Callable[[], int]) -> None:
    """R13, R14: never an orderly end, and health answers 502 by then."""
    box = Sandbox.create(timeout=300, **gateway.sdk_options)
    number = reserve_port()
    serve(box, number)
    with socket.create_connection(gateway.address, timeout=30) as stream:
        stream.sendall(f"GET /events HTTP/1.1\r\nHost: {box.get_host(number)}\r\n\r\n".encode())
        assert b"tick" in stream.recv(1 << 16) + stream.recv(1 << 16)
        box.kill()
        with pytest.raises(ConnectionResetError):
            read_all(stream)
    assert box.is_running() is False


def test_neighbours_and_the_machine_are_out_of_reach(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    """Sandboxes with internet share the machine's network here: a tunnel still reaches its own sandbox only."""
    neighbour = Sandbox.create(timeout=60, **gateway.sdk_options)
    try:
        assert get(gateway, neighbour, port).status_code == 502
        assert get(gateway, neighbour, gateway.address[1], "/health").status_code == 502
    finally:
        neighbour.kill()


def test_sandboxes_without_internet_have_ports_of_their_own(gateway: Gateway, isolation: str) -> None:
    if isolation == "none":
        pytest.skip("without isolation the network cannot be cut off")
    boxes = [Sandbox.create(timeout=60, allow_internet_access=False, **gateway.sdk_options) for _ in range(2)]
    try:
        for number, box in enumerate(boxes):
            serve(box, 3000, NAME=f"box {number}")
        for number, box in enumerate(boxes):
            assert get(gateway, box, 3000).json()["name"] == f"box {number}"
    finally:
        for box in boxes:
            box.kill()


@pytest.mark.parametrize("user", ["user", "root"])
def test_what_any_user_listens_on_is_reached(
    gateway: Gateway, sandbox: Sandbox, user: Any, reserve_port: Callable[[], int]
) -> None:
    number = reserve_port()
    start(sandbox, f"python3 -m http.server {number}", number, user=user, cwd="/tmp")
    assert get(gateway, sandbox, number).status_code == 200


def test_private_sandbox_takes_its_token(gateway: Gateway, reserve_port: Callable[[], int]) -> None:
    """R10, R11."""
    box = Sandbox.create(timeout=60, network={"allow_public_traffic": False}, **gateway.sdk_options)
    try:
        number = reserve_port()
        serve(box, number)
        token = box.traffic_access_token
        assert token
        assert get(gateway, box, number).status_code == 403
        assert get(gateway, box, number, e2b_traffic_access_token=token[::-1]).status_code == 403
        told = get(gateway, box, number, e2b_traffic_access_token=token).json()
        assert token not in json.dumps(told)
        assert box.commands.run("echo ok").stdout == "ok\n"
        assert Sandbox.connect(box.sandbox_id, **gateway.sdk_options).traffic_access_token == token
    finally:
        box.kill()
    open_one = {"templateID": "base", "secure": False, "network": {"allowPublicTraffic": False}}
    assert gateway.rest("POST", "/sandboxes", open_one).status == 400


def test_public_sandbox_has_no_traffic_token(sandbox: Sandbox) -> None:
    """R11."""
    assert not sandbox.traffic_access_token


def test_host_is_masked(gateway: Gateway, reserve_port: Callable[[], int]) -> None:
    """R8."""
    box = Sandbox.create(timeout=60, network={"mask_request_host": "localhost:${PORT}"}, **gateway.sdk_options)
    try:
        number = reserve_port()
        serve(box, number)
        told = get(gateway, box, number).json()["headers"]
        assert told["Host"] == f"localhost:{number}"
        assert told["X-Forwarded-Host"] == box.get_host(number)
    finally:
        box.kill()
    for mask in ("a b", "a/b", "${port}", "-", "http://x", "x" * 300):
        with pytest.raises(SandboxException, match="400: maskRequestHost"):
            Sandbox.create(network={"mask_request_host": mask}, **gateway.sdk_options)


def test_request_to_a_port_wakes_the_sandbox(gateway: Gateway, reserve_port: Callable[[], int]) -> None:
    """R15: where it was asked for, and a request that may reach it."""
    lifecycle: Any = {"on_timeout": "pause", "auto_resume": True}
    network: Any = {"allow_public_traffic": False}
    box = Sandbox.create(timeout=300, lifecycle=lifecycle, network=network, **gateway.sdk_options)
    try:
        number = reserve_port()
        serve(box, number)
        token = box.traffic_access_token or ""
        assert get(gateway, box, number, e2b_traffic_access_token=token).status_code == 200
        box.pause()
        assert get(gateway, box, number).status_code == 403
        assert box.get_info().state.value == "paused"
        assert get(gateway, box, number, e2b_traffic_access_token=token).status_code == 200
        assert box.get_info().state.value == "running"
    finally:
        box.kill()


def test_paused_sandbox_sleeps_on_without_auto_resume(gateway: Gateway, reserve_port: Callable[[], int]) -> None:
    """R15, and after a resume its ports answer again (B45), by whoever listens then (R17)."""
    box = Sandbox.create(timeout=300, **gateway.sdk_options)
    try:
        number = reserve_port()
        serve(box, number)
        assert get(gateway, box, number).status_code == 200
        box.pause()
        reply = get(gateway, box, number)
        assert (reply.status_code, reply.json()["message"]) == (502, "The sandbox was not found")
        box.connect(timeout=300)
        assert get(gateway, box, number).status_code == 200
        box.pause(keep_memory=False)
        box.connect(timeout=300)
        reply = get(gateway, box, number)
        assert (reply.status_code, reply.json()["message"]) == (502, "The sandbox is running but port is not open")
    finally:
        box.kill()


def test_code_interpreters_port_is_named_by_headers(gateway: Gateway, sandbox: Sandbox) -> None:
    """code_interpreter.md 1: its SDK finds the port so under `E2B_SANDBOX_URL`."""
    serve(sandbox, 49999)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49999"}
    assert httpx.get(gateway.url + "/contexts", headers=headers, timeout=30).json()["path"] == "/contexts"


def test_many_requests_at_once_succeed(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    wrong: list[object] = []

    def ask() -> None:
        with httpx.Client(headers={"Host": sandbox.get_host(port)}, verify=False, timeout=60) as client:
            replies = [client.get(gateway.url) for _ in range(10)]
        wrong.extend(reply for reply in replies if reply.status_code != 200)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


async def test_service_dials_by_way_of_the_core(gateway: Gateway, sandbox: Sandbox, port: int) -> None:
    """The relay passes a tunnel like any other call."""
    metadata = (("sandbox-id", sandbox.sandbox_id), ("api-key", gateway.api_key))
    async with grpc.aio.insecure_channel(f"unix:{core_socket(gateway.state_dir)}") as channel:
        call: Any = agent_pb2_grpc.AgentStub(channel).Dial(metadata=metadata)
        await call.write(agent_pb2.DialRequest(open=agent_pb2.DialRequest.Open(port=port)))
        assert (await call.read()).HasField("opened")
        await call.write(agent_pb2.DialRequest(data=b"GET / HTTP/1.0\r\n\r\n"))
        assert (await call.read()).data.startswith(b"HTTP/1.1 200 OK\r\n")
        call.cancel()
