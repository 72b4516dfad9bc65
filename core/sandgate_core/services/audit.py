"""``AuditService``: reading the audit, for the gateway's own command line."""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import audit_pb2, audit_pb2_grpc
from sandgate_core.audit import Audit, AuditEntry, AuditQuery
from sandgate_core.callers import current
from sandgate_errors import InvalidArgument

__all__ = ["AuditService"]

_DEFAULT_LIMIT = 100
_LARGEST_LIMIT = 1000


class AuditService(audit_pb2_grpc.AuditServiceServicer):
    """protobuf <-> :class:`sandgate_core.audit.Audit`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def ListAudit(self, request: audit_pb2.ListAuditRequest, context: Any) -> audit_pb2.ListAuditResponse:  # noqa: N802
        current().must_be_internal()
        if not 0 <= request.limit <= _LARGEST_LIMIT:
            raise InvalidArgument(f"limit must be 0 to {_LARGEST_LIMIT}")
        found = await self._audit.read(_query_of(request))
        return audit_pb2.ListAuditResponse(entries=[_message_of(number, entry) for number, entry in found])


def _query_of(request: audit_pb2.ListAuditRequest) -> AuditQuery:
    return AuditQuery(
        team=request.team,
        key=request.key,
        subject=request.subject,
        action=request.action,
        outcome=request.outcome,
        request_id=request.request_id,
        since=request.since.ToMicroseconds() if request.HasField("since") else None,
        until=request.until.ToMicroseconds() if request.HasField("until") else None,
        before=request.before,
        limit=request.limit or _DEFAULT_LIMIT,
    )


def _message_of(number: int, entry: AuditEntry) -> audit_pb2.AuditEntry:
    time = Timestamp()
    time.FromMicroseconds(entry.at)
    return audit_pb2.AuditEntry(
        id=number,
        time=time,
        team=entry.team,
        key_id=entry.key_id,
        key_name=entry.key_name,
        action=entry.action,
        subject=entry.subject,
        outcome=entry.outcome,
        request_id=entry.request_id,
    )
