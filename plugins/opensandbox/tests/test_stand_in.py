"""The stand-in for execd keeps what OpenSandbox says of the genuine one; run as a plain program, as a sandbox runs it.

What it keeps, and what it leaves out, stands at the top of ``sandgate_testing/execd_stand_in/__init__.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandgate_testing.execd_stand_in import pack

pytestmark = pytest.mark.timeout(120)

TOKEN = "only-for-us"
MIB = 1024 * 1024
STDIN, STDOUT, STDERR, REPLAY = range(4)


@contextmanager
def started(program: Path, **env: str) -> Iterator[str]:
    """The program for a block, without anything that a sandbox's Python may lack; its address."""
    command = [sys.executable, "-I", "-S", str(program)]
    environment = {"PATH": os.environ["PATH"], "EXECD_PORT": "0", "EXECD_ACCESS_TOKEN": TOKEN, "MARK": "execd's", **env}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("execd") / "execd"
    pack(path)
    return path


@pytest.fixture(scope="module")
def address(program: Path) -> Iterator[str]:
    with started(program) as address:
        yield address


class Execd:
    """Calls, and sessions that are gone afterwards."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.sessions: list[str] = []

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Status and what the body says: JSON, or bytes where it is none."""
        async with self.http.request(method, path, **options) as response:
            body = await response.read()
            return response.status, json.loads(body) if response.content_type == "application/json" and body else body

    async def session(self, command: str, **spec: str) -> str:
        status, about = await self.call("POST", "/pty", json={"command": command, **spec})
        assert status == 201
        self.sessions.append(about["session_id"])
        return about["session_id"]

    @asynccontextmanager
    async def attached(self, session: str, *, pty: int = 0, **query: int) -> AsyncIterator[Attached]:
        async with self.http.ws_connect(f"/pty/{session}/ws", params={"pty": pty, **query}, max_msg_size=0) as socket:
            yield Attached(socket)

    async def close(self) -> None:
        for session in self.sessions:
            await self.call("DELETE", f"/pty/{session}")


class Attached:
    """One end of a session's socket, and what has come out of it so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.output = {STDOUT: bytearray(), STDERR: bytearray(), REPLAY: bytearray()}
        #: Where the replay begins.
        self.first: int | None = None
        self.said: list[dict[str, Any]] = []
        #: Why the other side closed. The client's own account of it is another when it could not say goodbye any more.
        self.reason: int | None = None

    async def write(self, data: bytes) -> None:
        await self.socket.send_bytes(bytes([STDIN]) + data)

    async def say(self, **frame: object) -> None:
        await self.socket.send_json(frame)

    async def take(self) -> bool:
        """One message; whether there may be another."""
        message = await self.socket.receive(timeout=60)
        if message.type is aiohttp.WSMsgType.BINARY:
            kind, data = message.data[0], message.data[1:]
            if kind == REPLAY:
                (self.first,), data = struct.unpack("!Q", data[:8]), data[8:]
            self.output[kind] += data
        elif message.type is aiohttp.WSMsgType.TEXT:
            self.said.append(json.loads(message.data))
        else:
            self.reason = message.data if message.type is aiohttp.WSMsgType.CLOSE else None
            return False
        return True

    async def until(self, text: bytes, *, kind: int = STDOUT) -> None:
        while text not in self.output[kind]:
            assert await self.take(), f"closed with {self.reason}: {self.output} {self.said}"

    async def until_said(self, kind: str) -> dict[str, Any]:
        while not (found := [frame for frame in self.said if frame["type"] == kind]):
            assert await self.take(), f"closed with {self.reason}: {self.output} {self.said}"
        return found[0]

    async def end(self) -> int:
        """The exit code, once the socket has been closed after it."""
        while await self.take():
            pass
        assert self.reason == 1000
        assert [frame["type"] for frame in self.said][-1] == "exit"
        return self.said[-1]["exit_code"]


@pytest.fixture
async def execd(address: str) -> AsyncIterator[Execd]:
    async with aiohttp.ClientSession(address, headers={"X-EXECD-ACCESS-TOKEN": TOKEN}) as http:
        execd = Execd(http)
        yield execd
        await execd.close()


async def test_nothing_is_answered_without_the_token(execd: Execd) -> None:
    for method, path in (("GET", "/ping"), ("POST", "/pty"), ("GET", "/files/info"), ("POST", "/files/upload")):
        status, _ = await execd.call(method, path, headers={"X-EXECD-ACCESS-TOKEN": "another"}, data=b"x" * MIB)
        assert (path, status) == (path, 401)
    assert await execd.call("GET", "/ping") == (200, b"")
    assert (await execd.call("GET", "/nowhere"))[0] == 404


async def test_metrics_are_those_of_the_contract(execd: Execd) -> None:
    status, metrics = await execd.call("GET", "/metrics")
    assert status == 200
    assert set(metrics) == {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"}
    assert 0 <= metrics["cpu_used_pct"] <= 100
    assert 0 < metrics["mem_used_mib"] < metrics["mem_total_mib"]


async def test_relay_reaches_a_port_by_http_and_websocket(execd: Execd, address: str) -> None:
    """Its own, as OpenSandbox gives it for execd itself."""
    port = address.rpartition(":")[2]
    session = await execd.session("echo relayed")
    assert (await execd.call("GET", f"/proxy/{port}/pty/{session}"))[1]["running"] is False
    async with execd.http.ws_connect(f"/proxy/{port}/pty/{session}/ws?pty=0") as socket:
        attached = Attached(socket)
        assert await attached.end() == 0
    assert attached.output[STDOUT] == b"relayed\n"


class TestSessions:
    async def test_process_starts_with_the_first_socket(self, execd: Execd, tmp_path: Path) -> None:
        session = await execd.session("touch here; pwd; echo $MARK; cat", cwd=str(tmp_path / "made" / "for it"))
        about = {"session_id": session, "running": False, "output_offset": 0}
        assert await execd.call("GET", f"/pty/{session}") == (200, about)
        assert not list((tmp_path / "made" / "for it").iterdir())
        async with execd.attached(session) as attached:
            assert await attached.until_said("connected") == {
                "type": "connected",
                "session_id": session,
                "mode": "pipe",
            }
            await attached.until(b"execd's\n")
            assert attached.output[STDOUT].startswith(f"{tmp_path}/made/for it\n".encode())
            about = (await execd.call("GET", f"/pty/{session}"))[1]
            assert (about["running"], about["output_offset"]) == (True, len(attached.output[STDOUT]))

    async def test_streams_are_apart_and_exact(self, execd: Execd) -> None:
        every = bytes(range(256))
        session = await execd.session("head -c 256; printf 'no line' >&2; exit 7")
        async with execd.attached(session) as attached:
            await attached.write(every[:100])
            await attached.write(every[100:])
            assert await attached.end() == 7
        assert attached.output == {STDOUT: every, STDERR: b"no line", REPLAY: b""}

    async def test_large_input_and_output_pass_unchanged(self, execd: Execd) -> None:
        data = os.urandom(3 * MIB + 17)
        session = await execd.session(f"head -c {len(data)}")
        async with execd.attached(session) as attached:
            writing = asyncio.create_task(attached.write(data))
            assert await attached.end() == 0
            await writing
        assert attached.output[STDOUT] == data

    async def test_terminal_is_one(self, execd: Execd) -> None:
        session = await execd.session("tty; stty size; read line; echo got $line; stty size; echo oops >&2; exit 3")
        async with execd.attached(session, pty=1) as attached:
            assert (await attached.until_said("connected"))["mode"] == "pty"
            await attached.until(b"24 80\r\n")
            await attached.say(type="resize", cols=101, rows=33)
            await attached.write(b"a word\n")
            assert await attached.end() == 3
        assert re.fullmatch(
            rb"/dev/\S+\r\n24 80\r\na word\r\ngot a word\r\n33 101\r\noops\r\n", attached.output[STDOUT]
        )
        assert attached.output[STDERR] == b""

    async def test_terminal_controls_the_job(self, execd: Execd) -> None:
        session = await execd.session("trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.05; done")
        async with execd.attached(session, pty=1) as attached:
            await attached.until(b"ready")
            await attached.write(b"\x03")
            assert await attached.end() == 5
        assert b"interrupted" in attached.output[STDOUT]

    async def test_session_without_command_is_a_shell(self, execd: Execd) -> None:
        session = await execd.session("")
        async with execd.attached(session) as attached:
            await attached.write(b"echo $((6 * 7))\nexit 4\n")
            assert await attached.end() == 4
        assert attached.output[STDOUT] == b"42\n"

    @pytest.mark.parametrize(("name", "code"), [("SIGTERM", -1), ("SIGKILL", -1), ("SIGINT", 9)])
    async def test_signal_goes_to_the_group(self, execd: Execd, name: str, code: int) -> None:
        """A signalled process has no code of its own: -1, as Go has it."""
        session = await execd.session("trap 'exit 9' INT; sleep 600 & echo $$ $!; wait; wait")
        async with execd.attached(session) as attached:
            await attached.until(b"\n")
            child = int(attached.output[STDOUT].split()[1])
            await attached.say(type="signal", signal="SIGNOTHING")
            await attached.say(type="signal", signal=name)
            assert await attached.end() == code
        # A shell makes the children that it does not wait for deaf to interrupts.
        await gone(child) if name != "SIGINT" else os.kill(child, signal.SIGKILL)

    async def test_unknown_frames_are_named_and_pings_answered(self, execd: Execd) -> None:
        session = await execd.session("cat")
        async with execd.attached(session) as attached:
            await attached.say(type="stdout")
            assert (await attached.until_said("error"))["code"] == "INVALID_FRAME"
            await attached.socket.send_str("no JSON")
            await attached.socket.send_bytes(b"\x01not for it")
            await attached.say(type="ping")
            await attached.until_said("pong")
            await attached.say(type="stdin", data="as text")
            await attached.until(b"as text")
        assert len(attached.said) == 3

    async def test_process_goes_on_without_its_socket(self, execd: Execd) -> None:
        session = await execd.session("echo one; read word; echo $word; echo err >&2; read word; echo last; exit 6")
        async with execd.attached(session) as attached:
            await attached.until(b"one\n")
            await attached.write(b"two\n")
        await offset_of(execd, session, len(b"one\ntwo\nerr\n"))
        async with execd.attached(session, since=4) as again:
            await again.until_said("connected")
            assert (again.first, again.output[REPLAY]) in [(4, b"two\nerr\n"), (4, b"err\ntwo\n")]
            await again.write(b"\n")
            assert await again.end() == 6
        assert again.output[STDOUT] == b"last\n"

    async def test_end_without_a_socket_is_told_to_the_next(self, execd: Execd) -> None:
        session = await execd.session("read word; echo bye; exit 8")
        async with execd.attached(session) as attached:
            await attached.write(b"\n")
        await offset_of(execd, session, 4)
        for since, replay in ((0, b"bye\n"), (2, b"e\n"), (4, b""), (99, b"")):
            async with execd.attached(session, since=since) as again:
                assert await again.end() == 8
            assert again.output == {STDOUT: b"", STDERR: b"", REPLAY: replay}
        assert (await execd.call("GET", f"/pty/{session}"))[1]["running"] is False

    async def test_ring_keeps_the_last_mebibyte(self, execd: Execd) -> None:
        size = 3 * MIB
        session = await execd.session(f"read word; seq -w 9999999 | head -c {size}; sleep 600")
        async with execd.attached(session) as attached:
            await attached.write(b"\n")
        await offset_of(execd, session, size)
        async with execd.attached(session, since=5) as again:
            await again.until_said("connected")
        assert (again.first, len(again.output[REPLAY])) == (size - MIB, MIB)
        assert again.output[REPLAY].startswith(b"%07d\n" % ((size - MIB) // 8 + 1))

    async def test_process_waits_for_a_slow_socket(self, execd: Execd, tmp_path: Path) -> None:
        session = await execd.session("head -c 32000000 /dev/zero; touch done", cwd=str(tmp_path))
        async with execd.attached(session) as attached:
            await attached.until(b"\0")
            offset, earlier = await offset_of(execd, session, 1), -1
            while offset != earlier:
                await asyncio.sleep(0.5)
                offset, earlier = await offset_of(execd, session, 1), offset
            assert offset < 16_000_000
            assert not (tmp_path / "done").exists()
            assert await attached.end() == 0
        assert len(attached.output[STDOUT]) == 32_000_000

    async def test_one_socket_at_a_time_unless_it_is_taken_over(self, execd: Execd) -> None:
        session = await execd.session("while read word; do echo $word; done")
        async with execd.attached(session) as first:
            await first.write(b"one\n")
            await first.until(b"one\n")
            assert (await execd.call("GET", f"/pty/{session}/ws"))[0] == 409
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await execd.http.ws_connect(f"/pty/{session}/ws")
            assert refused.value.status == 409
            # What is no handshake takes nothing over.
            assert (await execd.call("GET", f"/pty/{session}/ws?takeover=1"))[0] == 400
            async with execd.attached(session, takeover=1, since=4) as second:
                await second.write(b"two\n")
                await second.until(b"two\n")
                assert not await first.take()
                assert first.reason == 4001
        assert second.output == {STDOUT: b"two\n", STDERR: b"", REPLAY: b""}

    async def test_takeover_does_not_wait_for_who_is_stuck(self, execd: Execd) -> None:
        """Neither for one that reads nothing nor for the input that it left with a process that reads none."""
        session = await execd.session("yes & sleep 600")
        async with execd.attached(session) as first:
            await first.until(b"y\n")
            await first.write(bytes(MIB))
            await asyncio.sleep(0.5)
            async with execd.attached(session, takeover=1) as second:
                await second.until(b"y\n")
                await second.say(type="signal", signal="SIGKILL")
                await second.until_said("exit")

    async def test_exit_does_not_wait_for_what_was_left_running(self, execd: Execd) -> None:
        session = await execd.session("(sleep 0.3; echo late; exec sleep 600) & echo $!; exit 2")
        async with execd.attached(session) as attached:
            assert await attached.end() == 2
        # What is left can go on writing.
        await offset_of(execd, session, len(attached.output[STDOUT]) + len(b"late\n"))
        os.kill(int(attached.output[STDOUT]), signal.SIGKILL)

    async def test_closed_input_is_an_error_that_ends_the_socket_alone(self, execd: Execd) -> None:
        session = await execd.session("exec <&-; echo closed; sleep 600")
        async with execd.attached(session) as attached:
            await attached.until(b"closed\n")
            await attached.write(b"nobody reads it")
            assert (await attached.until_said("error"))["code"] == "STDIN_WRITE_FAILED"
            assert not await attached.take()
        assert (await execd.call("GET", f"/pty/{session}"))[1]["running"] is True

    async def test_what_cannot_start_says_so(self, execd: Execd, tmp_path: Path) -> None:
        session = await execd.session("true", cwd=str(tmp_path / "gone"))
        (tmp_path / "gone").rmdir()
        async with execd.attached(session) as attached:
            assert (await attached.until_said("error"))["code"] == "START_FAILED"
            assert not await attached.take()

    async def test_deleted_session_is_gone_with_its_processes(self, execd: Execd) -> None:
        session = await execd.session("sleep 600 & echo $!; wait")
        async with execd.attached(session) as attached:
            await attached.until(b"\n")
            assert (await execd.call("DELETE", f"/pty/{session}"))[0] == 200
            assert await attached.end() == -1
        await gone(int(attached.output[STDOUT]))
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/ws")):
            status, error = await execd.call(method, f"/pty/{session}{path}")
            assert (status, error["code"]) == (404, "CONTEXT_NOT_FOUND")

    async def test_silent_sockets_are_pinged_and_dead_ones_dropped(self, program: Path) -> None:
        headers = {"X-EXECD-ACCESS-TOKEN": TOKEN}
        with started(program, EXECD_PING_SECONDS="0.3") as address:
            async with aiohttp.ClientSession(address, headers=headers) as http:
                execd = Execd(http)
                session = await execd.session("cat")
                async with http.ws_connect(f"/pty/{session}/ws?pty=0", autoping=False) as socket:
                    kinds = [(await socket.receive(timeout=60)).type for _ in range(2)]
                    assert kinds == [aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.PING]
                    # Without an answer to a ping it is dropped.
                    while not socket.closed:
                        await socket.receive(timeout=60)
                async with execd.attached(session) as attached:
                    reading = asyncio.create_task(attached.until(b"still there"))
                    await asyncio.sleep(1.5)
                    await attached.write(b"still there")
                    await reading
                await execd.close()


async def offset_of(execd: Execd, session: str, least: int) -> int:
    """How much the process has written, once it is that much."""
    async with asyncio.timeout(60):
        while (offset := (await execd.call("GET", f"/pty/{session}"))[1]["output_offset"]) < least:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return offset


async def gone(pid: int) -> None:
    """Once it has ended; what nobody waits for stays as a zombie."""
    async with asyncio.timeout(60):
        while (path := Path(f"/proc/{pid}/stat")).exists() and path.read_text().rpartition(") ")[2][0] != "Z":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
