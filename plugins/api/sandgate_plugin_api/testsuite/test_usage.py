"""What a sandbox uses: told by the backend or, where it says nothing, by the agent; in either case truly.

Where nothing limits a sandbox, what is measured may be the machine's, of which nobody knows what else it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sandgate_errors import SandgateError
from sandgate_plugin_api.backend import AgentFeature, Backend
from sandgate_plugin_api.records import Usage
from sandgate_plugin_api.testsuite.box import Box, agent_at, made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_HELD_MB = 96
#: Seconds for a command to do what it is measured by, on a machine that does other things too.
_PATIENCE = 30.0
_UNTIL_LET_GO = "until [ -e let-go ]; do {}; done"
#: `tail` keeps the end of what it reads until that ends.
_HOLD = (
    f"{{ head -c {_HELD_MB + 8}m /dev/zero; {_UNTIL_LET_GO.format('sleep 0.1')}; }} | tail -c {_HELD_MB}m >/dev/null"
)
_SPIN = _UNTIL_LET_GO.format(":")


async def measured(box: Box) -> Usage:
    """As the core measures: what the backend tells, else what the agent does."""
    if (usage := await box.backend.usage(box.handle)) is not None:
        return usage
    async with agent_at(box.placement) as agent:
        return await agent.usage()


@asynccontextmanager
async def _running(box: Box, command: str) -> AsyncIterator[None]:
    async with box.agent() as agent:
        await agent.background(command)
        yield
        (await agent.run("touch let-go")).text()


async def _comes_to(box: Box, holds: Callable[[Usage], bool]) -> Usage:
    """The first measurement that is as it should be, or the last one when none is in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _PATIENCE
    while True:
        usage = await measured(box)
        if holds(usage) or loop.time() > end:
            return usage
        await asyncio.sleep(0.5)


async def test_usage_is_whole_and_possible(box: Box) -> None:
    usage = await box.backend.usage(box.handle)
    if usage is None:
        pytest.skip("the agent measures")
    assert isinstance(usage, Usage)
    assert usage.cpu_count >= 1
    assert 0 <= usage.cpu_used_pct <= 100
    assert 0 < usage.mem_used <= usage.mem_total
    assert 0 <= usage.mem_cache <= usage.mem_total
    # 0 of 0: nobody knows.
    assert 0 <= usage.disk_used <= usage.disk_total


def _needs_own_figures(backend: Backend) -> None:
    if AgentFeature.USAGE in backend.lacks:
        pytest.skip("its figures are the machine's")


async def test_totals_are_the_limits_of_the_sandbox(deployment: Deployment, backend: Backend) -> None:
    _needs_own_figures(backend)
    template = await deployment.limited(backend, cpu_count=1, memory_mb=256)
    async with made(deployment, backend, template=template) as box:
        usage = await measured(box)
    assert usage.cpu_count == 1
    assert usage.mem_total == 256 * 2**20


async def test_memory_that_is_held_is_told_and_no_longer_when_it_is_let_go(
    deployment: Deployment, backend: Backend
) -> None:
    template = await deployment.limited(backend, cpu_count=1, memory_mb=512)
    async with made(deployment, backend, template=template) as box:
        before = (await measured(box)).mem_used
        most = before + _HELD_MB * 2**20 * 3 // 4
        async with _running(box, _HOLD):
            held = await _comes_to(box, lambda usage: usage.mem_used > most)
            assert held.mem_used > most, f"{_HELD_MB} MiB are held, and the use went from {before} to {held.mem_used}"
        after = await _comes_to(box, lambda usage: usage.mem_used < most)
        assert after.mem_used < most, "memory that was let go is told as used"


async def test_processor_time_is_told_and_of_this_sandbox_alone(deployment: Deployment, backend: Backend) -> None:
    """Of two sandboxes one works and one rests."""
    _needs_own_figures(backend)
    template = await deployment.limited(backend, cpu_count=1, memory_mb=256)
    async with (
        made(deployment, backend, template=template) as busy,
        made(deployment, backend, template=template) as idle,
        _running(busy, _SPIN),
    ):
        await measured(idle)
        # What else the machine does may leave it a small part only.
        worked = await _comes_to(busy, lambda usage: usage.cpu_used_pct > 15)
        rested = await measured(idle)
    assert worked.cpu_used_pct > 15, f"a sandbox that spins is said to use {worked.cpu_used_pct} %"
    assert rested.cpu_used_pct < worked.cpu_used_pct, "a sandbox that rests is said to use as much as one that spins"


async def test_usage_of_one_that_is_gone_is_none_or_an_error_of_the_taxonomy(
    deployment: Deployment, backend: Backend
) -> None:
    async with made(deployment, backend) as box:
        await backend.usage(box.handle)
    try:
        usage = await backend.usage(box.handle)
    except SandgateError:
        return
    assert usage is None, "a sandbox that is gone is said to use something"
