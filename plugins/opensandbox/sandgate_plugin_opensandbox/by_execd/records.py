"""What must outlive this gateway's process is kept in the sandbox: its identity, and which sessions are which commands.

execd lists no sessions, and nobody else remembers what Init said. So both are files of root's in the sandbox, and whichever
core comes next, on this machine or another one, finds them there. Root of the sandbox could change them, and would deceive
itself: what is read is taken for what a client could have asked for, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from sandgate_errors import NotFound
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.uploads import upload

__all__ = ["LARGEST_NUMBER", "MOST_COMMANDS", "Records"]

_log = logging.getLogger(__name__)

_FOLDER = "/run/sandgate/execd"
_IDENTITY, _SURROUNDINGS, _COMMAND = "identity.json", "surroundings.json", "about.json"
#: Numbers are told as pids.
LARGEST_NUMBER = 2**31 - 1
MOST_COMMANDS = 1024
_NUMBER = re.compile(r"[1-9]\d{0,9}", re.ASCII)
#: Names that are looked at, of whatever root of the sandbox has put there.
_MOST_NAMES = 8 * MOST_COMMANDS
#: Bytes. A client may have made its variables and arguments long; those of a command are part of its line (``Sessions``).
_LONGEST_IDENTITY = 8 * 1024 * 1024
_LONGEST_COMMAND = 1024 * 1024
_LONGEST_TOGETHER = 128 * 1024 * 1024
#: Records that are read at the same time.
_AT_ONCE = 8


class Records:
    """The files of one sandbox: ``identity.json``, ``surroundings.json``, and a folder ``NUMBER`` for each command."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def clear(self) -> None:
        """Forget what an earlier sandbox with these files left in them."""
        await self._remove(_FOLDER, what="the sandbox's records")

    async def keep_identity(self, identity: Mapping[str, object]) -> None:
        await self._keep(_IDENTITY, identity)

    async def identity(self) -> Mapping[str, Any] | None:
        return (await self._read(_IDENTITY, _LONGEST_IDENTITY))[0]

    async def keep_surroundings(self, surroundings: Mapping[str, object]) -> None:
        await self._keep(_SURROUNDINGS, surroundings)

    async def surroundings(self) -> Mapping[str, Any] | None:
        return (await self._read(_SURROUNDINGS, _LONGEST_IDENTITY))[0]

    async def keep_command(self, number: int, about: Mapping[str, object]) -> None:
        await self._keep(f"{number}/{_COMMAND}", about)

    def begun(self, number: int) -> str:
        """A folder that a command makes before anything else: execd may start one a second time, which then ends at once.

        No other command has ever had one of this name, whatever is left of it.
        """
        return f"{_FOLDER}/{number}/{os.urandom(8).hex()}"

    async def forget_command(self, number: int) -> None:
        await self._remove(f"{_FOLDER}/{number}", what="a command's record")

    async def commands(self) -> Mapping[int, Mapping[str, Any] | None]:
        """By number, in their order. None is what is left of one that nobody can know any more."""
        numbers = await self._numbers()
        found: dict[int, Mapping[str, Any] | None] = dict.fromkeys(numbers)
        turns, read = asyncio.Semaphore(_AT_ONCE), 0

        async def look(number: int) -> None:
            nonlocal read
            async with turns:
                if read < _LONGEST_TOGETHER:
                    found[number], size = await self._read(f"{number}/{_COMMAND}", _LONGEST_COMMAND)
                    read += size

        try:
            async with asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(look(number))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found

    async def _numbers(self) -> list[int]:
        try:
            names = await self._client.ask_list(
                "directories/list",
                query=[("path", _FOLDER), ("depth", "1")],
                what="the sandbox's records",
                most=_MOST_NAMES,
                make=lambda entry: str(entry.get("path", "")).rpartition("/")[2],
            )
        except NotFound:
            return []
        numbers = {int(name) for name in names if _NUMBER.fullmatch(name)}
        return sorted(number for number in numbers if number <= LARGEST_NUMBER)

    async def _keep(self, name: str, content: Mapping[str, object]) -> None:
        async def body() -> Any:
            yield json.dumps(content).encode()

        async with self._client.bounded():
            await upload(self._client, f"{_FOLDER}/{name}", body(), mode=600)

    async def _remove(self, path: str, *, what: str) -> None:
        with contextlib.suppress(NotFound):
            await self._client.ask("DELETE", "directories", query=[("path", path)], what=what)

    async def _read(self, name: str, longest: int) -> tuple[Mapping[str, Any] | None, int]:
        """And how long it was."""
        query = [("path", f"{_FOLDER}/{name}")]
        text = bytearray()
        try:
            async with (
                self._client.bounded(),
                self._client.request("GET", "files/download", query=query, what="a record") as response,
            ):
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > longest:
                        response.close()
                        break
        except NotFound:
            return None, 0
        return _parsed(text, longest, name), len(text)


def _parsed(text: bytearray, longest: int, name: str) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        if len(text) <= longest:
            found = json.loads(bytes(text))
            # A text that is none could never be told to anybody.
            json.dumps(found, ensure_ascii=False).encode()
            if isinstance(found, dict):
                return found
    _log.warning("a record in a sandbox is damaged: %s", name)
    return None
