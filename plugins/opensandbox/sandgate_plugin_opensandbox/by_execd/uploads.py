"""Content on its way into a sandbox: execd's upload, whose body is never held whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator

import aiohttp

from sandgate_errors import SandgateError
from sandgate_plugin_opensandbox.by_execd.client import Client

__all__ = ["upload"]


async def upload(
    client: Client, path: str, content: AsyncIterable[bytes], *, mode: int, owner: str = "root", group: str = "root"
) -> None:
    """Write a file, over what is there; parents are made. The digits of ``mode`` are read as octal ones: 644 is 0644."""
    about = {"path": path, "owner": owner, "group": group, "mode": mode}
    form = aiohttp.FormData()
    failures: list[SandgateError] = []
    # Both parts have to look like files.
    form.add_field("metadata", json.dumps(about).encode(), filename="metadata", content_type="application/json")
    form.add_field("file", _remembering(content, failures), filename="file", content_type="application/octet-stream")
    try:
        async with client.request("POST", "files/upload", data=form, what=f"path '{path}'"):
            pass
    except SandgateError:
        if failures:
            raise failures[0] from None
        raise


async def _remembering(content: AsyncIterable[bytes], failures: list[SandgateError]) -> AsyncIterator[bytes]:
    """Why content came to no end is the caller's to hear, and not that execd got none."""
    try:
        async for piece in content:
            yield piece
    except SandgateError as error:
        failures.append(error)
        raise
