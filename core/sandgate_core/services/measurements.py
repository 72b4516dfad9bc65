"""Measurements as messages, and those of sandboxes that other cores measure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core import clock
from sandgate_core.callers import current
from sandgate_core.identifiers import parse_sandbox_id
from sandgate_core.peers import Peers
from sandgate_core.roster import Peer
from sandgate_core.samples import Sample, Series
from sandgate_core.sandboxes import Sandboxes
from sandgate_errors import SandboxNotFound, Unavailable

__all__ = ["add_measured_elsewhere", "messages_of"]

_METHOD = "/sandgate_api.core.v1.SandboxService/GetMetrics"


def messages_of(series: Series, request: sandboxes_pb2.GetMetricsRequest) -> Iterator[sandboxes_pb2.MetricsSample]:
    """The samples that are asked for."""
    return map(_message_of, _chosen(series, request))


async def add_measured_elsewhere(
    answer: sandboxes_pb2.GetMetricsResponse,
    request: sandboxes_pb2.GetMetricsRequest,
    sandbox_ids: Sequence[str],
    sandboxes: Sandboxes,
) -> None:
    """What other cores have of these sandboxes; where one cannot be asked, what it has left in the store a minute ago."""
    by_core: dict[str, tuple[Peers, Peer, list[str]]] = {}
    for sandbox_id in sandbox_ids:
        try:
            found = await sandboxes.routing.elsewhere(parse_sandbox_id(sandbox_id), current())
        except Unavailable:
            await _add_stored(answer, request, [sandbox_id], sandboxes)
            continue
        if found is not None:
            peers, peer = found
            by_core.setdefault(peer.id, (peers, peer, []))[2].append(sandbox_id)
    for peers, peer, theirs in by_core.values():
        asked = sandboxes_pb2.GetMetricsRequest()
        asked.CopyFrom(request)
        asked.ids[:] = theirs
        request_id = str(structlog.contextvars.get_contextvars().get("request_id", ""))
        try:
            part = await peers.forward(
                peer, _METHOD, asked.SerializeToString(), caller=current(), request_id=request_id, timeout=None
            )
            answer.MergeFrom(sandboxes_pb2.GetMetricsResponse.FromString(part))
        except Unavailable:
            await _add_stored(answer, request, theirs, sandboxes)


async def _add_stored(
    answer: sandboxes_pb2.GetMetricsResponse,
    request: sandboxes_pb2.GetMetricsRequest,
    sandbox_ids: Sequence[str],
    sandboxes: Sandboxes,
) -> None:
    for sandbox_id in sandbox_ids:
        try:
            record = await sandboxes.questions.get(sandbox_id, current())
        except SandboxNotFound:
            continue
        series = await sandboxes.elsewhere.series(record.id)
        answer.sandboxes.add(id=sandbox_id, samples=messages_of(series, request))


def _chosen(series: Series, request: sandboxes_pb2.GetMetricsRequest) -> Iterable[Sample]:
    if request.latest:
        return () if series.latest is None else (series.latest,)
    return series.between(
        _instant(request.since) if request.HasField("since") else None,
        _instant(request.until) if request.HasField("until") else None,
    )


def _message_of(sample: Sample) -> sandboxes_pb2.MetricsSample:
    return sandboxes_pb2.MetricsSample(
        time=_timestamp(sample.at),
        cpu_count=sample.cpu_count,
        cpu_used_pct=sample.cpu_used_pct,
        mem_total=sample.mem_total,
        mem_used=sample.mem_used,
        mem_cache=sample.mem_cache,
        disk_used=sample.disk_used,
        disk_total=sample.disk_total,
    )


def _instant(timestamp: Timestamp) -> int:
    return int(timestamp.seconds) * clock.MICROSECONDS + int(timestamp.nanos) // 1_000


def _timestamp(microseconds: int) -> Timestamp:
    seconds, rest = divmod(microseconds, clock.MICROSECONDS)
    return Timestamp(seconds=seconds, nanos=rest * 1_000)
