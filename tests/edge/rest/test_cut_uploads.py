"""Uploads that end at any byte leave no file open, nothing but a beginning, and a gateway that serves on (behaviour D24)."""

import asyncio
import contextlib
import gzip
import os
import random
import socket
import struct
from pathlib import Path

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTENTS = {"one": b"first content\r\n--b0undar", "two": b"second " * 9}
FORM = (
    b"".join(
        b'--b0undary\r\nContent-Disposition: form-data; name="file"; filename="cut/%b"\r\n\r\n%b\r\n'
        % (name.encode(), content)
        for name, content in CONTENTS.items()
    )
    + b"--b0undary--\r\n"
)
RESET = struct.pack("ii", 1, 0)


def head(box, target, kind, length, *more):
    lines = [
        *(f"POST {target} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"),
        *(f"E2b-Sandbox-Id: {box['sandboxID']}", "E2b-Sandbox-Port: 49983"),
        f"X-Access-Token: {box['envdAccessToken']}",
        *("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}", *more),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def send_and_leave(edge, data, *, way):
    """A third of the clients is reset at once, a third closes its side in order, a third waits until the server is at it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        writer.write(data)
        await writer.drain()
        if way == 0:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return b""
        if way == 1:
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(reader.read(1000), 20 if way == 1 else 0.03)
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def open_below(folder):
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        path = Path(os.readlink(fd))
                        if path.is_relative_to(folder) and path != folder:
                            found.append(path)
    return found


async def nothing_open(folder):
    for _ in range(200):
        if not (left := open_below(folder)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"left open: {left}")


async def cut_everywhere(edge, data, *, at_once=8):
    """The request cut before each of its bytes, some at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(cut):
        async with gate:
            answer = await send_and_leave(edge, data[:cut], way=cut % 3)
            assert not answer.startswith(b"HTTP/1.1 200"), (cut, answer)

    await asyncio.gather(*(one(cut) for cut in range(1, len(data))))


async def leave_when_all_are_begun(edge, data, home):
    """A client that leaves before its last byte, and after the server has begun every file."""
    _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        writer.write(data[:-1])
        await writer.drain()
        async with asyncio.timeout(20):
            while not all((home / "cut" / name).exists() for name in CONTENTS):  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.01)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def only_beginnings(home):
    """Of the files that were begun, which both have been."""
    for name, content in CONTENTS.items():
        assert content.startswith((home / "cut" / name).read_bytes())


async def serves_on(edge, box):
    assert (await edge.write(box, "whole", b"whole"))[0] == 200
    assert (await edge.read(box, "whole"))[1] == b"whole"


async def test_a_form_cut_at_any_byte(edge, box):
    request = head(box, "/files", "multipart/form-data; boundary=b0undary", len(FORM)) + FORM
    await cut_everywhere(edge, request)
    await leave_when_all_are_begun(edge, request, edge.home(box))
    await nothing_open(edge.home(box))
    only_beginnings(edge.home(box))
    await serves_on(edge, box)


async def test_a_chunked_form_cut_at_any_byte(edge, box):
    dice = random.Random(5)
    body, at = b"", 0
    while at < len(FORM):
        piece = FORM[at : at + dice.randint(1, 40)]
        body += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += len(piece)
    request = head(box, "/files", "multipart/form-data; boundary=b0undary", None) + body + b"0\r\n\r\n"
    await cut_everywhere(edge, request)
    await leave_when_all_are_begun(edge, request, edge.home(box))
    await nothing_open(edge.home(box))
    only_beginnings(edge.home(box))
    await serves_on(edge, box)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_plain_content_cut_at_any_byte(edge, box, encoding):
    content = b"content of one file " * 4
    body = gzip.compress(content) if encoding == "gzip" else content
    request = head(box, "/files?path=plain", "application/octet-stream", len(body), f"Content-Encoding: {encoding}")
    await cut_everywhere(edge, request + body)
    await nothing_open(edge.home(box))
    # Some came as far as being written.
    assert content.startswith((edge.home(box) / "plain").read_bytes())
    await serves_on(edge, box)


async def test_large_uploads_cut_where_chance_wants(edge, box):
    """Where the agent is in the middle of writing, and pieces are on their way to it."""
    dice = random.Random(6)
    body = bytes(8_000_000)
    request = head(box, "/files?path=large", "application/octet-stream", len(body)) + body
    cuts = [dice.randrange(len(request)) for _ in range(40)]
    for at in range(0, len(cuts), 4):
        await asyncio.gather(*(send_and_leave(edge, request[:cut], way=cut % 3) for cut in cuts[at : at + 4]))
    await nothing_open(edge.home(box))
    await serves_on(edge, box)
