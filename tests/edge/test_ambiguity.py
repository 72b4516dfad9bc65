"""Requests that another reader could understand differently: refused on every plane, and their connection ends.

RFC 9112 sections 3.2.2, 6.1 and 6.3. What the parser refuses itself is in ``ports/test_refusals.py``.
"""

from __future__ import annotations

import asyncio

import pytest

#: The planes, by the path and the headers that lead there.
PLANES = {
    "control": ("/v2/sandboxes", "X-API-Key: e2b_0\r\nContent-Type: application/json\r\n"),
    "rpc": ("/process.Process/List", "E2b-Sandbox-Id: iopen\r\nE2b-Sandbox-Port: 49983\r\nContent-Type: application/json\r\n"),
    "files": (
        "/files?path=x",
        "E2b-Sandbox-Id: iopen\r\nE2b-Sandbox-Port: 49983\r\nContent-Type: application/octet-stream\r\n",
    ),
    "port": ("/x", "E2b-Sandbox-Id: iopen\r\nE2b-Sandbox-Port: 8000\r\n"),
    "no route": ("/nowhere", ""),
}  # fmt: skip
BODY = "2\r\n{}\r\n0\r\n\r\n"
SECOND = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answers(edge, data: str) -> bytes:
    """All that comes back, until the edge closes the connection."""
    reader, writer = await asyncio.open_connection(*edge.address)
    try:
        writer.write(data.encode())
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("path", "fields"), PLANES.values(), ids=PLANES)
@pytest.mark.parametrize(
    ("version", "coding", "status"),
    [("1.1", "gzip, chunked", 501), ("1.1", "br, chunked", 501), ("1.0", "chunked", 400)],
)
async def test_coding_that_is_not_undone_is_never_taken_for_content(edge, path, fields, version, coding, status):
    """An upload in such a coding would be kept as it came, and called a success."""
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\n{fields}Transfer-Encoding: {coding}\r\n"
    answer = await answers(edge, f"{head}Connection: keep-alive\r\n\r\n{BODY}{SECOND}")
    assert answer[8:13] == b" %d " % status, answer
    assert answer.count(b"\r\nDate: ") == 1
    assert edge.agent.requests == []


@pytest.mark.parametrize(("path", "fields"), PLANES.values(), ids=PLANES)
@pytest.mark.parametrize("target", ["http://elsewhere{path}", "http://user@localhost{path}", "http://3000-iopen.box.test{path}"])  # fmt: skip
async def test_host_of_the_target_must_be_that_of_the_header(edge, path, fields, target):
    """Else a proxy that goes by one would check another sandbox than the one that is asked."""
    head = f"POST {target.format(path=path)} HTTP/1.1\r\nHost: localhost\r\n{fields}Content-Length: 0\r\n\r\n"
    answer = await answers(edge, f"{head}{SECOND}")
    assert answer[8:13] == b" 400 ", answer
    assert answer.count(b"\r\nDate: ") == 1
    assert edge.agent.requests == []


@pytest.mark.parametrize("target", ["http://localhost/health", "HTTP://LOCALHOST/health"])
async def test_target_with_the_host_of_the_header_is_like_one_without(edge, target):
    answer = await answers(edge, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer[8:13] == b" 200 ", answer


@pytest.mark.parametrize("data", ["nonsense\r\n\r\n", f"GET /health HTTP/1.1\r\nX: {'x' * 9000}\r\n\r\n", f"GET /{'x' * 20_000} HTTP/1.1\r\n\r\n"], ids=["nonsense", "header", "line"])  # fmt: skip
async def test_no_answer_tells_the_library_behind_it(edge, data):
    answer = await answers(edge, data)
    assert b"\r\nServer: sandgate\r\n" in answer
    assert b"aiohttp" not in answer
