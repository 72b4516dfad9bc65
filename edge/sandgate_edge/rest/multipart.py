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
from collections.abc import Generator, Iterator
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
        self._data = b"\r\n"
        # Everything before this place is done with. Moving it costs nothing, cutting the data for each of many small
        # parts would cost more the more there are.
        self._at = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that ``data`` completes. To be read to the end before the next piece is fed."""
        kept = self._data[self._at :]
        self._data = kept + data if kept else data
        self._at = 0
        more = True
        while more:
            if self._state is _State.HEADERS:
                more = yield from self._take_headers()
            elif self._state is _State.EPILOGUE:
                self._at = len(self._data)
                more = False
            else:
                more = yield from self._take_content()

    def end(self) -> None:
        """To be called at the end of the body: without the closing delimiter something is missing."""
        if self._state is not _State.EPILOGUE:
            raise InvalidArgument("the multipart body ends too early")

    def _take_headers(self) -> Generator[Event, None, bool]:
        """The start of a part, behind the line end of its delimiter; False: more data must come first."""
        end = self._data.find(b"\r\n\r\n", self._at)
        if (end if end >= 0 else len(self._data)) - self._at > _MAX_HEADERS:
            raise InvalidArgument("the headers of a part are too long")
        if end < 0:
            return False
        yield _part_start(self._data[self._at + 2 : end])
        self._state = _State.BODY
        self._at = end + 4
        return True

    def _take_content(self) -> Generator[Event, None, bool]:
        """What is certainly content, and the delimiter behind it if there is one; False: more data must come first."""
        found = self._data.find(self._delimiter, self._at)
        end = found if found >= 0 else self._start_of_what_may_be_a_delimiter()
        if end > self._at and self._state is _State.BODY:
            yield self._data[self._at : end]
        self._at = end
        return (yield from self._take_delimiter()) if found >= 0 else False

    def _start_of_what_may_be_a_delimiter(self) -> int:
        start = self._data.find(b"\r", max(self._at, len(self._data) - len(self._delimiter) + 1))
        while start >= 0 and not self._delimiter.startswith(self._data[start:]):
            start = self._data.find(b"\r", start + 1)
        return start if start >= 0 else len(self._data)

    def _take_delimiter(self) -> Generator[Event, None, bool]:
        """The text of a delimiter: the end of a part, or content after all; False: more data must come first."""
        behind = self._at + len(self._delimiter)
        line_end = self._end_of_delimiter_line(behind)
        if line_end is None:
            return False
        in_part = self._state is _State.BODY
        if line_end < 0:
            if in_part:
                yield self._delimiter
            self._at = behind
            return True
        if in_part:
            yield PartEnd()
        closing = self._data.startswith(b"--", behind)
        self._state = _State.EPILOGUE if closing else _State.HEADERS
        self._at = line_end
        return True

    def _end_of_delimiter_line(self, behind: int) -> int | None:
        """Where its line end (or the epilogue) begins; -1: it is no delimiter; None: not to be said yet."""
        if self._data.startswith(b"--", behind):
            return behind + 2
        if (rest := _LINE_REST.match(self._data, behind)) is not None and rest.end() - behind <= _MAX_PADDING:
            return rest.end() - 2
        undecided = len(self._data) - behind <= _MAX_PADDING and _MAYBE_LINE_REST.fullmatch(self._data, behind)
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
