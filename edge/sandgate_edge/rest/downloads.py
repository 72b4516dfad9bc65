"""``GET /files``: a file of a sandbox as an HTTP answer (``behaviour.md`` 9.2, RFC 9110 sections 8, 13 and 14).

gzip is the usual way, because Python's HTTP clients allow it by default; a range or a condition makes the answer plain.
A small plain file is read whole before its length is told, so virtual files, whose reported size means nothing, come
right. Once a length or the first byte has gone out, a failure can only be told by a reset: an orderly end would pass a
cut-off file as whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from http import HTTPStatus

import grpc.aio
from aiohttp import web

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge.rest.agent_files import PIECE, AgentFiles, Reading
from sandgate_edge.rest.conditions import Verdict, check_conditions, http_date, is_conditional, range_holds
from sandgate_edge.rest.encodings import NoAcceptableEncoding, choose_encoding
from sandgate_edge.rest.file_parts import Content
from sandgate_edge.rest.gzip_stream import Gzip
from sandgate_edge.rest.header_parameters import inline_disposition
from sandgate_edge.rest.media_types import OCTET_STREAM, SNIFFED, by_content, by_extension
from sandgate_edge.rest.ranges import ByteRange, UnsatisfiableRange, parse_ranges
from sandgate_edge.rest.sendfile import CutOff, send
from sandgate_errors import SandgateError

__all__ = ["send_file"]

# Below this a thread costs more than the compression.
_COMPRESS_INLINE = 16 * 1024
# Below this, what it takes to hand a file over is not regained.
_WORTH_HANDING_OVER = 4 * 1024 * 1024


async def send_file(files: AgentFiles, path: str) -> web.StreamResponse:
    """The answer to one download. Raises errors of the taxonomy as long as nothing has been sent."""
    request = files.request
    if "Range" in request.headers:
        answer = await _send_ranges(files, path)
        if answer is not None:
            return answer
    plain = "Range" in request.headers or is_conditional(request)
    if not plain:
        try:
            plain = choose_encoding(request.headers.get("Accept-Encoding")) == "identity"
        except NoAcceptableEncoding:
            return _refusal(HTTPStatus.NOT_ACCEPTABLE, "neither gzip nor the plain file is acceptable to the client")
    async with files.read(agent_pb2.ReadFileRequest(path=path)) as reading:
        if not plain:
            return await _send_gzip(files, reading)
        if (early := _by_condition(request, reading)) is not None:
            return early
        return await _send_plain(files, reading)


async def _send_gzip(files: AgentFiles, reading: Reading) -> web.StreamResponse:
    first = await _first(files, reading)
    answer = web.StreamResponse(headers=_headers(reading))
    answer.headers["Content-Encoding"] = "gzip"
    answer.headers["Content-Type"] = by_extension(reading.header.name) or OCTET_STREAM
    gzip = Gzip()
    try:
        await answer.prepare(files.request)
        await answer.write(gzip.header())
        piece = first
        while piece:
            await answer.write(await _compressed(gzip, piece))
            piece = await reading.piece()
        await answer.write_eof(gzip.end())
    except grpc.aio.AioRpcError as error:
        files.cut(error)
    return answer


async def _compressed(gzip: Gzip, piece: Content) -> bytes:
    if gzip.storing or len(piece) <= _COMPRESS_INLINE:
        return gzip.piece(piece)
    # zlib lets other threads run, so the event loop stays free for other requests.
    return await asyncio.to_thread(gzip.piece, piece)


async def _send_plain(files: AgentFiles, reading: Reading) -> web.StreamResponse:
    try:
        first, whole = await reading.start(PIECE)
    except grpc.aio.AioRpcError as error:
        raise await files.error(error) from error
    headers = _plain_headers(reading, first)
    if whole:
        return web.Response(body=first, headers=headers)
    answer = web.StreamResponse(headers=headers)
    # A virtual file has no size to promise; its answer is chunked.
    size = reading.header.size or None
    answer.content_length = size
    try:
        await answer.prepare(files.request)
        await _copy(files, reading, answer, first=first, start=0, size=size)
        await answer.write_eof()
    except (grpc.aio.AioRpcError, CutOff) as error:
        files.cut(error)
    return answer


async def _send_ranges(files: AgentFiles, path: str) -> web.StreamResponse | None:
    """A partial answer, or 304, 412 or 416; None when the whole file is to be sent."""
    request = files.request
    async with files.read(agent_pb2.ReadFileRequest(path=path, length=SNIFFED)) as reading:
        if (early := _by_condition(request, reading)) is not None:
            return early
        size = reading.header.size
        if not range_holds(request, reading.header.modified_time.seconds):
            return None
        try:
            ranges = parse_ranges(request.headers["Range"], size)
        except UnsatisfiableRange:
            refusal = _refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "the range lies outside the file")
            refusal.headers["Content-Range"] = f"bytes */{size}"
            return refusal
        if not ranges:
            return None
        try:
            start, _ = await reading.start(1)
        except grpc.aio.AioRpcError as error:
            raise await files.error(error) from error
        headers = _plain_headers(reading, start)
    if len(ranges) == 1:
        return await _send_one(files, path, ranges[0], size=size, headers=headers)
    return await _send_several(files, path, ranges, size=size, headers=headers)


async def _send_one(
    files: AgentFiles, path: str, wanted: ByteRange, *, size: int, headers: dict[str, str]
) -> web.StreamResponse:
    answer = web.StreamResponse(status=206, headers={**headers, "Content-Range": wanted.content_range(size)})
    answer.content_length = wanted.length
    async with files.read(_range_request(path, wanted)) as reading:
        first = await _first(files, reading)
        try:
            await answer.prepare(files.request)
            await _copy(files, reading, answer, first=first, start=wanted.start, size=wanted.length)
            await answer.write_eof()
        except (grpc.aio.AioRpcError, CutOff) as error:
            files.cut(error)
    return answer


async def _send_several(
    files: AgentFiles, path: str, ranges: list[ByteRange], *, size: int, headers: dict[str, str]
) -> web.StreamResponse:
    """``multipart/byteranges`` with its length told beforehand (RFC 9110 section 14.6)."""
    boundary = secrets.token_hex(16)
    heads = [
        f"\r\n--{boundary}\r\nContent-Type: {headers['Content-Type']}\r\n"
        f"Content-Range: {wanted.content_range(size)}\r\n\r\n".encode()
        for wanted in ranges
    ]
    tail = f"\r\n--{boundary}--\r\n".encode()
    answer = web.StreamResponse(
        status=206, headers={**headers, "Content-Type": f"multipart/byteranges; boundary={boundary}"}
    )
    answer.content_length = sum(len(head) for head in heads) + sum(r.length for r in ranges) + len(tail)
    await answer.prepare(files.request)
    for head, wanted in zip(heads, ranges, strict=True):
        await answer.write(head)
        if not await _send_part(files, path, wanted, answer):
            return answer
    await answer.write_eof(tail)
    return answer


async def _send_part(files: AgentFiles, path: str, wanted: ByteRange, answer: web.StreamResponse) -> bool:
    """One range in the middle of an answer; False when it could not be sent and the connection is gone."""
    try:
        async with files.read(_range_request(path, wanted)) as reading:
            first = await reading.piece()
            await _copy(files, reading, answer, first=first, start=wanted.start, size=wanted.length)
    except (grpc.aio.AioRpcError, SandgateError, CutOff) as error:
        files.cut(error)
        return False
    return True


def _range_request(path: str, wanted: ByteRange) -> agent_pb2.ReadFileRequest:
    return agent_pb2.ReadFileRequest(path=path, offset=wanted.start, length=wanted.length)


async def _copy(
    files: AgentFiles, reading: Reading, answer: web.StreamResponse, *, first: Content, start: int, size: int | None
) -> None:
    """Exactly ``size`` bytes from ``start``, whatever became of the file meanwhile; None: to its end. Raises CutOff."""
    piece = first
    left = size
    if left is not None and left - len(first) >= _WORTH_HANDING_OVER:
        await answer.write(first)
        left -= len(first)
        async with files.handed(reading) as file:
            if file is not None:
                await send(files.request, file, offset=start + len(first), count=left, sent=reading.passed)
                return
        piece = await reading.piece()
    while piece:
        if left is not None:
            piece = piece[:left]
            left -= len(piece)
        await answer.write(piece)
        if left == 0:
            return
        piece = await reading.piece()
    if left:
        raise CutOff


async def _first(files: AgentFiles, reading: Reading) -> Content:
    """The first piece, while an error can still be told in an answer of its own."""
    try:
        return await reading.piece()
    except grpc.aio.AioRpcError as error:
        raise await files.error(error) from error


def _by_condition(request: web.Request, reading: Reading) -> web.Response | None:
    modified = reading.header.modified_time.seconds
    verdict = check_conditions(request, modified)
    if verdict is Verdict.NOT_MODIFIED:
        headers = {"Vary": "Accept-Encoding"}
        if (date := http_date(modified)) is not None:
            headers["Last-Modified"] = date
        return web.Response(status=304, headers=headers)
    if verdict is Verdict.FAILED:
        return _refusal(HTTPStatus.PRECONDITION_FAILED, "the file was changed after the given time")
    return None


def _headers(reading: Reading) -> dict[str, str]:
    return {
        "Content-Disposition": inline_disposition(reading.header.name),
        "Vary": "Accept-Encoding",
        # What is in a file is the sandbox's choice; a browser must not find a page in it by itself.
        "X-Content-Type-Options": "nosniff",
    }


def _plain_headers(reading: Reading, start: bytes) -> dict[str, str]:
    headers = _headers(reading)
    headers["Accept-Ranges"] = "bytes"
    headers["Content-Type"] = by_extension(reading.header.name) or by_content(start)
    if (date := http_date(reading.header.modified_time.seconds)) is not None:
        headers["Last-Modified"] = date
    return headers


def _refusal(status: HTTPStatus, message: str) -> web.Response:
    """A status that stands for no error of the taxonomy, in the form of file transfer (D3)."""
    body: Mapping[str, object] = {"code": status.value, "message": message}
    return web.json_response(body, status=status.value)
