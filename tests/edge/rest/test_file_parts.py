"""Taking a download's messages apart by hand gives what protobuf gives, for anything that an agent may send."""

from __future__ import annotations

import os
import random

import pytest
from google.protobuf.message import DecodeError

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge.rest.file_parts import part_of

SIZES = [1, 0x7F, 0x80, 0x3FFF, 0x4000, 0x1FFFFF, 0x200000, 5_000_000]


def content_of(message: bytes) -> bytes:
    part = part_of(message)
    return bytes(part if isinstance(part, memoryview) else part.data)


@pytest.mark.parametrize("size", SIZES)
def test_content_of_any_length_is_a_view_of_the_message(size):
    data = os.urandom(size)
    part = part_of(agent_pb2.ReadFileResponse(data=data).SerializeToString())
    assert isinstance(part, memoryview)
    assert part == data


def test_empty_content_and_headers_are_what_they_were():
    assert content_of(agent_pb2.ReadFileResponse(data=b"").SerializeToString()) == b""
    header = agent_pb2.ReadFileResponse(header=agent_pb2.ReadFileResponse.Header(path="/a", size=1 << 40))
    assert part_of(header.SerializeToString()) == header
    assert part_of(b"") == agent_pb2.ReadFileResponse()


def test_other_spellings_of_the_same_message_are_read_as_protobuf_reads_them():
    """The agent is in the hands of its sandbox: fields twice, unknown fields, lengths with zeros in front."""
    first, second = (agent_pb2.ReadFileResponse(data=data).SerializeToString() for data in (b"one", b"other"))
    assert content_of(first + second) == b"other"
    assert content_of(b"\x12\x83\x80\x00one") == b"one"
    assert content_of(b"\x58\x01" + first) == b"one"
    header = agent_pb2.ReadFileResponse(header=agent_pb2.ReadFileResponse.Header(path="/a")).SerializeToString()
    assert part_of(first + header) == agent_pb2.ReadFileResponse.FromString(first + header)


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_the_same_message_or_the_same_refusal(seed):
    chance = random.Random(seed)
    for _ in range(20_000):
        message = bytes(
            chance.choice((0x12, 0x0A, 0x80, 0x01, 0, chance.randrange(256))) for _ in range(chance.randrange(9))
        )
        try:
            expected = agent_pb2.ReadFileResponse.FromString(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                part_of(message)
            continue
        part = part_of(message)
        assert (agent_pb2.ReadFileResponse(data=bytes(part)) if isinstance(part, memoryview) else part) == expected
