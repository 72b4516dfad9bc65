"""``multipart/form-data`` without input or output: bytes in, events out (RFC 7578, RFC 2046 section 5.1).

::

    PREAMBLE --delimiter--> HEADERS --blank line--> BODY --delimiter--> HEADERS ...
                                                         --closing delimiter--> EPILOGUE

A delimiter is a line; its text with anything else behind it is content. Content is passed on at once and without copying
where it can be: only what may be the start of a delimiter is kept back. Headers are bounded, content is not.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sandgate_edge.rest.header_parameters import parse_parameters, unescape_form_name
from sandgate_errors import InvalidArgument

__all__ = ["Event", "MultipartParser", "PartEnd", "PartStart", "boundary_of"]

_MAX_HEADERS = 16 * 1024
_MAX_BOUNDARY = 256
# Padding that a delimiter line may have behind it.
_MAX_PADDING = 256
_LINE_REST = re.compile(rb"[ \t]*\r\n")
_MAYBE_LINE_REST = re.compile(rb"-|[ \t]*\r?")


@dataclass(frozen=True)
class PartStart:
    """The headers of a part, as far as they matter."""

    name: str
    #: None when the part has none; slashes are kept.
    filename: str | None


@dataclass(frozen=True)
class PartEnd:
    """All content of the part has been given."""


#: Bytes are content of the part that has started.
Event: TypeAlias = PartStart | bytes | PartEnd


class _State(enum.Enum):
    PREAMBLE = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()
    EPILOGUE = enum.auto()


def boundary_of(parameters: dict[str, str]) -> bytes:
    """The boundary out of the parameters of the content type. Raises InvalidArgument."""
    boundary = parameters.get("boundary", "")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii() or not boundary.isprintable():
        raise InvalidArgument("multipart/form-data needs a boundary of 1 to 256 printable characters")
    return boundary.encode()


class MultipartParser:
    """Feed it the body in pieces of any size; it raises InvalidArgument as soon as the body cannot be one."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._state = _State.PREAMBLE
        # The first delimiter has no line end before it when there is no preamble.
        self._kept = b"\r\n"

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that ``data`` completes. To be read to the end before the next piece is fed."""
        data = self._kept + data if self._kept else data
        self._kept = b""
        while data:
            if self._state is _State.EPILOGUE:
                return
            if self._state is _State.HEADERS:
                end = data.find(b"\r\n\r\n")
                if end > _MAX_HEADERS or (end < 0 and len(data) > _MAX_HEADERS):
                    raise InvalidArgument("the headers of a part are too long")
                if end < 0:
                    self._kept = data
                    return
                yield _part_start(data[2:end])
                self._state = _State.BODY
                data = data[end + 4 :]
                # An empty body may have its delimiter at once; its line end is the one of the blank line only if the
                # client left it out, which RFC 2046 does not allow.
                continue
            content, data = self._until_delimiter(data)
            if content and self._state is _State.BODY:
                yield content
            if not data:
                return
            verdict = self._delimiter_line(data)
            if verdict is None:
                self._kept = data
                return
            if verdict < 0:
                # Its text, but not a line of its own: content.
                if self._state is _State.BODY:
                    yield self._delimiter
                data = data[len(self._delimiter) :]
                continue
            if self._state is _State.BODY:
                yield PartEnd()
            closing = data.startswith(b"--", len(self._delimiter))
            self._state = _State.EPILOGUE if closing else _State.HEADERS
            data = data[verdict:]

    def end(self) -> None:
        """To be called at the end of the body: without the closing delimiter something is missing."""
        if self._state is not _State.EPILOGUE:
            raise InvalidArgument("the multipart body ends too early")

    def _until_delimiter(self, data: bytes) -> tuple[bytes, bytes]:
        """What is certainly content, and the rest that starts with a delimiter; keeps back what may become one."""
        found = data.find(self._delimiter)
        if found >= 0:
            return data[:found], data[found:]
        start = data.find(b"\r", max(0, len(data) - len(self._delimiter) + 1))
        while start >= 0 and not self._delimiter.startswith(data[start:]):
            start = data.find(b"\r", start + 1)
        if start < 0:
            return data, b""
        self._kept = data[start:]
        return data[:start], b""

    def _delimiter_line(self, data: bytes) -> int | None:
        """Where the headers' leading line end (or the epilogue) begins; -1: no delimiter; None: not to be said yet."""
        start = len(self._delimiter)
        if data.startswith(b"--", start):
            return start + 2
        if (rest := _LINE_REST.match(data, start)) is not None and rest.end() - start <= _MAX_PADDING:
            return rest.end() - 2
        undecided = len(data) - start <= _MAX_PADDING and _MAYBE_LINE_REST.fullmatch(data, start)
        return None if undecided else -1


def _part_start(block: bytes) -> PartStart:
    headers = _headers(block)
    encoding = headers.get("content-transfer-encoding", "binary").strip().lower()
    if encoding not in {"7bit", "8bit", "binary"}:
        raise InvalidArgument("a part has a transfer encoding that is not accepted")
    kind, parameters = parse_parameters(headers.get("content-disposition", ""))
    if kind != "form-data" or "name" not in parameters:
        raise InvalidArgument("a part has no usable Content-Disposition")
    filename = parameters.get("filename*")
    if filename is None and "filename" in parameters:
        filename = unescape_form_name(parameters["filename"])
    return PartStart(name=unescape_form_name(parameters["name"]), filename=filename)


def _headers(block: bytes) -> dict[str, str]:
    try:
        lines = block.decode().split("\r\n") if block else []
    except UnicodeDecodeError:
        raise InvalidArgument("the headers of a part are not valid UTF-8") from None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or name in headers:
            raise InvalidArgument("the headers of a part are broken")
        headers[name] = value.strip()
    return headers
