"""What sandboxes used: bounded, for their whole life, over restarts, and never what an agent made up (behaviour.md C25)."""

from __future__ import annotations

import asyncio

import pytest

from sandgate_core import metrics
from sandgate_core.samples import LONGEST_SERIES, Sample, Series
from sandgate_plugin_api import Usage

SECOND = 1_000_000


def sample(at: int) -> Sample:
    return Sample(
        at=at, cpu_count=2, cpu_used_pct=1.5, mem_total=10, mem_used=5, mem_cache=1, disk_used=2**40, disk_total=2**41
    )


def times(series: Series) -> list[int]:
    return [found.at for found in series.between(None, None)]


def test_sample_comes_back_as_it_was():
    series = Series()
    series.add(sample(7))
    assert series.latest == sample(7)
    assert list(series.between(7, 7)) == [sample(7)]
    assert list(series.between(8, None)) == list(series.between(None, 6)) == []


def test_long_series_keeps_its_beginning_and_its_last_hour_whole():
    series = Series()
    count = 10 * LONGEST_SERIES
    for number in range(1, count + 1):
        series.add(sample(number * 5 * SECOND))
    kept = times(series)
    assert len(kept) <= LONGEST_SERIES
    assert kept[0] == 5 * SECOND
    assert kept[-1] == count * 5 * SECOND
    assert kept == sorted(set(kept))
    newest = LONGEST_SERIES // 2 - 1
    assert kept[-newest:] == [number * 5 * SECOND for number in range(count - newest + 1, count + 1)]


def test_clock_that_was_set_back_leaves_no_sample_of_the_future():
    series = Series()
    for at in (10, 20, 30, 15):
        series.add(sample(at))
    assert times(series) == [10, 15]


def test_store_gets_each_sample_once_and_all_anew_after_a_change():
    series = Series()
    series.add(sample(1))
    piece, instead = series.unwritten("i1")
    assert (piece.at, instead) == (1, False)
    assert series.unwritten("i1") == (None, False)
    series.add(sample(2))
    piece, instead = series.unwritten("i1")
    assert (piece.at, instead) == (2, False)
    again = Series()
    for packed in (sample(1).pack(), piece.samples, b"damaged"):
        again.load(packed)
    assert times(again) == [1, 2]
    again.add(sample(1))
    piece, instead = again.unwritten("i1")
    assert (piece.at, instead) == (1, True)


async def samples_of(client, sandbox_id, **fields):
    answer = await client.call("GetMetrics", ids=[sandbox_id], **fields)
    return [list(found.samples) for found in answer.sandboxes]


async def until_measured(client, sandbox_id):
    async with asyncio.timeout(30):
        while True:
            (found,) = await samples_of(client, sandbox_id)
            if found:
                return found
            await asyncio.sleep(0.05)


async def test_running_sandbox_is_measured_and_its_agent_not_believed(core):
    sandbox = await core.owner.create()
    found = await until_measured(core.owner, sandbox.id)
    # The agent says "not a number", which no JSON can carry.
    assert found[0].cpu_used_pct == 0
    assert found[0].mem_used == 5
    assert await samples_of(core.owner, "i" + "0" * 20) == []
    assert [len(found) for found in await samples_of(core.owner, sandbox.id, latest=True)] == [1]


async def test_backend_that_measures_is_asked_instead_of_the_agent(deployment, world):
    async def usage(handle):
        world.asked = handle
        return Usage(
            cpu_count=3, cpu_used_pct=12.5, mem_total=100, mem_used=50, mem_cache=5, disk_used=2**41, disk_total=2**42
        )

    deployment.backend.usage = usage
    async with deployment.core() as core:
        sandbox = await core.owner.create()
        (found, *_) = await until_measured(core.owner, sandbox.id)
        assert (found.cpu_count, found.cpu_used_pct, found.mem_used, found.disk_used) == (3, 12.5, 50, 2**41)
        assert world.asked["id"] == sandbox.id


async def test_agent_that_hangs_holds_up_no_other(core, world, monkeypatch):
    monkeypatch.setattr(metrics, "_PATIENCE", 30)
    monkeypatch.setattr(metrics, "_AT_ONCE", 2)
    hanging = await core.owner.create()
    world.boxes[hanging.id].agent.hangs = True
    other = await core.owner.create()
    assert await until_measured(core.owner, other.id)
    assert await samples_of(core.owner, hanging.id) == [[]]


async def test_measurements_outlive_the_core_and_end_with_the_sandbox(deployment):
    async with deployment.core() as core:
        sandbox = await core.owner.create()
        before = await until_measured(core.owner, sandbox.id)
    async with deployment.core() as core:
        assert (await samples_of(core.owner, sandbox.id))[0][0] == before[0]
        await core.owner.call("Kill", id=sandbox.id)
        assert await samples_of(core.owner, sandbox.id) == []
    assert await deployment.sql("SELECT * FROM measurements") == []


@pytest.mark.parametrize("ids", [[], ["i" + "0" * 20] * 101])
async def test_number_of_ids_is_bounded(core, ids):
    with pytest.raises(Exception, match="1 to 100"):
        await core.owner.call("GetMetrics", ids=ids)
