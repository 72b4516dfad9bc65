"""The edges' numbers at the core: those of each process once, and none that are old."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sandgate_api.core.v1 import edges_pb2
from sandgate_core import edges
from sandgate_core.edges import Edges
from sandgate_errors import PermissionDenied, Unavailable


@pytest.fixture
def database():
    """SQLite: none of this is about the store."""


def report(worker, requests):
    return edges_pb2.ReportRequest(
        worker=worker,
        families=[
            edges_pb2.MetricFamily(
                name="requests",
                help="All of them.",
                kind=edges_pb2.METRIC_KIND_COUNTER,
                labels=["code"],
                series=[edges_pb2.MetricSeries(labels=["200"], value=requests)],
            ),
            edges_pb2.MetricFamily(
                name="seconds",
                help="How long.",
                kind=edges_pb2.METRIC_KIND_HISTOGRAM,
                bounds=[0.5, 1],
                series=[edges_pb2.MetricSeries(value=9.5, counts=[3, 0, 2])],
            ),
        ],
    )


def series(shown):
    families = text_string_to_metric_families(generate_latest(shown).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


class Edge:
    """Calls again whenever it is answered, with one request more."""

    def __init__(self, known, worker, *, hangs=False):
        self.requests = 0
        self._task = asyncio.ensure_future(self._run(known, worker, hangs))

    async def _run(self, known, worker, hangs):
        while True:
            await known.report(report(worker, self.requests))
            self.requests += 1
            if hangs:
                await asyncio.Event().wait()

    async def end(self):
        self._task.cancel()
        (self.ended,) = await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def reporting(known, *workers, **options):
    running = [Edge(known, worker, **options) for worker in workers]
    await asyncio.sleep(0)
    try:
        yield running
    finally:
        for edge in running:
            await edge.end()


async def test_numbers_are_those_of_the_moment_they_are_asked_for_and_each_edge_keeps_its_own():
    known = Edges()
    async with reporting(known, "0", "1"):
        for asked in (1, 2):
            shown = series(await known.collect())
            assert shown["sandgate_edges",] == 2
            for worker in ("0", "1"):
                assert shown["requests_total", ("code", "200"), ("worker", worker)] == asked
                assert shown["seconds_bucket", ("le", "0.5"), ("worker", worker)] == 3
                assert shown["seconds_bucket", ("le", "1.0"), ("worker", worker)] == 3
                assert shown["seconds_bucket", ("le", "+Inf"), ("worker", worker)] == 5
                assert shown["seconds_count", ("worker", worker)] == 5
                assert shown["seconds_sum", ("worker", worker)] == 9.5
    assert series(await known.collect()) == {("sandgate_edges",): 0}


async def test_edge_that_goes_in_the_moment_of_the_question_is_no_fault(monkeypatch):
    monkeypatch.setattr(edges, "_PATIENCE", 0.05)
    known = Edges()
    async with reporting(known, "0"):
        leaving = asyncio.ensure_future(known.report(report("1", 1)))
        await asyncio.sleep(0)
        leaving.cancel()
        assert series(await known.collect())["sandgate_edges",] == 1
        assert (await asyncio.gather(leaving, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_several_who_ask_at_once_are_all_answered():
    known = Edges()
    async with reporting(known, "0", "1"):
        answers = await asyncio.gather(*(known.collect() for _ in range(5)))
        assert [series(shown)["sandgate_edges",] for shown in answers] == [2] * 5


async def test_edge_that_hangs_is_left_out_and_holds_up_nobody_for_long(monkeypatch):
    monkeypatch.setattr(edges, "_PATIENCE", 0.05)
    known = Edges()
    async with reporting(known, "0"), reporting(known, "1", hangs=True):
        shown = series(await known.collect())
        assert shown["sandgate_edges",] == 1
        assert ("requests_total", ("code", "200"), ("worker", "1")) not in shown


async def test_edge_that_was_started_again_counts_in_the_place_of_the_one_before():
    known = Edges()
    async with reporting(known, "0") as (old,), reporting(known, "0"):
        shown = series(await known.collect())
        assert shown["sandgate_edges",] == 1
        assert shown["requests_total", ("code", "200"), ("worker", "0")] == 1
        assert old.requests == 0
    assert isinstance(old.ended, Unavailable)


async def test_stopping_core_lets_go_of_the_edges_calls():
    known = Edges()
    waiting = asyncio.ensure_future(known.report(report("0", 1)))
    await asyncio.sleep(0)
    known.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await known.report(report("0", 1))


async def test_only_the_gateway_itself_may_report(core):
    with pytest.raises(PermissionDenied):
        await core.owner.call("Report", request=report("0", 1))
