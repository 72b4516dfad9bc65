"""``POST /files``: content of requests into files of a sandbox (``behaviour.md`` 9.3, ``envd.md`` 6.3).

Two forms: the body is the content of one file, or a form whose parts named `file` are files, written one after another
in their order. Content goes to the agent as it arrives, so memory does not depend on its size. The error of a file ends
the request; files before it stay written. What a refused client still sends is read and dropped by the server for a
bounded time, so that it sees the answer.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.keys import SETTINGS
from sandgate_edge.rest.agent_files import AgentFiles, Writing
from sandgate_edge.rest.file_metadata import metadata_of
from sandgate_edge.rest.gzip_stream import Gunzip
from sandgate_edge.rest.header_parameters import parse_parameters
from sandgate_edge.rest.multipart import MultipartParser, PartEnd, PartStart, boundary_of
from sandgate_edge.rest.views import JsonObject
from sandgate_errors import InvalidArgument

__all__ = ["receive_files"]

_FILE_PART = "file"


async def receive_files(files: AgentFiles, path: str | None) -> list[JsonObject]:
    """The reply of an upload: one object per file. Raises errors of the taxonomy."""
    request = files.request
    metadata = metadata_of(request.headers)
    kind, parameters = parse_parameters(request.headers.get("Content-Type", ""))
    # Closed here and now: a body that is left in the middle would be closed by the garbage collector some time later.
    limit = request.app[SETTINGS].max_upload_bytes
    if limit and (request.content_length or 0) > limit:
        raise _too_large(limit)
    async with aclosing(_limited(_body(request), limit)) as body:
        if kind == "multipart/form-data":
            return await _Form(files, path=path, metadata=metadata).receive(body, boundary_of(parameters))
        if kind == "application/octet-stream":
            if not path:
                raise InvalidArgument("path is required for an application/octet-stream body")
            return [await _receive_one(files, body, path=path, metadata=metadata)]
        raise InvalidArgument("the content type must be multipart/form-data or application/octet-stream")


def _body(request: web.Request) -> AsyncGenerator[bytes, None]:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in {"", "identity"}:
        return _plain_body(request)
    if encoding != "gzip":
        raise InvalidArgument("the content encoding must be gzip or none")
    return _inflated_body(request)


async def _limited(body: AsyncGenerator[bytes, None], limit: int) -> AsyncGenerator[bytes, None]:
    """The body, refused where it passes the limit (0: none) of this gateway. What was written by then stays (D28)."""
    async with aclosing(body):
        size = 0
        async for piece in body:
            size += len(piece)
            if limit and size > limit:
                raise _too_large(limit)
            yield piece


def _too_large(limit: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(limit, text=f"an upload may have at most {limit} bytes on this gateway")


async def _plain_body(request: web.Request) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await request.content.readany():
            yield piece
    except (HttpProcessingError, web.RequestPayloadError):
        raise InvalidArgument("the request body is broken") from None


async def _inflated_body(request: web.Request) -> AsyncGenerator[bytes, None]:
    gunzip = Gunzip()
    async with aclosing(_plain_body(request)) as body:
        async for compressed in body:
            for piece in gunzip.feed(compressed):
                yield piece
    gunzip.end()


async def _receive_one(
    files: AgentFiles, body: AsyncIterator[bytes], *, path: str, metadata: dict[str, str]
) -> JsonObject:
    async with files.write(agent_pb2.WriteFileRequest.Header(path=path, metadata=metadata)) as writing:
        async for piece in body:
            await writing.write(piece)
        return _written(await writing.finish())


class _Form:
    """One form: the files that it has written so far, and the one that it is writing."""

    def __init__(self, files: AgentFiles, *, path: str | None, metadata: dict[str, str]) -> None:
        self._files = files
        self._path = path
        self._metadata = metadata
        self._written: list[JsonObject] = []
        self._destinations = _Destinations(files)

    async def receive(self, body: AsyncIterator[bytes], boundary: bytes) -> list[JsonObject]:
        parser = MultipartParser(boundary)
        # Holds the call of the part that is being written; a part of another name has none.
        async with AsyncExitStack() as open_part:
            writing: Writing | None = None
            async for piece in body:
                for event in parser.feed(piece):
                    if isinstance(event, PartStart):
                        writing = await self._start(event, open_part)
                    elif isinstance(event, PartEnd):
                        if writing is not None:
                            self._finished(await writing.finish())
                        await open_part.aclose()
                    elif writing is not None:
                        await writing.write(event)
            parser.end()
        if not self._written:
            await self._destinations.check_user()
        return self._written

    async def _start(self, part: PartStart, open_part: AsyncExitStack) -> Writing | None:
        if part.name != _FILE_PART:
            return None
        most = self._files.request.app[SETTINGS].max_upload_files
        if most and len(self._written) >= most:
            raise InvalidArgument(f"an upload may have at most {most} files on this gateway")
        path = self._path or part.filename
        if not path:
            raise InvalidArgument("a file part has no file name, and the request no path")
        await self._destinations.refuse_repeated(path)
        header = agent_pb2.WriteFileRequest.Header(path=path, metadata=self._metadata)
        return await open_part.enter_async_context(self._files.write(header))

    def _finished(self, entry: filesystem_pb2.EntryInfo) -> None:
        self._destinations.add(entry.path)
        self._written.append(_written(entry))


class _Destinations:
    """Where one request has written, to refuse a second file for the same place (``behaviour.md`` D27).

    Only the agent knows where a relative path leads. A place that has been written exists, so a path that leads nowhere
    is new, and one that leads somewhere is asked for.
    """

    def __init__(self, files: AgentFiles) -> None:
        self._files = files
        self._paths: set[str] = set()

    def add(self, path: str) -> None:
        self._paths.add(posixpath.normpath(path))

    async def refuse_repeated(self, path: str) -> None:
        if not self._paths:
            return
        place = path if path.startswith("/") else await self._files.resolve_existing(path)
        if place is not None and posixpath.normpath(place) in self._paths:
            raise InvalidArgument(f"path '{place}' is the destination of more than one file")

    async def check_user(self) -> None:
        """A request without files has asked the agent nothing; a user that does not exist is an error all the same."""
        if self._files.user is not None:
            await self._files.resolve_existing("/")


def _written(entry: filesystem_pb2.EntryInfo) -> JsonObject:
    view: JsonObject = {"name": entry.name, "path": entry.path, "type": "file"}
    if entry.metadata:
        view["metadata"] = dict(entry.metadata)
    return view
