"""The edge as a process: settings in, ready line out, and an end that leaves nothing (docs/architecture.md)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(line: object, *fds: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sandgate_edge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")
        process.stdin.flush()
        return process

    yield begin
    for process in started:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


def settings(sock: socket.socket) -> dict[str, object]:
    return {"core": "unix:/nonexistent/core.sock", "internal_token": "secret-token", "listen_fd": sock.fileno()}


def ready(process: subprocess.Popen[bytes]) -> dict[str, object]:
    assert process.stdout is not None
    answer: dict[str, object] = json.loads(process.stdout.readline())
    return answer


def test_edge_serves_on_the_inherited_socket_and_ends_with_standard_input(start, listener):
    process = start(settings(listener), listener.fileno())
    assert ready(process) == {"ready": True}
    with socket.create_connection(listener.getsockname(), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["event"] for line in lines] == ["request", "edge stopped"]
    assert b"secret-token" not in log


def test_sigterm_ends_the_edge_and_an_interrupt_of_the_terminal_does_not(start, listener):
    process = start(settings(listener), listener.fileno())
    assert ready(process) == {"ready": True}
    os.kill(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 0


def test_idle_connections_do_not_hold_the_end_up(start, listener):
    process = start(settings(listener), listener.fileno())
    assert ready(process) == {"ready": True}
    with socket.create_connection(listener.getsockname(), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"coer": "x"}, "coer"),
        ({"listen_fd": "three"}, "listen_fd"),
        ({"core": None}, "core"),
        ({"listen_fd": 987}, "edge cannot start"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_edge_that_cannot_start_says_why_in_one_line_without_secrets(start, listener, change, named):
    process = start(settings(listener) | change, listener.fileno())
    answer = ready(process)
    assert answer["ready"] is False
    assert named in str(answer["error"])
    assert "\n" not in str(answer["error"])
    _, log = process.communicate(timeout=10)
    assert process.returncode == 1
    assert b"Traceback" not in log
    assert b"secret-token" not in log + json.dumps(answer).encode()


@pytest.mark.parametrize("line", ["", "{", "[]", "\0"])
def test_line_that_is_no_settings_is_one_clear_error(start, line):
    process = start(line)
    assert ready(process)["ready"] is False
    assert process.wait(10) == 1


def test_socket_that_does_not_listen_is_refused(start):
    with socket.socket() as sock:
        process = start(settings(sock), sock.fileno())
        assert "not a listening socket" in str(ready(process)["error"])
        assert process.wait(10) == 1


def test_unreachable_core_is_a_clear_503_and_nothing_of_the_machine_is_told(start, listener):
    process = start(settings(listener), listener.fileno())
    assert ready(process) == {"ready": True}
    with socket.create_connection(listener.getsockname(), timeout=30) as client:
        named = b"E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: 49983\r\n"
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + named + b"\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"nonexistent" not in answer
    assert b"Retry-After: 1" in answer
