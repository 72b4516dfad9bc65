"""Numbers about the gateway for Prometheus, on an address of its own that is off unless it is named.

What is counted, and how each series is called, stands in docs/operations.md. Labels have few values whatever callers send:
a relayed method's name is the caller's choice, so all relayed streams are one. Nothing names a team, key or sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from sandgate_core.chores import Pause, running
from sandgate_core.edges import Edges
from sandgate_errors import FailedPrecondition

__all__ = ["Telemetry"]

#: Seconds; from a read out of memory to the slowest create.
_CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
#: Seconds between two looks at how late the event loop is.
_LAG_STEP = 0.5

Counts = Callable[[], Mapping[tuple[str, str], int]]


class Telemetry:
    """The series of one core."""

    def __init__(self) -> None:
        # A third of all lines, which Prometheus does not use.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._calls = Histogram(
            "sandgate_core_call_seconds",
            "Unary calls of the core, by method, to their end.",
            ["method"],
            buckets=_CALL_BUCKETS,
            registry=self._registry,
        )
        self._outcomes = Counter(
            "sandgate_core_calls",
            "Calls of the core by method and outcome.",
            ["method", "outcome"],
            registry=self._registry,
        )
        self._streams = Gauge(
            "sandgate_core_relay_streams", "Calls that the relay is passing on now.", registry=self._registry
        )
        self._lag = Histogram(
            "sandgate_core_loop_lag_seconds",
            "How late the event loop comes to what is due.",
            buckets=_LAG_BUCKETS,
            registry=self._registry,
        )
        self._backend_calls = Histogram(
            "sandgate_core_backend_seconds",
            "Operations of backends, to their end.",
            ["backend", "operation"],
            buckets=_CALL_BUCKETS,
            registry=self._registry,
        )
        self._backend_outcomes = Counter(
            "sandgate_core_backend_calls",
            "Operations of backends by outcome.",
            ["backend", "operation", "outcome"],
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    @contextmanager
    def relaying(self) -> Iterator[None]:
        with self._streams.track_inprogress():
            yield

    def call_ended(self, method: str, *, relayed: bool, outcome: str, seconds: float) -> None:
        name = "relay" if relayed else method.removeprefix("/sandgate_api.core.v1.")
        self._outcomes.labels(name, outcome).inc()
        if not relayed:
            self._calls.labels(name).observe(seconds)

    def backend_did(self, backend: str, operation: str, *, outcome: str, seconds: float) -> None:
        self._backend_outcomes.labels(backend, operation, outcome).inc()
        self._backend_calls.labels(backend, operation).observe(seconds)

    @asynccontextmanager
    async def served(self, listen: str | None, counts: Counts, edges: Edges) -> AsyncIterator[None]:
        """While the block runs, ``GET /metrics`` on ``host:port`` shows the series. Raises FailedPrecondition."""
        if listen is None:
            yield
            return
        # Loaded only where it is used: it costs a tenth of a second of every start.
        from aiohttp import web

        async def show(_: web.Request) -> web.Response:
            # The edges first: what they do to answer is part of the core's own numbers.
            of_edges = generate_latest(await edges.collect())
            return web.Response(
                body=generate_latest(self._registry) + of_edges, headers={"Content-Type": CONTENT_TYPE_LATEST}
            )

        self._registry.register(_Sandboxes(counts))
        app = web.Application()
        app.router.add_get("/metrics", show)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            host, _, port = listen.rpartition(":")
            try:
                await web.TCPSite(runner, host.strip("[]"), int(port)).start()
            except OSError as error:
                reason = error.strerror or error
                raise FailedPrecondition(f"the core cannot show metrics on {listen}: {reason}") from error
            async with running(self._watch_loop):
                yield
        finally:
            await runner.cleanup()

    async def _watch_loop(self, pause: Pause) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_STEP
        while await pause(_LAG_STEP):
            now = loop.time()
            self._lag.observe(max(0.0, now - due))
            due = now + _LAG_STEP


class _Sandboxes(Collector):
    """Counted when asked for, so the numbers cannot drift from the truth."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "sandgate_sandboxes", "Sandboxes that have not ended, by backend and state.", labels=["backend", "state"]
        )
        for (backend, state), number in sorted(self._counts().items()):
            family.add_metric([backend, state], number)
        yield family
