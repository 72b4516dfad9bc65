"""The two codecs of Connect: messages to and from JSON and protobuf (behaviour W1, W3; envd.md 2.1).

JSON goes through protobuf's own mapping, which reads both spellings of a field, names and numbers of enums, and numbers
as text, and ignores what it does not know. Three things are by hand: output of a process is written directly, because all
of a command's bytes pass here; so are lists of entries (:mod:`sandgate_edge.connect.entry_json`); and base64 is checked on input, because the library drops characters it cannot read, so
that a typing error would become other bytes in somebody's terminal.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from binascii import b2a_base64
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_edge.connect.entry_json import events_json, listing_json
from sandgate_errors import InvalidArgument, ResourceExhausted

__all__ = ["CODECS", "JSON", "PROTO", "Codec"]

AnyMessage = TypeVar("AnyMessage", bound=Message)

# Each element of a JSON document becomes an object some thirty times its size on the wire. No message of the services
# comes near this many: what is large in them is text.
_MAX_JSON_ELEMENTS = 1_000_000
# Half a surrogate pair can only be written as an escape of this kind; a whole one is written as two of them.
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}", re.ASCII)
_FOLLOWED = (process_pb2.StartResponse, process_pb2.ConnectResponse)


class Codec(ABC):
    """One encoding of messages, and what it is called in content types."""

    name: str

    @property
    def unary_type(self) -> str:
        return f"application/{self.name}"

    @property
    def stream_type(self) -> str:
        return f"application/connect+{self.name}"

    @abstractmethod
    def decode(self, kind: type[AnyMessage], data: bytes) -> AnyMessage:
        """Raises InvalidArgument for anything that is not a message of this kind."""

    @abstractmethod
    def encode(self, message: Message) -> bytes: ...


class _Json(Codec):
    name = "json"

    def decode(self, kind: type[AnyMessage], data: bytes) -> AnyMessage:
        document = _document(data)
        _check_bytes(document, cast("Descriptor", kind.DESCRIPTOR))
        message = kind()
        try:
            json_format.ParseDict(document, message, ignore_unknown_fields=True)
        except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"the message does not fit {kind.DESCRIPTOR.name}: {_brief(error)}") from error
        return message

    def encode(self, message: Message) -> bytes:
        if isinstance(message, _FOLLOWED) and (output := _output(message.event)) is not None:
            return output
        if isinstance(message, filesystem_pb2.ListDirResponse):
            return listing_json(message.entries)
        if isinstance(message, filesystem_pb2.GetWatcherEventsResponse):
            return events_json(message.events)
        return json.dumps(json_format.MessageToDict(message), separators=(",", ":"), ensure_ascii=False).encode()


class _Proto(Codec):
    name = "proto"

    def decode(self, kind: type[AnyMessage], data: bytes) -> AnyMessage:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise InvalidArgument(f"the message is not a {kind.DESCRIPTOR.name} in protobuf encoding") from error

    def encode(self, message: Message) -> bytes:
        return message.SerializeToString()


JSON: Codec = _Json()
PROTO: Codec = _Proto()
CODECS: tuple[Codec, ...] = (JSON, PROTO)


def _output(event: process_pb2.ProcessEvent) -> bytes | None:
    """The JSON of a data event; None for every other event."""
    if event.WhichOneof("event") != "data":
        return None
    stream = event.data.WhichOneof("output")
    if stream is None:
        return None
    content = b2a_base64(getattr(event.data, stream), newline=False)
    if event.data.seq:
        return b'{"event":{"data":{"%b":"%b","seq":"%d"}}}' % (stream.encode(), content, event.data.seq)
    return b'{"event":{"data":{"%b":"%b"}}}' % (stream.encode(), content)


def _document(data: bytes) -> dict[str, Any]:
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_JSON_ELEMENTS:
        raise ResourceExhausted(f"the message has more than {_MAX_JSON_ELEMENTS} JSON elements", should_retry=False)
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
        if _HALF_CHARACTER.search(data) is not None:
            # The library ends in errors of its own kind over these, in names and in places where no text belongs too.
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("the message is not valid JSON: a text in it has half a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the message is not valid JSON: {_brief(error)}") from error
    if not isinstance(document, dict):
        raise InvalidArgument("the message is not a JSON object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_bytes(value: object, descriptor: Descriptor) -> None:
    for field, item in _items(value, descriptor):
        if field.message_type is not None:
            _check_bytes(item, field.message_type)
        elif isinstance(item, str) and not _is_base64(item):
            raise InvalidArgument(f"field {field.json_name} is not base64")


def _items(value: object, descriptor: Descriptor) -> Iterator[tuple[FieldDescriptor, object]]:
    if not isinstance(value, dict):
        return
    for field in _byte_fields(descriptor):
        for name in {field.json_name, field.name}:
            found = value.get(name)
            for item in found if isinstance(found, list) else (found,):
                yield field, item


@cache
def _byte_fields(descriptor: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields that are bytes or hold some. No message of the services contains itself."""
    return tuple(
        field
        for field in descriptor.fields
        if field.type == FieldDescriptor.TYPE_BYTES
        or (field.message_type is not None and _byte_fields(field.message_type))
    )


def _is_base64(text: str) -> bool:
    return _BASE64.fullmatch(text) is not None and len(text.rstrip("=")) % 4 != 1


def _brief(error: BaseException) -> str:
    """The reason in one short line of ASCII: it may quote the message, whose text can be long or half a character."""
    return ascii(str(error))[1:-1][:200]
