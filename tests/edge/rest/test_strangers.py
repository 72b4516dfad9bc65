"""What somebody without a good API key can make the edge keep in memory: next to nothing (S12, C58)."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Of the form of a key, and nobody's.
WRONG = "e2b_" + "5" * 40
LARGE = 8 * 1024 * 1024


async def begun(edge, path, *, framing, key=WRONG):
    """The status that comes while most of a large body has not been sent; None if none comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n{framing}\r\n\r\n"
        part = b'{"templateID":"' + b"x" * 200_000
        chunk = part if "Length" in framing else b"%x\r\n%b\r\n" % (len(part), part)
        writer.write(head.encode() + chunk)
        async with asyncio.timeout(20):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize("framing", [f"Content-Length: {LARGE}", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(
    "path", ["/v2/sandboxes", "/sandboxes", "/sandboxes/i0/connect", "/sandboxes/i0/timeout", "/sandboxes/i0/snapshots"]
)
async def test_a_large_body_of_a_stranger_is_refused_before_it_is_there(edge, path, framing):
    assert await begun(edge, path, framing=framing) == 401


async def test_a_large_body_of_an_owner_is_read(edge):
    status, error, _ = await edge.rest(
        "POST", "/v2/sandboxes", {"templateID": "base", "ignored": "x" * 900_000, "timeout": 0}
    )
    assert (status, error["message"]) == (400, "timeout must be at least one second")


async def test_a_large_body_of_the_administrator_needs_no_api_key(edge):
    body = json.dumps({"ignored": "x" * 200_000}).encode()
    headers = {"X-Admin-Token": edge.admin_token}
    status, error, _ = await edge.rest("POST", "/api-keys", raw=body, key=None, headers=headers)
    assert (status, error["message"]) == (400, "name is required")
