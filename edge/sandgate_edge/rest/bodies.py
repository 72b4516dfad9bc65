"""JSON bodies of the control plane: read within a limit, parsed strictly, their members taken with their types checked.

First station of every request with a body; what comes out is safe to put into a message (valid UTF-8, no NUL, 32-bit
numbers). Follows ``rest.md`` 1.2: chunked bodies and ``{}`` are common, the content type is not looked at, members that
nobody asks for are ignored. ``null`` counts as absent, as the clients' own generators treat it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import NoReturn

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from sandgate_edge.keys import REST_REQUEST, ROOM
from sandgate_edge.rest.api_key import authenticate
from sandgate_edge.room import Place
from sandgate_errors import InvalidArgument

__all__ = ["MAX_BODY", "Members", "parse_object", "read_body", "read_object"]

#: The largest body of the control plane (``behaviour.md`` C58).
MAX_BODY = 16 * 1024 * 1024
# What is kept of a body before its sender has proved a key. Every usual request is smaller, and asks the core one question
# less; but a thousand strangers who each begin with a large one would fill the memory.
_MAX_OF_STRANGERS = 64 * 1024
# Parsing more than this would hold up the other requests of this process; it goes to a thread.
_PARSE_INLINE = 256 * 1024
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


async def read_object(request: web.Request, *, required: bool = True, known: bool = False) -> Members:
    """The JSON object in the body of a request; an empty body is an empty object unless one is ``required``.

    ``known``: whoever sends it has proved already that they may. Raises InvalidArgument, 413 as soon as more than MAX_BODY
    has arrived, and Unauthenticated once much of it has without a good API key.
    """
    if REST_REQUEST in request:
        shaped, empty = request[REST_REQUEST]
        body = None if empty else shaped.body
    else:
        body = await read_body(request, known=known)
    if body is None and required:
        body = parse_object(b"")
    return Members(body or {})


async def read_body(request: web.Request, *, known: bool = False) -> Mapping[str, object] | None:
    """The JSON object in the body of a request, None for an empty one. Raises as :func:`read_object`."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="an encoded body is not accepted here")
    raw = await _read(request, known=known)
    if not raw.strip():
        return None
    return parse_object(raw) if len(raw) <= _PARSE_INLINE else await asyncio.to_thread(parse_object, raw)


async def _read(request: web.Request, *, known: bool) -> bytes:
    announced = request.content_length
    if announced is not None and announced > MAX_BODY:
        _too_large(announced)
    with request.app[ROOM].place() as place:
        return await _collected(request, place, known=known)


async def _collected(request: web.Request, place: Place, *, known: bool) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        while piece := await request.content.readany():
            size += len(piece)
            if size > MAX_BODY:
                _too_large(size)
            if size > _MAX_OF_STRANGERS and not known:
                await authenticate(request)
                known = True
            place.hold(size)
            pieces.append(piece)
    except (BadHttpMessage, web.RequestPayloadError):
        raise InvalidArgument("the request body is broken") from None
    return b"".join(pieces)


def _too_large(size: int) -> NoReturn:
    raise web.HTTPRequestEntityTooLarge(MAX_BODY, size, text=f"the request body is larger than {MAX_BODY} bytes")


def parse_object(raw: bytes) -> dict[str, object]:
    """One JSON object (RFC 8259; NaN and infinities are refused). Raises InvalidArgument."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise InvalidArgument("the request body is nested too deeply") from None
    except ValueError:
        # Also text that is not UTF-8, and integers of more digits than the interpreter converts.
        raise InvalidArgument("the request body is not valid JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the request body must be a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


class Members:
    """The members of one JSON object. Every error names the member by its path, for example ``network.allowOut``."""

    def __init__(self, members: Mapping[str, object], *, path: str = "") -> None:
        self._members = members
        self._path = path

    def text(self, name: str) -> str | None:
        value = self._members.get(name)
        return None if value is None else self._checked(name, value, "a string")

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise InvalidArgument(f"{self._named(name)} is required")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._members.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false")

    def integer(self, name: str) -> int | None:
        value = self._members.get(name)
        if value is None:
            return None
        # A bool is an int to Python and a float may be whole: neither is what the field means.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "an integer")
        if not _INT32_MIN <= value <= _INT32_MAX:
            raise self._wrong(name, "within the 32-bit range")
        return value

    def required_integer(self, name: str) -> int:
        value = self.integer(name)
        if value is None:
            raise InvalidArgument(f"{self._named(name)} is required")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._members.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "an array of strings")
        return [self._checked(name, item, "an array of strings") for item in value]

    def text_map(self, name: str) -> dict[str, str]:
        expected = "an object whose values are strings"
        value = self._members.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, expected)
        return {self._checked(name, key, expected): self._checked(name, item, expected) for key, item in value.items()}

    def nested(self, name: str) -> Members:
        """The members of a nested object; of an absent one, none."""
        value = self._members.get(name)
        if value is None:
            return Members({}, path=self._named(name))
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Members(value, path=self._named(name))

    def refuse(self, *names: str) -> None:
        """Raise InvalidArgument for the first of ``names`` that asks for something; empty values ask for nothing."""
        for name in names:
            if _asks(self._members.get(name)):
                raise InvalidArgument(f"{self._named(name)} is not offered by this gateway version")

    def refuse_others(self, *known: str) -> None:
        """Raise InvalidArgument for a member beside ``known`` that asks for something."""
        for name, value in self._members.items():
            if name not in known and _asks(value):
                raise InvalidArgument(f"{self._named(name[:100])!a} is not known")

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _wrong(self, name: str, expected: str) -> InvalidArgument:
        return InvalidArgument(f"{self._named(name)} must be {expected}")

    def _checked(self, name: str, value: object, expected: str) -> str:
        if not isinstance(value, str):
            raise self._wrong(name, expected)
        if "\0" in value:
            raise InvalidArgument(f"{self._named(name)} must not contain NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            # JSON can write half a surrogate pair; no message can carry it.
            raise InvalidArgument(f"{self._named(name)} is not valid Unicode text") from None
        return value


def _asks(value: object) -> bool:
    """Whether a value asks for anything: containers only by what they hold, so ``{"tokens": {}}`` does not."""
    # Without recursion: the depth is the caller's choice.
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        if item is None:
            continue
        children = _children(item)
        if children is None:
            return True
        pending.extend(children)
    return False


def _children(value: object) -> Iterator[object] | None:
    if isinstance(value, dict):
        return iter(value.values())
    if isinstance(value, list):
        return iter(value)
    return None
