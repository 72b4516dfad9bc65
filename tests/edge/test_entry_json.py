"""Entries by hand and by protobuf's library are the same JSON (behaviour W3)."""

from __future__ import annotations

import json
import random

import pytest
from google.protobuf import json_format

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.connect.codec import JSON

TEXTS = ["", "a", "ünï 日本 🎉", 'quo"te\\', "line\nend\r\t\0\x1f\x7f", "\u2028</script>", "\ufffd", "x" * 300]
NUMBERS = [0, 1, 420, 2**31, 2**32 - 1]
SIZES = [0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63)]
SECONDS = [0, 1, -1, 1_796_059_783, -62_135_596_800, 253_402_300_799]
NANOS = [0, 1, 1_000, 1_000_000, 999_999_999, 120_000_000, 123_400_000, 123_456_000]


def random_entry(dice: random.Random) -> filesystem_pb2.EntryInfo:
    """Each field absent, at its default, or at one of its extremes."""
    entry = filesystem_pb2.EntryInfo()
    for name in ("name", "path", "permissions", "owner", "group", "symlink_target"):
        if dice.random() < 0.7:
            setattr(entry, name, dice.choice(TEXTS))
    entry.type = dice.choice([0, 1, 2, 3, 77])  # type: ignore[assignment]
    entry.size = dice.choice(SIZES)
    entry.mode = dice.choice(NUMBERS)
    if dice.random() < 0.7:
        entry.modified_time.seconds = dice.choice(SECONDS)
        entry.modified_time.nanos = dice.choice(NANOS)
    for _ in range(dice.randrange(3)):
        entry.metadata[dice.choice(TEXTS)] = dice.choice(TEXTS)
    entry.is_symlink = dice.random() < 0.5
    return entry


@pytest.mark.parametrize("seed", range(20))
def test_listings_are_what_the_library_writes(seed: int) -> None:
    dice = random.Random(seed)
    message = filesystem_pb2.ListDirResponse(entries=[random_entry(dice) for _ in range(seed * 5)])
    assert json.loads(JSON.encode(message)) == json_format.MessageToDict(message)
    assert JSON.decode(filesystem_pb2.ListDirResponse, JSON.encode(message)) == message


@pytest.mark.parametrize("seed", range(20))
def test_events_are_what_the_library_writes(seed: int) -> None:
    dice = random.Random(seed)
    message = filesystem_pb2.GetWatcherEventsResponse()
    for _ in range(seed * 5):
        event = message.events.add(name=dice.choice(TEXTS), type=dice.choice([0, 1, 5, 77]))
        if dice.random() < 0.5:
            event.entry.CopyFrom(random_entry(dice))
    assert json.loads(JSON.encode(message)) == json_format.MessageToDict(message)
    assert JSON.decode(filesystem_pb2.GetWatcherEventsResponse, JSON.encode(message)) == message


def test_every_field_is_written() -> None:
    """A field that is added to the messages must be added here too."""
    entry = {field.name for field in filesystem_pb2.EntryInfo.DESCRIPTOR.fields}
    assert entry == {
        *("name", "type", "path", "size", "mode", "permissions", "owner", "group"),
        *("modified_time", "symlink_target", "metadata", "is_symlink"),
    }
    assert {field.name for field in filesystem_pb2.FilesystemEvent.DESCRIPTOR.fields} == {"name", "type", "entry"}
    assert len(filesystem_pb2.ListDirResponse.DESCRIPTOR.fields) == 1
    assert len(filesystem_pb2.GetWatcherEventsResponse.DESCRIPTOR.fields) == 1
