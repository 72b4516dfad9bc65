"""What must outlive this gateway's process is kept in the sandbox: its identity, and which sessions are which commands.

execd lists no sessions, and nobody else remembers what Init said. So both are files of root's in the sandbox, and whichever
core comes next, on this machine or another one, finds them there. Root of the sandbox could change them, and would deceive
itself: what is read is taken for what a client could have asked for, and no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from sandgate_errors import NotFound
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.uploads import upload

__all__ = ["Records"]

_log = logging.getLogger(__name__)

_FOLDER = "/run/sandgate/execd"
_IDENTITY, _SURROUNDINGS = "identity", "surroundings"
#: Bytes of one record, whose variables and arguments a client may have made long.
_LONGEST = 8 * 1024 * 1024


class Records:
    """The files of one sandbox: ``identity.json``, ``surroundings.json``, and ``NUMBER.json`` for each command."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def clear(self) -> None:
        """Forget what an earlier sandbox with these files left in them."""
        with contextlib.suppress(NotFound):
            await self._client.ask("DELETE", "directories", query=[("path", _FOLDER)], what="the sandbox's records")

    async def keep_identity(self, identity: Mapping[str, object]) -> None:
        await self._keep(_IDENTITY, identity)

    async def identity(self) -> Mapping[str, Any] | None:
        return await self._read(_IDENTITY)

    async def keep_surroundings(self, surroundings: Mapping[str, object]) -> None:
        await self._keep(_SURROUNDINGS, surroundings)

    async def surroundings(self) -> Mapping[str, Any] | None:
        return await self._read(_SURROUNDINGS)

    async def keep_command(self, number: int, about: Mapping[str, object]) -> None:
        await self._keep(str(number), about)

    def begun(self, number: int) -> str:
        """The folder that a command makes before anything else: execd may start one a second time, which then ends at once."""
        return f"{_FOLDER}/{number}"

    async def forget_command(self, number: int) -> None:
        for route, path in (("files", _path(str(number))), ("directories", self.begun(number))):
            with contextlib.suppress(NotFound):
                await self._client.ask("DELETE", route, query=[("path", path)], what="a command's record")

    async def commands(self) -> Mapping[int, Mapping[str, Any]]:
        """By number. What cannot be read is none."""
        found: dict[int, Mapping[str, Any]] = {}
        try:
            listed = await self._client.ask(
                "GET", "directories/list", query=[("path", _FOLDER), ("depth", "1")], what="the sandbox's records"
            )
        except NotFound:
            return found
        names = [str(entry.get("path", "")).rpartition("/")[2] for entry in listed or () if isinstance(entry, dict)]
        for name in sorted(names):
            number = name.removesuffix(".json")
            if number.isdecimal() and number.isascii() and (about := await self._read(number)) is not None:
                found[int(number)] = about
        return found

    async def _keep(self, name: str, content: Mapping[str, object]) -> None:
        async def body() -> Any:
            yield json.dumps(content).encode()

        async with self._client.bounded():
            await upload(self._client, _path(name), body(), mode=600)

    async def _read(self, name: str) -> Mapping[str, Any] | None:
        query = [("path", _path(name))]
        text = bytearray()
        try:
            async with (
                self._client.bounded(),
                self._client.request("GET", "files/download", query=query, what="a record") as response,
            ):
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > _LONGEST:
                        break
        except NotFound:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(bytes(text))
            if isinstance(found, dict):
                return found
        _log.warning("a record in a sandbox is damaged: %s", name)
        return None


def _path(name: str) -> str:
    return f"{_FOLDER}/{name}.json"
