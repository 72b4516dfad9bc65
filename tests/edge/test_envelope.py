"""Frames of a stream as bytes: every split, every limit, every kind of damage (behaviour W2, envd.md 2.3)."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate_edge.connect import COMPRESSED, END_STREAM, EnvelopeReader, pack
from sandgate_errors import InvalidArgument, ResourceExhausted

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/connect_frames.json").read_text())


def read(chunks: Iterable[bytes], *, max_bytes: int = 1 << 20, gzip: bool = False) -> list[bytes]:
    reader = EnvelopeReader(max_bytes=max_bytes, gzip=gzip)
    found = [payload for chunk in chunks for payload in reader.feed(chunk)]
    reader.finish()
    return found


def test_frames_of_the_sdks_open_to_their_json():
    for vector in VECTORS["requests"]:
        frame = bytes.fromhex(vector["frame"])
        assert [json.loads(payload) for payload in read([frame])] == [vector["canonical"]]


def test_packed_frame_is_what_clients_expect():
    assert pack(0, b'{"event":{"start":{"pid":42}}}') == bytes.fromhex(VECTORS["events"][0]["frame"])
    assert pack(END_STREAM, b"{}") == bytes.fromhex(VECTORS["end_frame"])


def test_messages_do_not_depend_on_where_the_network_splits_them():
    stream = pack(0, b"one") + pack(0, b"") + pack(COMPRESSED, gzip.compress(b"three")) + pack(END_STREAM, b"{}")
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            parts = stream[:first], stream[first:second], stream[second:]
            assert read(parts, gzip=True) == [b"one", b"", b"three"]
    assert read([bytes([byte]) for byte in stream], gzip=True) == [b"one", b"", b"three"]


@given(st.lists(st.binary(max_size=300), max_size=6), st.data())
def test_any_messages_survive_any_splits(payloads: list[bytes], data: st.DataObject):
    stream = b"".join(pack(0, payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(parts) == payloads


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_at_all_end_in_messages_or_a_client_error(chunks: list[bytes]):
    with suppress(InvalidArgument, ResourceExhausted):
        read(chunks, max_bytes=64, gzip=True)


def test_truncated_stream_is_an_error_at_every_byte():
    stream = pack(0, b"payload")
    for length in range(1, len(stream)):
        with pytest.raises(InvalidArgument, match="inside an envelope"):
            read([stream[:length]])


def test_announced_length_is_refused_before_its_payload_arrives():
    reader = EnvelopeReader(max_bytes=1000, gzip=False)
    with pytest.raises(ResourceExhausted, match="4294967295"):
        list(reader.feed(struct.pack(">BI", 0, 0xFFFFFFFF)))
    assert list(EnvelopeReader(max_bytes=1000, gzip=False).feed(pack(0, b"x" * 1000))) == [b"x" * 1000]


def test_compressed_bomb_is_stopped_at_the_limit():
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < 100_000
    with pytest.raises(ResourceExhausted, match="after decompression"):
        read([pack(COMPRESSED, bomb)], max_bytes=100_000, gzip=True)


def test_compression_must_be_announced():
    with pytest.raises(InvalidArgument, match="Connect-Content-Encoding"):
        read([pack(COMPRESSED, gzip.compress(b"x"))])


@pytest.mark.parametrize(
    "payload",
    [b"", b"plain", gzip.compress(b"x" * 100)[:-1], gzip.compress(b"x") + b"tail", gzip.compress(b"x") * 2],
    ids=["empty", "plain", "cut", "tail", "two"],
)
def test_broken_gzip_is_a_client_error(payload: bytes):
    with pytest.raises(InvalidArgument, match="gzip"):
        read([pack(COMPRESSED, payload)], gzip=True)


@pytest.mark.parametrize("flags", [0x04, 0x80, 0xFF])
def test_unknown_flags_are_refused(flags: int):
    with pytest.raises(InvalidArgument, match="flags"):
        read([pack(flags, b"{}")], gzip=True)


def test_nothing_may_follow_the_end_frame():
    assert read([pack(0, b"a") + pack(END_STREAM, b"{}")]) == [b"a"]
    with pytest.raises(InvalidArgument, match="after its end frame"):
        read([pack(END_STREAM, b"{}"), pack(0, b"a")])
