"""The tools of these tests must be able to find what they say is not there."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_testing.gateway import wait_until
from sandgate_testing.leftovers import processes_of, remains_of, sandboxes_of
from sandgate_testing.raw_http import RawReply, envelope, envelopes
from sandgate_testing.requirements import need
from sandgate_testing.reserved_ports import ReservedPort

#: ip(7): the range that ports for one socket are chosen from.
IP_LOCAL_PORT_RANGE = 51


@contextlib.contextmanager
def running(
    *command: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said a line, and so is past its start."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=cwd) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


WAIT = "print(flush=True); input()"


def test_reserved_port_is_closed_and_yet_a_servers_to_take_again_and_again() -> None:
    with ReservedPort() as port:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port.number), timeout=10)
            with (
                socket.create_server(("127.0.0.1", port.number)) as server,
                socket.create_connection(("127.0.0.1", port.number), timeout=10),
            ):
                server.accept()[0].close()


def test_reserved_port_is_given_to_nobody_who_asks_for_any() -> None:
    with ReservedPort() as port, socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=HH", port.number, port.number))
        except OSError:
            pytest.skip("this kernel does not know the option that leaves it no other choice")
        with pytest.raises(OSError, match="in use"):
            asking.bind(("127.0.0.1", 0))
        port.close()
        asking.bind(("127.0.0.1", 0))


def test_nothing_remains_of_what_never_was(tmp_path: Path) -> None:
    assert remains_of(tmp_path) == []


def test_process_is_found_by_its_command_line(tmp_path: Path) -> None:
    with running(sys.executable, "-c", WAIT, str(tmp_path)) as process:
        assert list(processes_of(tmp_path)) == [process.pid]
    assert processes_of(tmp_path) == {}


def test_process_is_found_by_its_environment(tmp_path: Path) -> None:
    with running(sys.executable, "-c", WAIT, env={"HOME": str(tmp_path)}) as process:
        assert list(processes_of(tmp_path)) == [process.pid]


def test_process_inside_a_sandbox_is_found_by_its_root(tmp_path: Path) -> None:
    """Neither its command line nor its environment says where its files come from."""
    need("bubblewrap")
    (tmp_path / "inside").mkdir()
    unprivileged = ["--unshare-user"] if os.geteuid() else []
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--bind", str(tmp_path / "inside"), "/mnt"]
    with running("bwrap", *unprivileged, "--unshare-pid", *mounts, "sh", "-c", "echo; cat; :"):
        wait_until(lambda: "cat" in processes_of(tmp_path).values())


def test_process_is_found_by_where_it_works(tmp_path: Path) -> None:
    with running("env", "-i", sys.executable, "-c", WAIT, cwd=tmp_path) as process:
        assert list(processes_of(tmp_path)) == [process.pid]


def test_socket_and_box_are_found(tmp_path: Path) -> None:
    box = tmp_path / "boxes" / "b1"
    box.mkdir(parents=True)
    (box / "record.json").write_text('{"sandbox_id": "i1"}')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(box / "agent.sock"))
        assert remains_of(tmp_path) == [f"socket {box / 'agent.sock'}", f"box {box}"]
    assert sandboxes_of(tmp_path) == {"i1": box}


def test_end_frame_must_be_there_and_whole() -> None:
    ended = RawReply(status=200, headers={}, body=envelope({"event": {}}) + envelope({}, flags=2))
    assert ended.end_error is None
    with pytest.raises(ValueError, match="0 end frames"):
        _ = RawReply(status=200, headers={}, body=envelope({"event": {}})).end_error
    with pytest.raises(ValueError, match="announces 9 bytes and has 2"):
        envelopes(envelope({}, announced=9))


@pytest.mark.parametrize("demanded", ["bubblewrap,typo", "typo"])
def test_misspelt_requirement_is_an_error(monkeypatch: pytest.MonkeyPatch, demanded: str) -> None:
    monkeypatch.setenv("SANDGATE_REQUIRE", demanded)
    monkeypatch.setenv("PATH", "/nonexistent")
    from sandgate_testing import requirements

    requirements._why_missing.cache_clear()
    try:
        with pytest.raises(pytest.fail.Exception, match="typo"):
            need("bubblewrap")
    finally:
        requirements._why_missing.cache_clear()
