"""SIGTERM drains: a request that is under way is answered, a stream is reset, sandboxes stay (R13, R14)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from e2b import Sandbox

from sandgate_testing.gateway import Gateway


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
    """An upload whose second half is not sent yet."""
    connection = http.client.HTTPConnection(*gateway.address, timeout=60)
    connection.putrequest("POST", "/files?path=half.bin&username=user")
    for name, value in headers_for(sandbox, "application/octet-stream").items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    connection.send(b"x" * (size // 2))
    return connection


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
    upload = upload_that_waits(gateway, sandbox, 200_000)
    with command_that_runs_on(gateway, sandbox) as stream:
        os.kill(gateway.pid, signal.SIGTERM)
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            stream.read()
    # The stream was reset because the edge ends, and what had begun goes on.
    upload.send(b"y" * 100_000)
    answer = upload.getresponse()
    assert (answer.status, answer.read()[:1]) == (200, b"[")
    upload.close()
    gateway.stop()
    gateway.start()
    again = Sandbox.connect(sandbox.sandbox_id, **gateway.sdk_options)
    assert again.files.read("half.bin") == "x" * 100_000 + "y" * 100_000
    assert [process.cmd for process in again.commands.list()] == ["sleep"]
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
