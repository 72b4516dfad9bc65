"""The sandbox's files as execd gives them: the tree, and their content.

Everything is done as execd's own account. The rules of ``behaviour.md`` 7 hold as far as execd lets them: it looks at a path
and acts on it in two calls, so whoever changes the tree meanwhile may get an error of execd's in place of ours.
"""

from __future__ import annotations

import itertools
import posixpath
import re
import shlex
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from sandgate_agent.entries import Entry, Kind
from sandgate_errors import AlreadyExists, Internal, InvalidArgument, NotFound, ResourceExhausted
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.entries import digits, entry_of
from sandgate_plugin_opensandbox.by_execd.uploads import upload

__all__ = ["Content", "Tree"]

_MOST_ENTRIES = 250_000
#: Tries to list a tree in which entries come and go.
_LISTINGS = 4
_NEW_FILE, _NEW_DIRECTORY = 644, 755
_WHOLE_SIZE = re.compile(r"bytes \d{1,20}-\d{1,20}/(\d{1,20})", re.ASCII)
_LARGEST_SIZE = 2**63 - 1
#: Bytes of a piece of content.
_PIECE = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Content:
    """A file that is being read."""

    entry: Entry
    #: Bytes of all of it; 0 where nobody knows.
    size: int
    pieces: AsyncIterator[bytes]


class Tree:
    """The file system of one sandbox; paths are absolute and clean."""

    def __init__(self, client: Client, *, owner: str, group: str) -> None:
        self._client = client
        self._owner = owner
        self._group = group

    async def stat(self, path: str) -> Entry:
        """Raises NotFound."""
        found = await self._client.ask("GET", "files/info", query=[("path", path)], what=_named(path))
        about = found.get(path) if isinstance(found, dict) else None
        if about is None:
            raise NotFound(f"{_named(path)} does not exist")
        return entry_of(about)

    async def list(self, path: str, depth: int, *, most: int = _MOST_ENTRIES) -> Sequence[Entry]:
        """Entries below, each directory's directly before its content, names in the order of their bytes (F19)."""
        if (await self.stat(path)).kind is not Kind.DIRECTORY:
            raise InvalidArgument(f"{_named(path)} is not a directory")
        listed = await self._listed(path, depth, most)
        if len(listed) > most:
            raise ResourceExhausted(f"more than {most} entries below {_named(path)}", should_retry=False)
        entries = [entry for entry in listed if entry.path != path]
        return sorted(entries, key=lambda entry: entry.path.encode(errors="replace").split(b"/"))

    async def _listed(self, path: str, depth: int, most: int) -> Sequence[Entry]:
        query = [("path", path), ("depth", str(depth))]
        tries = itertools.count(1)
        while True:
            try:
                return await self._client.ask_list(
                    "directories/list", query=query, what=_named(path), most=most, make=entry_of
                )
            except NotFound:
                # So execd says it of the directory, and of an entry that went while it was listed.
                if next(tries) > _LISTINGS:
                    raise

    async def make_directory(self, path: str) -> Entry:
        """With its parents. Raises AlreadyExists."""
        if (found := await self._existing(path)) is not None:
            if found.kind is Kind.FILE:
                raise InvalidArgument(f"{_named(path)} is not a directory")
            raise AlreadyExists(f"directory '{path}' already exists")
        await self._make(path)
        return await self.stat(path)

    async def move(self, source: str, destination: str) -> Entry:
        await self.stat(source)
        if destination.startswith(source.rstrip("/") + "/"):
            raise Internal(f"{_named(source)} cannot be moved into itself")
        parent = posixpath.dirname(destination)
        if await self._existing(parent) is None:
            await self._make(parent)
        elif (there := await self._existing(destination)) is not None and destination != source:
            if there.kind is Kind.DIRECTORY:
                raise Internal(f"{_named(source)} cannot be moved to '{destination}': the destination is a directory")
            # execd moves over nothing.
            await self.remove(destination)
        body = [{"src": source, "dest": destination}]
        await self._client.ask("POST", "files/mv", body=body, what=_named(source))
        return await self.stat(destination)

    async def remove(self, path: str) -> None:
        """Nothing there is success (F33)."""
        if path == "/":
            raise InvalidArgument("the root directory cannot be removed")
        if (found := await self._existing(path)) is None:
            return
        if found.kind is Kind.SYMLINK:
            # execd lets a link stay that leads nowhere, and says that it was removed.
            await self._client.run(f"rm -f -- {shlex.quote(path)}", what=_named(path))
            return
        route = "directories" if found.kind is Kind.DIRECTORY else "files"
        try:
            await self._client.ask("DELETE", route, query=[("path", path)], what=_named(path))
        except NotFound:
            # Somebody else was faster.
            return

    async def write(self, path: str, content: AsyncIterable[bytes]) -> Entry:
        """Over what is there, whose owner and mode stay; parents are made."""
        found = await self._existing(path)
        if found is not None and found.kind is Kind.DIRECTORY:
            raise InvalidArgument(f"{_named(path)} is a directory")
        if found is None or found.kind is not Kind.FILE:
            owner, group, mode = self._owner, self._group, _NEW_FILE
        else:
            owner, group, mode = found.owner, found.group, digits(found.mode)
        await upload(self._client, path, content, mode=mode, owner=owner, group=group)
        return await self.stat(path)

    @asynccontextmanager
    async def read(self, path: str, *, offset: int, length: int | None) -> AsyncIterator[Content]:
        """Raises NotFound, and InvalidArgument for what has no content."""
        entry = await self.stat(path)
        if entry.kind is Kind.DIRECTORY:
            raise InvalidArgument(f"{_named(path)} is a directory")
        if entry.kind is Kind.OTHER:
            # A pipe would be waited for, and a device never ends.
            raise InvalidArgument(f"{_named(path)} is not a regular file")
        known = entry.size if entry.kind is Kind.FILE else None
        if length == 0 or (known is not None and 0 < known <= offset):
            yield Content(entry=entry, size=known or 0, pieces=_nothing())
            return
        headers = {"Accept-Encoding": "identity"}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        query = [("path", path)]
        async with self._client.request(
            "GET", "files/download", query=query, headers=headers, what=_named(path)
        ) as response:
            size = _size(response, known)
            # Who does not know ranges gives all of it.
            skip = offset if response.status == 200 else 0
            pieces = _part(response.content.iter_chunked(_PIECE), skip=skip, length=length)
            yield Content(entry=entry, size=size, pieces=pieces)

    async def _existing(self, path: str) -> Entry | None:
        try:
            return await self.stat(path)
        except NotFound:
            return None

    async def _make(self, path: str) -> None:
        about = {"owner": self._owner, "group": self._group, "mode": _NEW_DIRECTORY}
        await self._client.ask("POST", "directories", body={path: about}, what=_named(path))


def _size(response: aiohttp.ClientResponse, known: int | None) -> int:
    """Of the whole file, as the answer says it."""
    if (whole := _WHOLE_SIZE.fullmatch(response.headers.get("Content-Range", ""))) is not None:
        return min(int(whole[1]), _LARGEST_SIZE)
    if response.status == 200 and response.content_length is not None:
        return min(response.content_length, _LARGEST_SIZE)
    return known or 0


async def _part(pieces: AsyncIterable[bytes], *, skip: int, length: int | None) -> AsyncIterator[bytes]:
    async for piece in pieces:
        kept = piece[skip:] if length is None else piece[skip : skip + length]
        skip = max(0, skip - len(piece))
        if kept:
            yield kept
        if length is not None:
            length -= len(kept)
            if length <= 0:
                return


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _named(path: str) -> str:
    return f"path '{path}'"
