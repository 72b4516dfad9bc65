"""Large downloads by descriptor (docs/architecture.md): what an agent hands over may be anything, and a client may leave
at any time. The edge runs in the test's own process, so its descriptors can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge.rest import downloads, handover, sendfile

Header = agent_pb2.ReadFileResponse.Header
PIECE = 1024 * 1024
#: More than the kernel keeps for a connection whose client does not read.
SIZE = 24 * PIECE + 17
CONTENT = random.Random(4).randbytes(PIECE) * 24 + b"seventeen bytes.."


class Source:
    """An agent with one file, which it gives out both ways. The test says what it hands over."""

    def __init__(self, edge: Any, folder: Path) -> None:
        self.path = folder / "large"
        self.path.write_bytes(CONTENT)
        self.header = Header(path="/large", name="large", size=SIZE)
        self.edge = edge
        self.asked: list[list[bytes]] = []
        self.streamed = 0
        self.connections: list[socket.socket] = []
        self.answer: Callable[[socket.socket], None] = self.hand_over
        edge.agent.on["ReadFile"] = self.stream
        address = edge.agent.target.removeprefix("unix:") + ".files"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve)

        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        while self.connections:
            self.connections.pop().close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            with contextlib.suppress(ConnectionResetError):
                self.asked.append(connection.recv(65536).split(b"\0"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.answer(connection)

    def hand_over(self, connection: socket.socket) -> None:
        self.send(connection, self.header, self.path)

    def send(self, connection: socket.socket, header: Header, *paths: Path, flags: int = os.O_RDONLY) -> None:
        fds = [os.open(path, flags) for path in paths]
        try:
            # An edge whose client has left may have closed its side.
            socket.send_fds(connection, [header.SerializeToString()], fds)
        finally:
            for fd in fds:
                os.close(fd)

    async def stream(self, request: agent_pb2.ReadFileRequest, _context: object) -> AsyncIterator[object]:
        self.streamed = 0
        yield agent_pb2.ReadFileResponse(header=self.header)
        with self.path.open("rb") as file:
            file.seek(request.offset)
            left = request.length if request.HasField("length") else SIZE
            while left and (piece := file.read(min(PIECE // 2, left))):
                left -= len(piece)
                self.streamed += len(piece)
                yield agent_pb2.ReadFileResponse(data=piece)

    @property
    def came_as_stream(self) -> bool:
        """All of it, and not only what is on its way when the descriptor comes."""
        return self.streamed >= SIZE


@pytest.fixture
async def source(edge: Any, tmp_path: Path) -> AsyncIterator[Source]:
    source = Source(edge, tmp_path)
    # Opens the channels that stay open.
    assert (await edge.ask("/files?path=/large", method="GET", headers={"Range": "bytes=0-9"})).body == CONTENT[:10]
    yield source
    source.close()


def open_files() -> list[str]:
    """What the descriptors of this process are, but for those of its own machinery."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
        except FileNotFoundError:
            pass
    return sorted(found)


async def settled(expected: list[str]) -> None:
    await until(lambda: open_files() == expected)


async def read_slowly(edge: Any, **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes its time from the first byte on."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, edge.address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=64 * 1024)
    writer.write(edge.request("/files?path=/large", method="GET", headers=headers))
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """What came, and whether it ended in a reset."""
    received = bytearray()
    try:
        while piece := await reader.read(1 << 16):
            received += piece
    except ConnectionResetError:
        return bytes(received), True
    return bytes(received), False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- what is waited for happens in other threads
            await asyncio.sleep(0.02)


async def test_descriptor_is_sent_where_the_agent_hands_one_over(edge: Any, source: Source) -> None:
    before = open_files()
    reply = await edge.ask("/files?path=/large&username=root", method="GET")
    assert (reply.status, reply.headers["content-length"]) == (200, str(SIZE))
    assert reply.body == CONTENT
    assert source.asked == [[b"agent-token-of-iopen", b"root", b"/large"]]
    assert not source.came_as_stream
    source.hang_up()
    await settled(before)


async def test_connection_serves_the_next_request(edge: Any, source: Source) -> None:
    def both() -> bytes:
        with socket.create_connection(edge.address, timeout=20) as client:
            received = b""
            for _ in range(2):
                client.sendall(edge.request("/files?path=/large", method="GET", headers={"Connection": "keep-alive"}))
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(1)
                body = bytearray()
                while len(body) < SIZE:
                    body += client.recv(SIZE - len(body))
                assert body == CONTENT
                received += head
            return received

    assert (await asyncio.to_thread(both)).count(b"200 OK") == 2
    assert len(source.asked) == 2


@pytest.mark.parametrize("wanted", ["bytes=5-", "bytes=1048577-20000000", "bytes=-9000000"])
async def test_ranges_are_cut_out_of_the_descriptor(edge: Any, source: Source, wanted: str) -> None:
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    expected = CONTENT[int(first) : int(last) + 1 if last else None] if first else CONTENT[-int(last) :]
    reply = await edge.ask("/files?path=/large", method="GET", headers={"Range": wanted})
    assert (reply.status, reply.headers["content-length"]) == (206, str(len(expected)))
    assert reply.body == expected
    assert len(source.asked) == 1


async def test_several_ranges_in_one_answer(edge: Any, source: Source) -> None:
    reply = await edge.ask("/files?path=/large", method="GET", headers={"Range": "bytes=0-9000000,10000000-19999999"})
    assert reply.status == 206
    assert CONTENT[:9000001] in reply.body
    assert CONTENT[10000000:20000000] in reply.body
    assert len(reply.body) == int(reply.headers["content-length"])
    assert len(source.asked) == 2


async def test_small_files_and_compressed_answers_take_the_stream(edge: Any, source: Source) -> None:
    for headers in ({"Accept-Encoding": "gzip"}, {"Range": f"bytes=0-{downloads._WORTH_HANDING_OVER // 2}"}):
        reply = await edge.ask("/files?path=/large", method="GET", headers=headers)
        assert reply.status in {200, 206}
    assert source.asked == []


def answers(source: Source, folder: Path) -> dict[str, Callable[[socket.socket], None]]:
    """What an agent should not hand over."""
    other = folder / "other"
    other.write_bytes(b"other")
    os.mkfifo(folder / "pipe")
    changed = Header(path="/large", name="large", size=SIZE)
    changed.modified_time.seconds = 1
    path, header = source.path, source.header
    return {
        "silence": lambda _: None,
        "the end": lambda connection: connection.shutdown(socket.SHUT_RDWR),
        "a header alone": lambda connection: source.send(connection, header),
        "a descriptor alone": lambda connection: _send_alone(connection, path),
        "junk": lambda connection: _send_alone(connection, path, b"\xff" * 100),
        "too long": lambda connection: _send_alone(connection, path, b"\x0a" * 20_000),
        "two files": lambda connection: source.send(connection, header, path, path),
        "many files": lambda connection: source.send(connection, header, *[path] * 200),
        "another header": lambda connection: source.send(connection, changed, path),
        "another file": lambda connection: source.send(connection, header, other),
        "to write": lambda connection: source.send(connection, header, path, flags=os.O_WRONLY),
        "to read and write": lambda connection: source.send(connection, header, path, flags=os.O_RDWR),
        "a name": lambda connection: source.send(connection, header, path, flags=os.O_PATH),
        "a pipe": lambda connection: source.send(
            connection, header, folder / "pipe", flags=os.O_RDONLY | os.O_NONBLOCK
        ),
        "a directory": lambda connection: source.send(connection, header, folder),
        "a device": lambda connection: source.send(connection, header, Path("/dev/zero")),
        "a virtual file": lambda connection: source.send(connection, header, Path("/proc/self/mem")),
    }


def _send_alone(connection: socket.socket, path: Path, data: bytes = b"") -> None:
    fd = os.open(path, os.O_RDONLY)
    # A packet of nothing is the end for whoever reads it; its descriptor comes all the same.
    socket.send_fds(connection, [data], [fd])
    os.close(fd)


ANSWERS = (
    "silence", "the end", "a header alone", "a descriptor alone", "junk", "too long", "two files", "many files",
    "another header", "another file", "to write", "to read and write", "a name", "a pipe", "a directory", "a device",
    "a virtual file",
)  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
async def test_whatever_else_is_handed_over_is_closed_and_the_stream_goes_on(
    edge: Any, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(handover, "_ANSWER_SECONDS", 0.5)
    known = answers(source, tmp_path)
    assert set(known) == set(ANSWERS)
    source.answer = known[answer]
    before = open_files()
    reply = await edge.ask("/files?path=/large", method="GET")
    assert (reply.status, reply.body == CONTENT) == (200, True)
    assert source.came_as_stream
    assert len(source.asked) == 1
    source.hang_up()
    await settled(before)


async def test_agent_without_such_a_socket_is_streamed_from(edge: Any, source: Source) -> None:
    os.unlink(edge.agent.target.removeprefix("unix:") + ".files")
    reply = await edge.ask("/files?path=/large", method="GET")
    assert (reply.status, reply.body == CONTENT) == (200, True)
    assert (source.asked, source.came_as_stream) == ([], True)


@pytest.mark.parametrize("size", [0, 2 * PIECE, SIZE - 1])
async def test_file_that_shrinks_breaks_the_answer_off(edge: Any, source: Source, size: int) -> None:
    """Never padded, and never an orderly end."""
    before = open_files()
    reader, writer = await read_slowly(edge)
    os.truncate(source.path, size)
    received, was_reset = await rest_of(reader)
    writer.close()
    assert was_reset
    assert len(received) < SIZE
    assert CONTENT.startswith(received)
    source.hang_up()
    await settled(before)


async def test_file_that_grows_is_sent_as_long_as_it_was_announced(edge: Any, source: Source) -> None:
    reader, writer = await read_slowly(edge, Connection="close")
    with source.path.open("ab") as file:
        file.write(b"more" * PIECE)
    assert await reader.read(-1) == CONTENT
    writer.close()


async def test_end_of_the_sandbox_ends_its_downloads(edge: Any, source: Source) -> None:
    """A descriptor would outlive it; what a killed sandbox had is not handed on, nor its disk space held (R13)."""
    before = open_files()
    reader, writer = await read_slowly(edge)
    try:
        # More than comes before the descriptor: an agent that goes earlier has handed nothing over.
        await reader.readexactly(2 * PIECE)
        source.hang_up()
        assert (await rest_of(reader))[1], "an orderly end"
    finally:
        writer.close()
    await settled(before)


async def test_clients_that_leave_at_any_point_leave_no_descriptor(edge: Any, source: Source) -> None:
    await edge.ask("/files?path=/large", method="GET")
    source.hang_up()
    await asyncio.sleep(0.2)
    before = open_files()
    dice = random.Random(7)

    def leave() -> None:
        with socket.create_connection(edge.address, timeout=20) as client:
            client.sendall(edge.request("/files?path=/large", method="GET"))
            for _ in range(dice.randrange(40)):
                client.recv(dice.randrange(1, PIECE))

    for _ in range(20):
        await asyncio.gather(*(asyncio.to_thread(leave) for _ in range(6)))
    assert source.asked
    source.hang_up()
    await settled(before)


async def test_one_sandbox_has_a_few_files_at_once_and_the_next_comes_as_a_stream(
    edge: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_MOST_OF_ONE_AGENT", 2)
    waiting = [await read_slowly(edge) for _ in range(2)]
    await until(lambda: len(source.asked) == 2)
    reply = await edge.ask("/files?path=/large", method="GET")
    assert (reply.body == CONTENT, source.came_as_stream, len(source.asked)) == (True, True, 2)
    for _, writer in waiting:
        writer.transport.abort()
    async with asyncio.timeout(20):
        while len(source.asked) == 2:
            assert (await edge.ask("/files?path=/large", method="GET")).body == CONTENT


async def test_disk_that_does_not_answer_ends_one_download_and_holds_nobody_else_up(
    edge: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, turn = threading.Event(), sendfile._turn

    def delayed(out: int, fd: int, offset: int, end: int) -> tuple[int, bool]:
        hanging.wait(20)
        return turn(out, fd, offset, end)

    before = open_files()
    monkeypatch.setattr(sendfile, "_turn", delayed)
    monkeypatch.setattr(sendfile, "_TURN_SECONDS", 0.3)
    cut = asyncio.create_task(edge.ask("/files?path=/large", method="GET"))
    assert (await edge.ask("/health", method="GET", sandbox=None)).status in {200, 204}
    await until(lambda: bool(source.asked))
    await asyncio.sleep(0.5)
    hanging.set()
    assert len((await cut).body) < SIZE
    source.hang_up()
    await settled(before)
