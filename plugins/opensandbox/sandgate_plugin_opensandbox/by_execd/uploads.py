"""Content on its way into a sandbox: execd's upload, whose body is never held whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable

import aiohttp

from sandgate_plugin_opensandbox.by_execd.client import Client

__all__ = ["upload"]


async def upload(
    client: Client, path: str, content: AsyncIterable[bytes], *, mode: int, owner: str = "root", group: str = "root"
) -> None:
    """Write a file, over what is there; parents are made. The digits of ``mode`` are read as octal ones: 644 is 0644."""
    about = {"path": path, "owner": owner, "group": group, "mode": mode}
    form = aiohttp.FormData()
    # Both parts have to look like files.
    form.add_field("metadata", json.dumps(about).encode(), filename="metadata", content_type="application/json")
    form.add_field("file", content, filename="file", content_type="application/octet-stream")
    async with client.request("POST", "files/upload", data=form, what=f"path '{path}'"):
        pass
