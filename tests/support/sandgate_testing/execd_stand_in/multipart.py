"""Forms of several parts (RFC 7578), each of which is read while it comes."""

from __future__ import annotations

import email.message
import email.parser
import json
from collections.abc import AsyncIterator
from typing import Any

from sandgate_testing.execd_stand_in.http import Failure, Request

__all__ = ["Part", "parts"]

#: Bytes of a part's header, and of a part that is read whole.
_LARGEST_HEAD = 16 * 1024
_LARGEST_TEXT = 1024 * 1024


class _Cut:
    """A stream that is read up to marks in it, of which no more is held than could be the beginning of one."""

    def __init__(self, source: AsyncIterator[bytes], beginning: bytes) -> None:
        self._source = source
        self._held = bytearray(beginning)

    async def until(self, mark: bytes) -> AsyncIterator[bytes]:
        """What is in front of ``mark``; the next that is read is behind it."""
        while (found := self._held.find(mark)) < 0:
            certain = len(self._held) - len(mark) + 1
            if certain > 0:
                yield bytes(self._held[:certain])
                del self._held[:certain]
            await self._more()
        if found:
            yield bytes(self._held[:found])
        del self._held[: found + len(mark)]

    async def take(self, count: int) -> bytes:
        while len(self._held) < count:
            await self._more()
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    async def _more(self) -> None:
        async for piece in self._source:
            self._held += piece
            return
        raise Failure(400, "INVALID_FILE", "the form has no end")


class Part:
    def __init__(self, name: str, pieces: AsyncIterator[bytes]) -> None:
        self.name = name
        self._pieces = pieces

    def pieces(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def json(self) -> dict[str, Any]:
        try:
            value = json.loads(await _joined(self._pieces, _LARGEST_TEXT))
        except ValueError as error:
            raise Failure(400, "INVALID_FILE_METADATA", f"invalid metadata format. {error}") from error
        if not isinstance(value, dict):
            raise Failure(400, "INVALID_FILE_METADATA", "invalid metadata format. it is no object")
        return value


async def parts(request: Request) -> AsyncIterator[Part]:
    """Those that are files, as execd passes over the others. What a part was not read of is passed over too."""
    about = email.message.Message()
    about["content-type"] = request.fields.get("content-type", "")
    boundary = about.get_boundary()
    if about.get_content_type() != "multipart/form-data" or not boundary:
        raise Failure(400, "INVALID_FILE", "multipart form is empty")
    mark = b"\r\n--" + boundary.encode("latin-1")
    # The first mark may be the very beginning.
    cut = _Cut(request.body.pieces(), b"\r\n")
    await _pass_over(cut.until(mark))
    while await cut.take(2) != b"--":
        head = await _joined(cut.until(b"\r\n\r\n"), _LARGEST_HEAD)
        name, is_file = _names(head)
        content = cut.until(mark)
        if is_file:
            yield Part(name, content)
        await _pass_over(content)


async def _pass_over(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


async def _joined(pieces: AsyncIterator[bytes], most: int) -> bytes:
    whole = bytearray()
    async for piece in pieces:
        whole += piece
        if len(whole) > most:
            raise Failure(400, "INVALID_FILE", "a part of the form is too large")
    return bytes(whole)


def _names(head: bytes) -> tuple[str, bool]:
    """What the form calls the part, and whether it says that it is a file."""
    about = email.parser.BytesParser().parsebytes(head)
    name = about.get_param("name", "", header="content-disposition")
    return name if isinstance(name, str) else "", about.get_filename() is not None
