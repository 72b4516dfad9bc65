"""The way to an agent through a WebSocket: literal frames, every border, and nobody without the token."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandgate_agent.doorway import Door, frame, listen, serve
from sandgate_testing.agent_process import eventually

TOKEN = "let-me-in"
KEY = base64.b64encode(b"0123456789abcdef").decode()
READY = b"\x81\x05ready"


def head(**changes: str | None) -> bytes:
    fields: dict[str, str | None] = {
        "Host": "x",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": KEY,
        "X-Sandgate-Tunnel": TOKEN,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode()


def masked(payload: bytes, *, opcode: int = 2, first: int | None = None) -> bytes:
    """A client's frame."""
    mask = b"\x01\x02\x03\x04"
    covered = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    size = len(payload)
    if size < 126:
        length = bytes((0x80 | size,))
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    return bytes((0x80 | opcode if first is None else first,)) + length + mask + covered


class Visitor:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hears(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 10)

    async def hears_all(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 15)

    async def enters(self) -> bytes:
        await self.says(head())
        answer = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        assert await self.hears(len(READY)) == READY
        return answer


class House:
    """A door before an agent that says everything back, and notes what it was told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.visitors: list[Visitor] = []
        self.heard = b""
        self.visits = 0

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        while data := await reader.read(65536):
            self.heard += data
            writer.write(data)
            await writer.drain()
        writer.close()

    async def heard_just(self, data: bytes) -> None:
        await eventually(lambda: self.heard == data)

    async def visitor(self) -> Visitor:
        self.visitors.append(Visitor(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.visitors[-1]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    listener = listen(0)
    house = House(listener.getsockname()[1])
    path = os.path.relpath(tmp_path / "agent")
    agent = await asyncio.start_unix_server(house.echo, path)
    door = await serve(Door(port=house.port, token=TOKEN, agent=path), listener)
    yield house
    for visitor in house.visitors:
        visitor.writer.close()
    door.close()
    agent.close()
    # What they were doing ends with their connections.
    await asyncio.sleep(0.1)


async def test_bytes_pass_both_ways_as_they_are(house: House) -> None:
    visitor = await house.visitor()
    answer = await visitor.enters()
    digest = hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n" in answer
    for payload in (b"x", bytes(range(256)), os.urandom(70_000)):
        await visitor.says(masked(payload))
        heard = b""
        while len(heard) < len(payload):
            first, length = await visitor.hears(2)
            assert first == 0x82
            size = length
            if length >= 126:
                size = int.from_bytes(await visitor.hears(2 if length == 126 else 8), "big")
            heard += await visitor.hears(size)
        assert heard == payload


async def test_frame_is_understood_wherever_it_is_split(house: House) -> None:
    visitor = await house.visitor()
    await visitor.enters()
    whole = masked(b"abc") + masked(b"d" * 130)
    for place in range(len(whole)):
        house.heard = b""
        await visitor.says(whole[:place])
        await asyncio.sleep(0.002)
        await visitor.says(whole[place:])
        await house.heard_just(b"abc" + b"d" * 130)
    assert house.visits == 1


async def test_fragments_are_bytes_like_others(house: House) -> None:
    visitor = await house.visitor()
    await visitor.enters()
    await visitor.says(masked(b"ab", first=0x02) + masked(b"cd", first=0x00) + masked(b"ef", first=0x80))
    await house.heard_just(b"abcdef")


@pytest.mark.parametrize("token", [None, "", "let-me-i", "let-me-inn", "Let-me-in", "ü"])
async def test_nobody_without_the_token_reaches_the_agent(house: House, token: str | None) -> None:
    """Not even the bytes that came with the request do."""
    visitor = await house.visitor()
    await visitor.says(head(X_Sandgate_Tunnel=token) + masked(b"hello"))
    assert (await visitor.hears_all()).startswith(b"HTTP/1.1 401 ")
    assert house.visits == 0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Upgrade": "h2c"}, b"400"),
        ({"Sec_WebSocket_Key": None}, b"400"),
        ({"Sec_WebSocket_Key": "short"}, b"400"),
        ({"Sec_WebSocket_Key": "!" * 24}, b"400"),
        ({"Sec_WebSocket_Version": "8"}, b"426"),
    ],
)
async def test_what_is_no_web_socket_is_refused(house: House, changes: dict[str, str | None], status: bytes) -> None:
    visitor = await house.visitor()
    await visitor.says(head(**changes))
    assert (await visitor.hears_all()).startswith(b"HTTP/1.1 " + status)


async def test_head_without_end_is_cut_off(house: House) -> None:
    visitor = await house.visitor()
    await visitor.says(b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000)
    assert (await visitor.hears_all())[:12] in {b"HTTP/1.1 431", b""}


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x82\x03abc", 1002),  # not masked
        (masked(b"x", first=0xC2), 1002),  # a bit of an extension
        (masked(b"", first=0x09), 1002),  # a ping in parts
        (b"\x89\xfe\x00\x7e\x01\x02\x03\x04", 1002),  # a ping too long
        (b"\x82\xff\x00\x00\x00\x00\x01\x00\x00\x01", 1009),  # more than a frame may have
        (masked(b"text", opcode=1), 1003),
        (masked(b"x", opcode=5), 1003),
    ],
)
async def test_what_breaks_the_protocol_ends_the_connection(house: House, sent: bytes, code: int) -> None:
    visitor = await house.visitor()
    await visitor.enters()
    await visitor.says(sent)
    assert await visitor.hears_all() == frame(code.to_bytes(2, "big"), opcode=8)
    assert house.heard == b""


async def test_ping_is_answered_and_a_pong_is_none(house: House) -> None:
    visitor = await house.visitor()
    await visitor.enters()
    await visitor.says(masked(b"", opcode=10) + masked(b"there?", opcode=9))
    assert await visitor.hears(8) == b"\x8a\x06there?"


async def test_end_of_one_side_is_the_end_of_the_other(house: House) -> None:
    visitor = await house.visitor()
    await visitor.enters()
    await visitor.says(masked(b"\x03\xe8", opcode=8))
    assert await visitor.hears_all() == frame((1001).to_bytes(2, "big"), opcode=8)


async def test_agent_that_is_not_there_yet_is_said_so(tmp_path: Path) -> None:
    listener = listen(0)
    port = listener.getsockname()[1]
    async with await serve(Door(port=port, token=TOKEN, agent=str(tmp_path / "nobody")), listener):
        visitor = Visitor(*await asyncio.open_connection("127.0.0.1", port))
        await visitor.says(head())
        assert (await visitor.hears_all()).startswith(b"HTTP/1.1 503 ")
        visitor.writer.close()
        await visitor.writer.wait_closed()
