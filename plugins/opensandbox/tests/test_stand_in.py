"""The stand-in for execd keeps what OpenSandbox says of the genuine one; run as a plain program, as a sandbox runs it.

What it keeps, and what it leaves out, stands at the top of ``sandgate_testing/execd_stand_in/__init__.py``.
"""

from __future__ import annotations

import asyncio
import io
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
from yarl import URL

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

    async def call(self, method: str, path: str | URL, **options: Any) -> tuple[int, Any]:
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

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGHUP"])
    async def test_signal_goes_to_the_group(self, execd: Execd, name: str) -> None:
        """A signalled process has no code of its own: -1, as Go has it."""
        session = await execd.session("sleep 600 & echo $!; wait")
        async with execd.attached(session) as attached:
            await attached.until(b"\n")
            await attached.say(type="signal", signal=name)
            assert await attached.end() == -1
        await gone(int(attached.output[STDOUT]))

    async def test_signal_can_be_caught_and_unknown_ones_are_ignored(self, execd: Execd) -> None:
        session = await execd.session("trap 'exit 9' INT; echo ready; while :; do sleep 0.05; done")
        async with execd.attached(session) as attached:
            await attached.until(b"ready")
            for name in ("SIGNOTHING", "SIGUSR1", "9"):
                await attached.say(type="signal", signal=name)
            await attached.say(type="signal", signal="SIGINT")
            assert await attached.end() == 9

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
            assert await still(execd, session) < 16_000_000
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

    async def test_nonsense_makes_no_session(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for body, status in (({"command": 5}, 400), ([], 400), ({"cwd": f"{tmp_path}/file"}, 500)):
            assert (body, (await execd.call("POST", "/pty", json=body))[0]) == (body, status)

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


class TestHarsh:
    """What the genuine program does, which the stand-in does only when asked to."""

    @pytest.fixture
    async def harsh(self, program: Path) -> AsyncIterator[Execd]:
        with started(program, EXECD_HARSH="1", EXECD_PING_SECONDS="9") as address:
            async with aiohttp.ClientSession(address, headers={"X-EXECD-ACCESS-TOKEN": TOKEN}) as http:
                execd = Execd(http)
                yield execd
                await execd.close()

    async def test_ended_session_starts_again(self, harsh: Execd, tmp_path: Path) -> None:
        session = await harsh.session("echo run >> runs; wc -l < runs", cwd=str(tmp_path))
        for times in (1, 2, 3):
            async with harsh.attached(session, pty=times % 2) as attached:
                assert await attached.end() == 0
        assert (tmp_path / "runs").read_text() == 3 * "run\n"

    async def test_exit_overtakes_output(self, execd: Execd, harsh: Execd) -> None:
        lost = []
        for program in (execd, harsh):
            session = await program.session("cat /dev/zero")
            async with program.attached(session) as attached:
                await attached.until(b"\0")
                # Nobody reads, and so it ends with its pipe full.
                await still(program, session)
                await attached.say(type="signal", signal="SIGKILL")
                async with asyncio.timeout(60):
                    while (await program.call("GET", f"/pty/{session}"))[1]["running"]:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert await attached.end() == -1
            lost.append(len(attached.output[STDOUT]) < await still(program, session))
        assert lost == [False, True]

    async def test_socket_that_takes_nothing_is_dropped(self, harsh: Execd) -> None:
        """Long before it would be for not answering pings: then the process goes on."""
        session = await harsh.session("head -c 64000000 /dev/zero; sleep 600")
        async with harsh.attached(session) as attached:
            await attached.until_said("connected")
            assert await offset_of(harsh, session, 64_000_000, seconds=12) == 64_000_000
            while await attached.take():
                pass
            assert attached.reason is None


async def offset_of(execd: Execd, session: str, least: int, *, seconds: float = 60) -> int:
    """How much the process has written, once it is that much."""
    async with asyncio.timeout(seconds):
        while (offset := (await execd.call("GET", f"/pty/{session}"))[1]["output_offset"]) < least:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return offset


async def still(execd: Execd, session: str) -> int:
    """How much was written, once that grows no more."""
    offset, earlier = await offset_of(execd, session, 1), -1
    while offset != earlier:
        await asyncio.sleep(0.3)
        offset, earlier = await offset_of(execd, session, 1), offset
    return offset


async def gone(pid: int) -> None:
    """Once it has ended; what nobody waits for stays as a zombie."""
    async with asyncio.timeout(60):
        while (path := Path(f"/proc/{pid}/stat")).exists() and path.read_text().rpartition(") ")[2][0] != "Z":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def form(*pairs: tuple[object, bytes], boundary: str = "ab") -> bytes:
    """What a client sends to ``/files/upload``: a description and its file, and so on."""
    parts = []
    for about, content in pairs:
        metadata = about if isinstance(about, bytes) else json.dumps(about).encode()
        for name, data in (("metadata", metadata), ("file", content)):
            head = f'Content-Disposition: form-data; name="{name}"; filename="{name}"\r\nContent-Type: text/plain'
            parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


FORM = {"Content-Type": "multipart/form-data; boundary=ab"}


async def upload(execd: Execd, *pairs: tuple[object, bytes]) -> tuple[int, Any]:
    return await execd.call("POST", "/files/upload", data=io.BytesIO(form(*pairs)), headers=FORM)


async def in_pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for position in range(0, len(data), size):
        yield data[position : position + size]


class TestFiles:
    async def test_info_is_of_the_path_itself(self, execd: Execd, tmp_path: Path) -> None:
        file, folder, link, pipe = (tmp_path / name for name in ("file", "folder", "link", "pipe"))
        file.write_bytes(b"12345")
        file.chmod(0o4640)
        os.utime(file, ns=(0, 1_700_000_000_120_000_000))
        folder.mkdir(0o700)
        link.symlink_to("nowhere")
        os.mkfifo(pipe)
        params = [("path", str(path)) for path in (file, folder, link, pipe)]
        status, found = await execd.call("GET", "/files/info", params=params)
        assert status == 200
        kinds = {path: (about["path"], about["type"]) for path, about in found.items()}
        assert kinds == {
            str(file): (str(file), "file"),
            str(folder): (str(folder), "directory"),
            str(link): (str(link), "symlink"),
            str(pipe): (str(pipe), "other"),
        }
        about = found[str(file)]
        # The digits are the octal ones, of what users, groups and others may.
        assert (about["size"], about["mode"], found[str(folder)]["mode"]) == (5, 640, 700)
        assert (about["owner"], about["group"]) == (file.owner(), file.group())
        assert about["modified_at"] == "2023-11-14T22:13:20.12Z"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z", about["created_at"])

    async def test_one_missing_path_fails_the_whole_question(self, execd: Execd, tmp_path: Path) -> None:
        params = [("path", str(tmp_path)), ("path", str(tmp_path / "missing"))]
        status, error = await execd.call("GET", "/files/info", params=params)
        assert (status, error["code"]) == (404, "FILE_NOT_FOUND")
        assert error["message"] == f"file not found. {tmp_path}/missing: no such file or directory"
        (tmp_path / "file").touch()
        # As there, only what is missing is not found; the rest is an error of the server.
        status, error = await execd.call("GET", "/files/info", params={"path": str(tmp_path / "file" / "below")})
        assert (status, error["code"]) == (500, "RUNTIME_ERROR")
        assert (await execd.call("GET", "/files/info", params={"path": "/a\0b"}))[0] == 500

    async def test_names_need_not_be_text(self, execd: Execd, tmp_path: Path) -> None:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff name")).write_bytes(b"found")
        url = URL(f"/files/download?path={tmp_path}/%FF+name", encoded=True)
        assert await execd.call("GET", url) == (200, b"found")
        found = (await execd.call("GET", "/directories/list", params={"path": str(tmp_path)}))[1]
        assert [about["path"] for about in found] == [f"{tmp_path}/\ufffd name"]

    async def test_download_is_exact(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(data := os.urandom(3 * MIB + 1))
        async with execd.http.get("/files/download", params={"path": str(tmp_path / "file")}) as response:
            assert (response.status, response.content_length) == (200, len(data))
            assert await response.read() == data

    @pytest.mark.parametrize(
        ("asked", "status", "told", "content"),
        [
            ("bytes=0-3", 206, "bytes 0-3/10", b"0123"),
            ("bytes=4-", 206, "bytes 4-9/10", b"456789"),
            ("bytes=-3", 206, "bytes 7-9/10", b"789"),
            ("bytes=-30", 206, "bytes 0-9/10", b"0123456789"),
            ("bytes=8-99", 206, "bytes 8-9/10", b"89"),
            ("bytes=1-1, 4-5", 206, "bytes 1-1/10", b"1"),
            ("bytes=10-", 416, "bytes */10", b""),
            ("bytes=5-4", 416, None, None),
            ("bytes=-", 416, None, None),
            ("lines=1-2", 416, None, None),
        ],
    )
    async def test_range_of_a_file(
        self, execd: Execd, tmp_path: Path, asked: str, status: int, told: str | None, content: bytes | None
    ) -> None:
        (tmp_path / "file").write_bytes(b"0123456789")
        params, headers = {"path": str(tmp_path / "file")}, {"Range": asked}
        async with execd.http.get("/files/download", params=params, headers=headers) as response:
            assert (response.status, response.headers.get("Content-Range")) == (status, told)
            if content is not None:
                assert await response.read() == content

    async def test_range_of_an_empty_file_is_all_of_it(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        params, headers = {"path": str(tmp_path / "file")}, {"Range": "bytes=0-9"}
        assert await execd.call("GET", "/files/download", params=params, headers=headers) == (200, b"")

    async def test_only_files_are_downloaded(self, execd: Execd, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        cases = (("missing", 404, "FILE_NOT_FOUND"), (".", 500, "RUNTIME_ERROR"), ("pipe", 500, "RUNTIME_ERROR"))
        for name, status, code in cases:
            answer = await execd.call("GET", "/files/download", params={"path": f"{tmp_path}/{name}"})
            assert (name, answer[0], answer[1]["code"]) == (name, status, code)
        assert (await execd.call("GET", "/files/download"))[1]["code"] == "MISSING_QUERY"

    async def test_upload_makes_parents_and_gives_rights(self, execd: Execd, tmp_path: Path) -> None:
        owner, group = tmp_path.owner(), tmp_path.group()
        first = {"path": str(tmp_path / "a" / "b" / "one"), "owner": owner, "group": group, "mode": 640}
        second = {"path": str(tmp_path / "two")}
        assert await upload(execd, (first, b"one"), (second, b"")) == (200, b"")
        one = tmp_path / "a" / "b" / "one"
        assert (one.read_bytes(), one.stat().st_mode & 0o7777, one.owner()) == (b"one", 0o640, owner)
        assert (tmp_path / "two").read_bytes() == b""

    async def test_upload_writes_in_place(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"much longer than before")
        os.link(tmp_path / "file", tmp_path / "same")
        (tmp_path / "link").symlink_to("file")
        assert (await upload(execd, ({"path": str(tmp_path / "link"), "mode": 600}, b"new")))[0] == 200
        assert (tmp_path / "same").read_bytes() == b"new"
        assert (tmp_path / "link").is_symlink()

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
    async def test_upload_may_come_in_any_pieces(self, execd: Execd, tmp_path: Path, size: int) -> None:
        """In chunks, cut anywhere, of content that looks like the end of its part over and over."""
        content = b"\r\n--a\r\n--\r\n\r\n--a--\r\n--" + bytes(range(256)) + b"\r\n--a\r"
        data = form(({"path": str(tmp_path / "one")}, content), ({"path": str(tmp_path / "two")}, content[::-1]))
        answer = await execd.call("POST", "/files/upload", data=in_pieces(data, size), headers=FORM)
        assert answer == (200, b"")
        assert (tmp_path / "one").read_bytes() == content
        assert (tmp_path / "two").read_bytes() == content[::-1]

    async def test_upload_is_not_held_in_memory(self, program: Path) -> None:
        size = 192 * MIB
        data = form(({"path": "/dev/null"}, bytes(size)))
        with started(program) as address:
            async with aiohttp.ClientSession(address, headers={"X-EXECD-ACCESS-TOKEN": TOKEN}) as http:
                execd = Execd(http)
                async with http.post("/files/upload", data=in_pieces(data, MIB), headers=FORM) as response:
                    assert response.status == 200
                most = (await run(execd, "grep VmHWM /proc/$PPID/status"))[0]
        assert int(most.split()[1]) * 1024 < size // 2

    async def test_full_disk_is_said_in_the_systems_words(self, execd: Execd) -> None:
        """However much there still was to come."""
        status, error = await upload(execd, ({"path": "/dev/full"}, bytes(8 * MIB)))
        assert (status, error["code"]) == (500, "RUNTIME_ERROR")
        assert error["message"] == "error copying file /dev/full. no space left on device"

    @pytest.mark.parametrize(
        ("about", "status", "code"),
        [
            (b"no JSON", 400, "INVALID_FILE_METADATA"),
            (b"[]", 400, "INVALID_FILE_METADATA"),
            ({"path": ""}, 400, "INVALID_FILE_METADATA"),
            ({"path": 5}, 400, "INVALID_FILE_METADATA"),
            ({"path": "/proc/none/file"}, 500, "RUNTIME_ERROR"),
            ({"path": "."}, 500, "RUNTIME_ERROR"),
            ({"path": "file", "owner": "nobody-of-that-name"}, 500, "RUNTIME_ERROR"),
            ({"path": "file", "mode": 999}, 500, "RUNTIME_ERROR"),
        ],
    )
    async def test_upload_that_cannot_be_done(
        self, execd: Execd, tmp_path: Path, about: Any, status: int, code: str
    ) -> None:
        if isinstance(about, dict) and about["path"] in {".", "file"}:
            about = {**about, "path": f"{tmp_path}/{about['path']}"}
        answer = await upload(execd, (about, bytes(MIB)))
        assert (answer[0], answer[1]["code"]) == (status, code)

    async def test_form_has_descriptions_and_files_in_turn(self, execd: Execd, tmp_path: Path) -> None:
        good = form(({"path": str(tmp_path / "file")}, b"content"))
        metadata, file = (b"--ab\r\n" + part for part in good.removesuffix(b"--ab--\r\n").split(b"--ab\r\n")[1:])
        end = b"--ab--\r\n"
        cases = {
            "INVALID_FILE_METADATA": (end, metadata.replace(b'; filename="metadata"', b"") + end),
            "INVALID_FILE_CONTENT": (metadata + end,),
            "INVALID_FILE": (file + metadata + end, metadata + metadata + file + end, metadata + file, b""),
        }
        for code, bodies in cases.items():
            for body in bodies:
                status, error = await execd.call("POST", "/files/upload", data=body, headers=FORM)
                assert (body, status, error["code"]) == (body, 400, code)
        assert (await execd.call("POST", "/files/upload", data=good))[1]["code"] == "INVALID_FILE"

    async def test_file_moves_with_new_parents_and_over_nothing(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "one").write_bytes(b"1")
        move = {"src": str(tmp_path / "one"), "dest": str(tmp_path / "new" / "two")}
        assert await execd.call("POST", "/files/mv", json=[move]) == (200, b"")
        assert (tmp_path / "new" / "two").read_bytes() == b"1"
        assert (await execd.call("POST", "/files/mv", json=[move]))[1]["code"] == "FILE_NOT_FOUND"
        (tmp_path / "one").write_bytes(b"another")
        status, error = await execd.call("POST", "/files/mv", json=[move])
        assert (status, error["code"]) == (500, "RUNTIME_ERROR")
        assert (tmp_path / "new" / "two").read_bytes() == b"1"
        for body in ([{"src": "/x"}], ["x"], {}):
            assert (await execd.call("POST", "/files/mv", json=body))[0] == 400

    async def test_rights_of_files_change(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for mode in (600, 755, 1777):
            body = {str(tmp_path / "file"): {"mode": mode, "owner": tmp_path.owner(), "group": tmp_path.group()}}
            assert await execd.call("POST", "/files/permissions", json=body) == (200, b"")
            assert f"{(tmp_path / 'file').stat().st_mode & 0o7777:o}" == str(mode)
        assert (await execd.call("POST", "/files/permissions", json={"/none": {"mode": 600}}))[0] == 500
        assert (await execd.call("POST", "/files/permissions", json={"/none": 5}))[0] == 400

    async def test_only_files_are_removed_as_files(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        params = [("path", str(tmp_path / name)) for name in ("file", "missing")]
        assert await execd.call("DELETE", "/files", params=params) == (200, b"")
        assert not (tmp_path / "file").exists()
        status, error = await execd.call("DELETE", "/files", params={"path": str(tmp_path)})
        assert (status, error["message"]) == (
            500,
            f"error removing file {tmp_path}. path is a directory: {tmp_path}",
        )

    async def test_directories_are_made_and_removed_with_all_in_them(self, execd: Execd, tmp_path: Path) -> None:
        body = {str(tmp_path / "a" / "b"): {"mode": 750, "owner": tmp_path.owner(), "group": tmp_path.group()}}
        assert await execd.call("POST", "/directories", json=body) == (200, b"")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o750
        # What is there keeps its rights.
        assert await execd.call("POST", "/directories", json={str(tmp_path / "a" / "b"): {"mode": 700}}) == (200, b"")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o750
        (tmp_path / "a" / "file").touch()
        (tmp_path / "link").symlink_to("a")
        status, error = await execd.call("POST", "/directories", json={str(tmp_path / "a" / "file" / "c"): {}})
        assert (status, error["message"].endswith("not a directory")) == (500, True)
        for name in ("link", "missing"):
            params = {"path": str(tmp_path / name)}
            assert await execd.call("DELETE", "/directories", params=params) == (200, b"")
        assert (tmp_path / "a" / "file").exists()
        assert await execd.call("DELETE", "/directories", params={"path": str(tmp_path / "a")}) == (200, b"")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("depth", "names"),
        [
            (None, ["a", "link", "z"]),
            ("0", []),
            ("1", ["a", "link", "z"]),
            ("2", ["a", "a/b", "a/c", "link", "z"]),
            ("9", ["a", "a/b", "a/b/deep", "a/c", "link", "z"]),
        ],
    )
    async def test_list_goes_as_deep_as_it_should(
        self, execd: Execd, tmp_path: Path, depth: str | None, names: list[str]
    ) -> None:
        (tmp_path / "a" / "b" / "deep").mkdir(parents=True)
        (tmp_path / "a" / "c").touch()
        (tmp_path / "z").touch()
        (tmp_path / "link").symlink_to("a")
        params = {"path": f"{tmp_path}/"} | ({"depth": depth} if depth is not None else {})
        status, found = await execd.call("GET", "/directories/list", params=params)
        assert status == 200
        assert [about["path"].removeprefix(f"{tmp_path}/") for about in found] == names

    async def test_only_directories_are_listed(self, execd: Execd, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        (tmp_path / "file").touch()
        for name, status in (("link", 400), ("file", 400), ("missing", 404)):
            params = {"path": str(tmp_path / name)}
            assert (name, (await execd.call("GET", "/directories/list", params=params))[0]) == (name, status)
        assert (await execd.call("GET", "/directories/list", params={"path": "/", "depth": "-1"}))[0] == 400
        assert (await execd.call("GET", "/directories/list"))[0] == 400


async def run(execd: Execd, command: str, **spec: object) -> tuple[str, dict[str, Any]]:
    """What a command in the foreground wrote, and the last event."""
    status, stream = await execd.call("POST", "/command", json={"command": command, **spec})
    assert status == 200
    events = [json.loads(text) for text in stream.split(b"\n\n") if text]
    assert [event["type"] for event in events[:2]] == ["init", "ping"]
    return "\n".join(event["text"] for event in events if event["type"] == "stdout"), events[-1]


class TestCommands:
    async def test_end_of_a_command_is_told(self, execd: Execd, tmp_path: Path) -> None:
        said, last = await run(execd, "pwd; echo $MORE", cwd=str(tmp_path), envs={"MORE": "than before"})
        assert (said, last["type"]) == (f"{tmp_path}\nthan before", "execution_complete")
        said, last = await run(execd, "echo wrong >&2; exit 5")
        assert (said, last["error"]["ename"], last["error"]["evalue"]) == ("wrong", "CommandExecError", "5")

    async def test_command_goes_on_in_the_background(self, execd: Execd) -> None:
        status, stream = await execd.call("POST", "/command", json={"command": "echo on; exit 3", "background": True})
        events = [json.loads(text) for text in stream.split(b"\n\n") if text]
        assert (status, [event["type"] for event in events]) == (200, ["init", "execution_complete"])
        command = events[0]["text"]
        async with asyncio.timeout(60):
            while (about := (await execd.call("GET", f"/command/status/{command}"))[1])["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert about == {"id": command, "running": False, "exit_code": 3}
        assert await execd.call("GET", f"/command/{command}/logs") == (200, b"on\n")

    async def test_nonsense_is_refused(self, execd: Execd) -> None:
        for body in (b"no JSON", b"[]", b"{}"):
            assert (await execd.call("POST", "/command", data=body))[0] == 400
        assert (await execd.call("GET", "/command/status/none"))[0] == 404
