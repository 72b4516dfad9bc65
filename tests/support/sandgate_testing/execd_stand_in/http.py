"""HTTP as far as the stand-in speaks it: one request on a connection, and a body that is read while it comes."""

from __future__ import annotations

import asyncio
import email.parser
import http
import json
import re
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PIECE", "Body", "Exchange", "Failure", "Request", "Route", "answer", "answer_json", "read_request", "route"]

#: Bytes that are held of what streams through.
PIECE = 64 * 1024
#: Bytes of what is read whole: JSON, and the description of a file.
_LARGEST_TEXT = 4 * 1024 * 1024


class Failure(Exception):
    """Something the client gets told: ``status`` and, as JSON, ``code`` and ``message``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Body:
    """Of a length that was announced, or in chunks."""

    def __init__(self, fields: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self._left = 0 if self._chunked else int(fields.get("content-length", 0))
        self._more = self._chunked

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._piece():
            yield piece

    async def _piece(self) -> bytes:
        """Empty at the end."""
        if self._more and not self._left:
            await self._next_chunk()
        if not self._left:
            return b""
        piece = await self._reader.read(min(self._left, PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(b"", self._left)
        self._left -= len(piece)
        if self._chunked and not self._left:
            await self._reader.readexactly(2)
        return piece

    async def _next_chunk(self) -> None:
        line = await self._reader.readline()
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError as error:
            raise ConnectionError("where a chunk should begin is none") from error
        if not self._left:
            self._more = False
            while (await self._reader.readline()).strip():
                pass

    async def json(self, kind: type) -> Any:
        """The body as a JSON value of this ``kind``; an empty one is nothing given."""
        text = bytearray()
        async for piece in self.pieces():
            text += piece
            if len(text) > _LARGEST_TEXT:
                raise Failure(400, "INVALID_REQUEST_BODY", "the body is too large")
        try:
            value = json.loads(text) if text else kind()
        except ValueError as error:
            raise Failure(400, "INVALID_REQUEST_BODY", f"error parsing request: {error}") from error
        if not isinstance(value, kind):
            raise Failure(400, "INVALID_REQUEST_BODY", f"error parsing request: it is no {kind.__name__}")
        return value

    async def skip(self) -> None:
        """An answer before the end of the request could get lost when the connection closes on unread bytes."""
        async for _ in self.pieces():
            pass


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    #: As it was sent.
    target: str
    #: The header as it was sent, without its first line.
    head: bytes
    #: By names in small letters.
    fields: Mapping[str, str]
    body: Body

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def all(self, name: str) -> list[str]:
        """Every value of a query parameter. A path is bytes, which need not be UTF-8."""
        query = self.target.partition("?")[2]
        return urllib.parse.parse_qs(query, keep_blank_values=True, errors="surrogateescape").get(name, [])

    def first(self, name: str) -> str:
        """Empty: it was not given."""
        return (self.all(name) or [""])[0]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request and the connection that it came on."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


#: What answers it gets the exchange and what its pattern has caught.
Handler = Callable[..., Awaitable[None]]
Route = tuple[str, re.Pattern[str], Handler]


def route(method: str, path: str, handler: Handler) -> Route:
    return method, re.compile(path), handler


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises OSError for what is no HTTP."""
    line, _, head = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
    fields = {name.lower(): value for name, value in email.parser.BytesParser().parsebytes(head).items()}
    try:
        method, target, _ = line.decode("latin-1").split(" ")
        body = Body(fields, reader)
    except ValueError as error:
        raise ConnectionError("this is no HTTP") from error
    return Request(method=method, target=target, head=head, fields=fields, body=body)


async def answer(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes = b"",
    *,
    kind: str = "application/json",
    length: int | None = None,
    fields: Mapping[str, str] | None = None,
) -> None:
    """``length``: of a body that the caller sends afterwards."""
    every = {
        "Content-Type": kind,
        "Content-Length": str(len(body) if length is None else length),
        **(fields or {}),
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    writer.write(f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n{lines}\r\n".encode() + body)
    await writer.drain()


async def answer_json(writer: asyncio.StreamWriter, value: object, *, status: int = 200) -> None:
    await answer(writer, status, json.dumps(value).encode())
