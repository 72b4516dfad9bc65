"""What one process of the edge counts about itself, and its way to the one address where metrics are shown.

Counting is a dictionary and an addition, done for every request whether anybody asks or not. The core shows the numbers
(``sandgate_core.edges``): it holds our call until Prometheus asks it, so they are as fresh as its own. Labels have few
values whatever clients send: a route as it is written in the table, a method and a status that HTTP knows.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from http import HTTPStatus

import structlog

from sandgate_api.core.v1 import edges_pb2
from sandgate_errors import SandgateError

__all__ = ["Reporter", "Telemetry"]

#: Seconds.
_REQUEST_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
#: Seconds between two looks at how late the event loop is.
_LAG_STEP = 0.5
#: Seconds until the core is called again that could not be.
_RETRY = 1.0
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: 499: the client left. A server in a sandbox may answer with any other number too.
_STATUSES = frozenset({"499", *(str(status.value) for status in HTTPStatus)})

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def series(self, labels: Iterable[str] = ()) -> edges_pb2.MetricSeries:
        return edges_pb2.MetricSeries(labels=labels, value=self.total, counts=self.counts)


class Telemetry:
    """The numbers of this process, from its start."""

    def __init__(self) -> None:
        self._latencies: dict[tuple[str, str], _Histogram] = {}
        self._answers: dict[tuple[str, str, str], int] = {}
        self._lag = _Histogram(_LAG_BOUNDS)
        #: Requests that are being served now.
        self.in_flight = 0
        #: Bytes of files, as they pass between client and agent.
        self.uploaded = 0
        self.downloaded = 0

    def answered(self, route: str, method: str, *, code: str, seconds: float | None) -> None:
        """``seconds`` to the beginning of the answer; None where there was none."""
        if method not in _METHODS:
            method = "other"
        if code.isdigit() and code not in _STATUSES:
            code = "other"
        key = (route, method, code)
        self._answers[key] = self._answers.get(key, 0) + 1
        if seconds is not None:
            latency = self._latencies.get((route, method))
            if latency is None:
                latency = self._latencies[route, method] = _Histogram(_REQUEST_BOUNDS)
            latency.observe(seconds)

    async def watch_loop(self) -> None:
        """Measures the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_STEP
            await asyncio.sleep(_LAG_STEP)
            self._lag.observe(max(0.0, loop.time() - due))

    def families(self, *, streams: int) -> list[edges_pb2.MetricFamily]:
        """Everything, as it is now. ``streams``: answers without an end of their own that are open."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return [
            edges_pb2.MetricFamily(
                name="sandgate_edge_request_seconds",
                help="Requests, from their headers to the beginning of the answer.",
                kind=edges_pb2.METRIC_KIND_HISTOGRAM,
                labels=("route", "method"),
                bounds=_REQUEST_BOUNDS,
                series=[latency.series(labels) for labels, latency in self._latencies.items()],
            ),
            _counter(
                "sandgate_edge_requests",
                "Requests that are over, by status; of a stream that ended with an error, its Connect code.",
                self._answers.items(),
                labels=("route", "method", "code"),
            ),
            _gauge("sandgate_edge_requests_in_flight", "Requests that are being served now.", self.in_flight),
            _gauge("sandgate_edge_streams", "Streams of Connect that are open now.", streams),
            _counter(
                "sandgate_edge_file_bytes",
                "Bytes of files that passed, up to sandboxes and down from them.",
                [(("up",), self.uploaded), (("down",), self.downloaded)],
                labels=("direction",),
            ),
            edges_pb2.MetricFamily(
                name="sandgate_edge_loop_lag_seconds",
                help="How late the event loop comes to what is due.",
                kind=edges_pb2.METRIC_KIND_HISTOGRAM,
                bounds=_LAG_BOUNDS,
                series=[self._lag.series()],
            ),
            _counter("sandgate_edge_cpu_seconds", "CPU time of the process.", [((), usage.ru_utime + usage.ru_stime)]),
            _gauge("sandgate_edge_resident_memory_bytes", "Memory of the process.", _resident()),
            _gauge("sandgate_edge_open_fds", "Open descriptors of the process.", len(os.listdir("/proc/self/fd"))),
            _gauge("sandgate_edge_start_time_seconds", "When the process started, in seconds since 1970.", _STARTED),
        ]


class Reporter:
    """Keeps the core supplied with this process' numbers, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        send: Callable[[edges_pb2.ReportRequest], Awaitable[None]],
        worker: int,
        streams: Callable[[], int],
    ) -> None:
        self._telemetry = telemetry
        self._send = send
        self._worker = str(worker)
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._telemetry.watch_loop()), asyncio.create_task(self._report())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    async def _report(self) -> None:
        while True:
            families = self._telemetry.families(streams=self._streams())
            try:
                await self._send(edges_pb2.ReportRequest(worker=self._worker, families=families))
            except SandgateError as error:
                _log.debug("the core does not take metrics", reason=error.message)
                await asyncio.sleep(_RETRY)
            except Exception as error:
                # The numbers must come back by themselves, whatever it was.
                _log.error("metrics could not be sent", exc_info=error)
                await asyncio.sleep(_RETRY)


def _counter(
    name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], *, labels: Iterable[str] = ()
) -> edges_pb2.MetricFamily:
    return edges_pb2.MetricFamily(
        name=name,
        help=text,
        kind=edges_pb2.METRIC_KIND_COUNTER,
        labels=labels,
        series=[edges_pb2.MetricSeries(labels=key, value=value) for key, value in values],
    )


def _gauge(name: str, text: str, value: float) -> edges_pb2.MetricFamily:
    return edges_pb2.MetricFamily(
        name=name, help=text, kind=edges_pb2.METRIC_KIND_GAUGE, series=[edges_pb2.MetricSeries(value=value)]
    )


_STARTED = time.time()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
