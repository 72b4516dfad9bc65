"""The JSON of directory entries, written by hand: a listing can have tens of thousands, and the library's way would take
several times as long as making the listing did.

The same text in every field as protobuf's JSON mapping gives (W3): absent and default values left out, 64-bit numbers as
strings, enums by name, times as in RFC 3339.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sandgate_api.envd.v1 import filesystem_pb2

__all__ = ["events_json", "listing_json"]

_quoted = json.encoder.encode_basestring
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def listing_json(entries: Iterable[filesystem_pb2.EntryInfo]) -> bytes:
    """Of a ListDirResponse."""
    return _list("entries", [_entry(entry) for entry in entries])


def events_json(events: Iterable[filesystem_pb2.FilesystemEvent]) -> bytes:
    """Of a GetWatcherEventsResponse."""
    return _list("events", [_event(event) for event in events])


def _list(name: str, items: list[str]) -> bytes:
    return f'{{"{name}":[{",".join(items)}]}}'.encode() if items else b"{}"


def _event(event: filesystem_pb2.FilesystemEvent) -> str:
    fields = []
    if event.name:
        fields.append(f'"name":{_quoted(event.name)}')
    if event.type:
        fields.append(f'"type":{_event_type(event.type)}')
    if event.HasField("entry"):
        fields.append(f'"entry":{_entry(event.entry)}')
    return "{" + ",".join(fields) + "}"


def _entry(entry: filesystem_pb2.EntryInfo) -> str:
    fields = []
    if name := entry.name:
        fields.append(f'"name":{_quoted(name)}')
    if kind := entry.type:
        fields.append(f'"type":{_file_type(kind)}')
    if path := entry.path:
        fields.append(f'"path":{_quoted(path)}')
    if size := entry.size:
        fields.append(f'"size":"{size}"')
    if mode := entry.mode:
        fields.append(f'"mode":{mode}')
    if permissions := entry.permissions:
        fields.append(f'"permissions":{_quoted(permissions)}')
    if owner := entry.owner:
        fields.append(f'"owner":{_quoted(owner)}')
    if group := entry.group:
        fields.append(f'"group":{_quoted(group)}')
    if entry.HasField("modified_time"):
        time = entry.modified_time
        fields.append(f'"modifiedTime":"{_second(time.seconds)}{_fraction(time.nanos)}Z"')
    if entry.HasField("symlink_target"):
        fields.append(f'"symlinkTarget":{_quoted(entry.symlink_target)}')
    if metadata := entry.metadata:
        pairs = ",".join(f"{_quoted(key)}:{_quoted(value)}" for key, value in metadata.items())
        fields.append(f'"metadata":{{{pairs}}}')
    if entry.is_symlink:
        fields.append('"isSymlink":true')
    return "{" + ",".join(fields) + "}"


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    """Raises OverflowError outside of the years 1 to 9999, as the library raises ValueError: there is no text for it."""
    return (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()


def _fraction(nanos: int) -> str:
    """Three, six or nine digits, as few as say it all."""
    if nanos == 0:
        return ""
    digits = f"{nanos:09}"
    if digits.endswith("000000"):
        return "." + digits[:3]
    return "." + (digits[:6] if digits.endswith("000") else digits)


@functools.cache
def _file_type(number: int) -> str:
    found = filesystem_pb2.FileType.DESCRIPTOR.values_by_number.get(number)
    return str(number) if found is None else f'"{found.name}"'


@functools.cache
def _event_type(number: int) -> str:
    found = filesystem_pb2.EventType.DESCRIPTOR.values_by_number.get(number)
    return str(number) if found is None else f'"{found.name}"'
