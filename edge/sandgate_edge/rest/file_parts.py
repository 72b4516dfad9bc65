"""The messages of a download as the edge takes them apart: content is not copied on its way through protobuf.

A decoded message holds a copy of its bytes and gives out another. For content, which is all of a download but its first
message, these two are a third of the edge's work. So its one field is found by hand, in the one form that writers of
protobuf give it; whatever looks otherwise is decoded. Specified by ``ReadFileResponse`` in
``sandgate_api/agent/v1/agent.proto``.
"""

from __future__ import annotations

from typing import TypeAlias

from sandgate_api.agent.v1 import agent_pb2

__all__ = ["Content", "Part", "part_of"]

Content: TypeAlias = bytes | memoryview
#: One message: a piece of content as a view of it, or the header.
Part: TypeAlias = agent_pb2.ReadFileResponse | memoryview

# The field's number and the type of what has a length in front.
_DATA = agent_pb2.ReadFileResponse.DATA_FIELD_NUMBER << 3 | 2
# A length of up to 32 bits, seven in each byte; no message of gRPC is longer.
_MOST_LENGTH_BYTES = 5


def part_of(message: bytes) -> Part:
    """Decodes one message. Raises DecodeError for bytes that are none."""
    if message and message[0] == _DATA:
        length = 0
        for place, byte in enumerate(message[1 : 1 + _MOST_LENGTH_BYTES]):
            length |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                start = place + 2
                if len(message) - start == length:
                    return memoryview(message)[start:]
                break
    return agent_pb2.ReadFileResponse.FromString(message)
