"""Deadlines: one timer for the earliest, exact, and no trace of moved ones."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from sandgate_core import clock
from sandgate_core.expiry import Expiry


@pytest.fixture
async def fired():
    return []


@pytest.fixture
async def expiry(fired):
    expiry = Expiry(lambda name: fired.append((name, clock.now())))
    yield expiry
    expiry.close()


async def test_fires_in_order_of_deadlines_and_never_early(expiry, fired, until):
    now = clock.now()
    deadlines = {f"i{n}": now + 1000 * ((n * 37) % 100) for n in range(100)}
    for name, deadline in deadlines.items():
        expiry.set(name, deadline)
    await until(lambda: len(fired) == 100)
    assert all(at >= deadlines[name] for name, at in fired)
    assert [deadlines[name] for name, _ in fired] == sorted(deadlines.values())


async def test_overdue_fires_at_once(expiry, fired, until):
    expiry.set("i1", 0)
    await until(lambda: bool(fired))


async def test_moved_deadline_fires_once_at_the_new_time(expiry, fired, until):
    now = clock.now()
    expiry.set("later", now + 10_000)
    expiry.set("later", now + 200_000)
    expiry.set("sooner", now + 10_000_000)
    expiry.set("sooner", now + 20_000)
    await until(lambda: len(fired) == 2)
    assert [name for name, _ in fired] == ["sooner", "later"]
    assert fired[1][1] >= now + 200_000
    await asyncio.sleep(0.05)
    assert len(fired) == 2


async def test_dropped_deadline_does_not_fire(expiry, fired, until):
    now = clock.now()
    expiry.set("dropped", now + 1000)
    expiry.set("kept", now + 20_000)
    expiry.drop("dropped")
    await until(lambda: bool(fired))
    assert [name for name, _ in fired] == ["kept"]


async def test_moving_a_deadline_for_ever_takes_no_memory(expiry):
    for number in range(10_000):
        expiry.set("i1", clock.now() + 10**12 + number)
    assert len(expiry._heap) < 100


async def test_deadline_far_away_is_a_valid_timer(expiry, fired):
    expiry.set("i1", 2**62)
    await asyncio.sleep(0.01)
    assert not fired


async def test_fire_may_set_a_deadline_again(until):
    fired = []

    def fire(name):
        fired.append(name)
        if len(fired) < 3:
            expiry.set(name, clock.now())

    expiry = Expiry(fire)
    expiry.set("i1", clock.now())
    await until(lambda: len(fired) == 3)
    expiry.close()


async def test_what_fires_knows_nothing_of_the_request_that_set_a_deadline(until):
    seen = []
    expiry = Expiry(lambda name: seen.append((name, structlog.contextvars.get_contextvars())))
    with structlog.contextvars.bound_contextvars(request_id="of-somebody"):
        expiry.set("i1", clock.now() + 20_000)
        expiry.set("i2", clock.now() + 40_000)
    await until(lambda: len(seen) == 2)
    assert seen == [("i1", {}), ("i2", {})]
    expiry.close()
