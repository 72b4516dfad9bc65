"""SIGTERM drains: what is under way is answered, new requests are sent away, a stream is reset, sandboxes stay (R13, R14)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxNotRunningException

from sandgate_testing.gateway import Gateway, wait_until

#: What a request is told that has begun.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def draining(make_gateway: Callable[..., Gateway]) -> Gateway:
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    return gateway


def headers_for(sandbox: Sandbox, content_type: str) -> dict[str, str]:
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "Content-Type": content_type,
        "Authorization": "Basic " + base64.b64encode(b"user:").decode(),
    }
    if (token := sandbox._envd_access_token) is not None:
        headers["X-Access-Token"] = token
    return headers


def upload_that_waits(gateway: Gateway, sandbox: Sandbox, size: int) -> http.client.HTTPConnection:
    """An upload that is under way, and whose second half is not sent yet."""
    connection = http.client.HTTPConnection(*gateway.address, timeout=60)
    connection.putrequest("POST", "/files?path=half.bin&username=user")
    for name, value in headers_for(sandbox, "application/octet-stream").items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(size))
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    assert connection.sock.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
    connection.send(b"x" * (size // 2))
    return connection


@contextlib.contextmanager
def download_that_is_read_slowly(gateway: Gateway, sandbox: Sandbox, path: str) -> Iterator[http.client.HTTPResponse]:
    """Its answer after the first byte: far more is to come than buffers on the way can hold."""
    connection = http.client.HTTPConnection(*gateway.address, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    connection.request("GET", f"/files?path={path}&username=user", headers=headers_for(sandbox, "text/plain"))
    answer = connection.getresponse()
    assert len(answer.read(1)) == 1
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def long_command(sandbox: Sandbox) -> BaseException | None:
    """How the SDK tells that its stream was reset."""
    try:
        sandbox.commands.run("sleep 600", timeout=0)
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def command_that_runs_on(gateway: Gateway, sandbox: Sandbox) -> Iterator[http.client.HTTPResponse]:
    """Its stream, after the first event. Without an SDK, which would ask for the sandbox's health after a reset."""
    connection = http.client.HTTPConnection(*gateway.address, timeout=60)
    message = json.dumps({"process": {"cmd": "sleep", "args": ["600"]}}).encode()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    connection.request("POST", "/process.Process/Start", body, headers_for(sandbox, "application/connect+json"))
    stream = connection.getresponse()
    flags, length = stream.read(1), int.from_bytes(stream.read(4), "big")
    assert (flags, "pid" in stream.read(length).decode()) == (b"\0", True)
    try:
        yield stream
    finally:
        stream.close()
        connection.close()


def test_running_requests_end_streams_are_reset_and_sandboxes_stay(draining: Gateway) -> None:
    gateway = draining
    sandbox = Sandbox.create(timeout=300, **gateway.sdk_options)
    paused = Sandbox.create(timeout=300, **gateway.sdk_options)
    paused.pause()
    # Half of it is in no buffer yet, and a crowded machine still brings it over before the edge ends in any case.
    large = os.urandom(1 << 20) * 8
    sandbox.files.write("large.bin", large)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(long_command, sandbox)
        wait_until(lambda: [process for process in sandbox.commands.list() if "sleep 600" in process.args] or None)
        upload = upload_that_waits(gateway, sandbox, 200_000)
        with download_that_is_read_slowly(gateway, sandbox, "large.bin") as download:
            with command_that_runs_on(gateway, sandbox) as stream:
                os.kill(gateway.pid, signal.SIGTERM)
                with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                    stream.read()
            # The streams were reset because the edge ends, and what had begun goes on. What comes is sent away.
            late = gateway.rest("GET", "/v2/sandboxes")
            assert (late.status, late.json()["code"]) == (503, 503)
            assert (late.headers["retry-after"], late.headers["should-retry"]) == ("2", "true")
            upload.send(b"y" * 100_000)
            answer = upload.getresponse()
            assert (answer.status, answer.read()[:1]) == (200, b"[")
            upload.close()
            assert download.read() == large[1:]
        told = waiting.result(60)
    # Its connection was reset, and the sandbox is not said to be gone.
    assert told is not None
    assert not isinstance(told, SandboxNotRunningException)
    gateway.wait_for_end()
    gateway.start()
    again = Sandbox.connect(sandbox.sandbox_id, **gateway.sdk_options)
    assert again.files.read("half.bin") == "x" * 100_000 + "y" * 100_000
    assert len(again.commands.list()) == 2
    assert again.files.read("large.bin", format="bytes") == large
    assert Sandbox.connect(paused.sandbox_id, **gateway.sdk_options).get_info().state == "running"
    for made in (sandbox, paused):
        assert Sandbox.kill(made.sandbox_id, **gateway.sdk_options)
    gateway.stop()
    assert gateway.remains() == []


def test_request_that_does_not_end_holds_the_stop_up_for_a_bounded_time(draining: Gateway) -> None:
    gateway = draining
    sandbox = Sandbox.create(timeout=300, **gateway.sdk_options)
    upload = upload_that_waits(gateway, sandbox, 200_000)
    gateway.stop()
    upload.close()
    gateway.start()
    assert Sandbox.connect(sandbox.sandbox_id, **gateway.sdk_options).kill()
    gateway.stop()
    assert gateway.remains() == []
