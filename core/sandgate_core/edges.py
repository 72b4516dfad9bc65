"""What the edges count, collected when somebody asks: several processes, one address for metrics.

Each edge keeps one call open here (``EdgeService.Report``). When Prometheus asks, all of them are answered, and each
edge calls again at once with its present numbers. A counter stays with the process that counts, told apart by the label
`worker`: nothing is added up here, so an edge that is started again is a counter that begins anew, which Prometheus
understands, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sandgate_api.core.v1 import edges_pb2
from sandgate_errors import Unavailable

__all__ = ["Edges", "Shown"]

#: Seconds an edge has to call again. One that does not is left out: old numbers would pass for new ones.
_PATIENCE = 1.0


class Edges:
    """The edges that are there, each with its open call."""

    def __init__(self) -> None:
        self._parked: dict[str, asyncio.Future[None]] = {}
        self._arrived: dict[str, edges_pb2.ReportRequest] = {}
        self._awaited: set[str] = set()
        self._complete = asyncio.Event()
        self._asking = asyncio.Lock()
        self._closed = False

    async def report(self, report: edges_pb2.ReportRequest) -> None:
        """Returns when the numbers are wanted anew. Raises Unavailable when that will not be any more."""
        if self._closed:
            raise Unavailable("the core is stopping")
        worker = report.worker
        parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if (earlier := self._parked.get(worker)) is not None:
            # Of a process that died a moment ago: this one has taken its place.
            _refuse(earlier, "another process reports as this worker")
        self._parked[worker] = parked
        self._arrived[worker] = report
        self._awaited.discard(worker)
        if not self._awaited:
            self._complete.set()
        try:
            await parked
        finally:
            if self._parked.get(worker) is parked:
                del self._parked[worker]

    async def collect(self) -> Shown:
        """The present numbers of all edges."""
        async with self._asking:
            self._arrived.clear()
            self._awaited = set(self._parked)
            self._complete.clear()
            for parked in self._parked.values():
                # An edge may have gone in this very moment.
                if not parked.done():
                    parked.set_result(None)
            self._parked.clear()
            if self._awaited:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE):
                        await self._complete.wait()
            return Shown([self._arrived[worker] for worker in sorted(self._arrived)])

    def close(self) -> None:
        """Let go of all calls, so that the server need not wait for them."""
        self._closed = True
        for parked in self._parked.values():
            _refuse(parked, "the core is stopping")
        self._parked.clear()


def _refuse(parked: asyncio.Future[None], reason: str) -> None:
    if not parked.done():
        parked.set_exception(Unavailable(reason))


class Shown(Collector):
    """Reports in Prometheus' terms."""

    def __init__(self, reports: Sequence[edges_pb2.ReportRequest]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("sandgate_edges", "Edges that answer.")
        up.add_metric([], len(self._reports))
        yield up
        families: dict[str, Metric] = {}
        for report in self._reports:
            for family in report.families:
                shown = families.get(family.name)
                if shown is None:
                    shown = families[family.name] = _empty(family)
                for series in family.series:
                    _add(shown, family, series, labels=[report.worker, *series.labels])
        yield from families.values()


def _empty(family: edges_pb2.MetricFamily) -> Metric:
    labels = ["worker", *family.labels]
    if family.kind == edges_pb2.METRIC_KIND_HISTOGRAM:
        return HistogramMetricFamily(family.name, family.help, labels=labels)
    if family.kind == edges_pb2.METRIC_KIND_COUNTER:
        return CounterMetricFamily(family.name, family.help, labels=labels)
    return GaugeMetricFamily(family.name, family.help, labels=labels)


def _add(
    shown: Metric, family: edges_pb2.MetricFamily, series: edges_pb2.MetricSeries, *, labels: Sequence[str]
) -> None:
    if isinstance(shown, HistogramMetricFamily):
        bounds = [*map(repr, family.bounds), "+Inf"]
        shown.add_metric(labels, list(zip(bounds, accumulate(series.counts), strict=True)), series.value)
    elif isinstance(shown, CounterMetricFamily | GaugeMetricFamily):
        shown.add_metric(labels, series.value)
