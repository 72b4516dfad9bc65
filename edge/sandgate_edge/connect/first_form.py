"""JSON for clients that break on fields which came later: the Python SDK before 1.7 (envd.md 2.1).

Its messages are those of the protocol's first form, and until 1.5.2 it refuses what else it finds in a reply, where every other
client skips it. So what such a client gets is cut down to what it knows, whatever E2B and this gateway have added since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import Message

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.connect.codec import JSON, Codec

__all__ = ["FIRST_FORM_JSON", "knows_first_form_only"]

AnyMessage = TypeVar("AnyMessage", bound=Message)

#: All there is to know those releases by. Later ones, and other clients of the protocol, add a version or have another name.
_USER_AGENT = "connect-python"
#: The highest field number of the first form. Fields of our own begin at 1000, in every message.
_LAST_FIELD: Mapping[str, int] = {
    filesystem_pb2.EntryInfo.DESCRIPTOR.full_name: 3,
    filesystem_pb2.FilesystemEvent.DESCRIPTOR.full_name: 2,
}
_LAST_FIELD_ELSEWHERE = 999
_LAST_FILE_TYPE = filesystem_pb2.FILE_TYPE_DIRECTORY


def knows_first_form_only(user_agent: str) -> bool:
    """Whether a client of this name must not get more than the first form."""
    return user_agent == _USER_AGENT


class _FirstFormJson(Codec):
    name = "json"

    def decode(self, kind: type[AnyMessage], data: bytes) -> AnyMessage:
        return JSON.decode(kind, data)

    def encode(self, message: Message) -> bytes:
        reduced = type(message)()
        reduced.CopyFrom(message)
        _reduce(reduced)
        return JSON.encode(reduced)


FIRST_FORM_JSON: Codec = _FirstFormJson()


def _reduce(message: Message) -> None:
    last = _LAST_FIELD.get(message.DESCRIPTOR.full_name, _LAST_FIELD_ELSEWHERE)
    for field, value in message.ListFields():
        if field.number > last:
            message.ClearField(field.name)
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        elif isinstance(value, Message):
            _reduce(value)
        else:
            for item in value:
                _reduce(item)
    if isinstance(message, filesystem_pb2.EntryInfo) and message.type > _LAST_FILE_TYPE:
        # A name that the client's enum lacks would break it too.
        message.type = filesystem_pb2.FILE_TYPE_UNSPECIFIED
