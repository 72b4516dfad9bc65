"""Templates and snapshots as messages."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.snapshot_table import SnapshotRecord
from sandgate_core.templates import Listed

__all__ = ["message_of_snapshot", "message_of_template"]


def message_of_template(
    item: Listed, spawns: Mapping[tuple[str, str], tuple[int, int]], *, envd_version: str
) -> sandboxes_pb2.Template:
    """``spawns``: how many sandboxes each template has on record, and when its last was made, by backend and id."""
    template = item.template
    count, last = spawns.get((item.backend.name, template.id), (0, 0))
    return sandboxes_pb2.Template(
        id=template.id,
        aliases=template.aliases,
        backend=item.backend.name,
        resources=sandboxes_pb2.Resources(
            cpu_count=template.resources.cpu_count,
            memory_mb=template.resources.memory_mb,
            disk_size_mb=template.resources.disk_size_mb,
        ),
        found_at=_timestamp(item.found_at),
        envd_version=envd_version,
        spawn_count=count,
        last_spawned_at=_timestamp(last) if count else None,
    )


def message_of_snapshot(record: SnapshotRecord) -> sandboxes_pb2.Snapshot:
    return sandboxes_pb2.Snapshot(
        id=record.id,
        names=[f"{record.owner}/{record.name}:{record.tag}"] if record.name else [],
        sandbox_id=record.sandbox_id,
        backend=record.backend,
        created_at=_timestamp(record.created_at),
    )


def _timestamp(microseconds: int) -> Timestamp:
    message = Timestamp()
    message.FromMicroseconds(microseconds)
    return message
