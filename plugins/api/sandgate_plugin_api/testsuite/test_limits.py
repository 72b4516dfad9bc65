"""``Template.resources``, also those that policy has made others than the template's: enforced where that is claimed."""

from __future__ import annotations

import pytest

from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.testsuite.box import Box, made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_MEMORY_MB = 256


_TWICE = f"head -c {3 * _MEMORY_MB}m /dev/zero | tail -c {2 * _MEMORY_MB}m | wc -c"


async def _is_limited(box: Box) -> None:
    # `tail` keeps a line until it ends, and this one does not.
    done = await box.run(_TWICE)
    assert done.stdout.strip() != str(2 * _MEMORY_MB * 2**20), "twice the memory limit was held in memory"
    assert (await box.run("echo works")).text() == "works"


async def test_memory_beyond_the_limit_is_not_given_and_the_agent_lives(
    deployment: Deployment, backend: Backend
) -> None:
    template = await deployment.limited(backend, cpu_count=1, memory_mb=_MEMORY_MB)
    async with made(deployment, backend, template=template) as box:
        await _is_limited(box)


@pytest.mark.parametrize(
    ("memory", "capability"), [(True, Capability.PAUSE), (False, Capability.PAUSE_FILESYSTEM)], ids=["memory", "files"]
)
async def test_limits_hold_over_a_pause(
    deployment: Deployment, backend: Backend, memory: bool, capability: Capability
) -> None:
    """Also where a resume makes another box of the files: limits of the create, not of the template as it is."""
    template = await deployment.limited(backend, cpu_count=1, memory_mb=_MEMORY_MB)
    if capability not in backend.capabilities:
        pytest.skip(f"it does not claim {capability.value}")
    async with made(deployment, backend, template=template) as box:
        resumed = box.moved(await backend.resume(await backend.pause(box.handle, memory=memory)))
        async with resumed.agent() as agent:
            await agent.init(box.request.sandbox_id)
        await _is_limited(resumed)


async def test_limits_hold_for_what_is_made_from_a_snapshot(deployment: Deployment, backend: Backend) -> None:
    """Those of the request, whatever the sandbox had that was copied."""
    template = await deployment.limited(backend, cpu_count=1, memory_mb=_MEMORY_MB)
    if Capability.SNAPSHOT not in backend.capabilities:
        pytest.skip(f"it does not claim {Capability.SNAPSHOT.value}")
    async with made(deployment, backend) as box:
        snapshot = await backend.snapshot(box.handle, snapshot_id=deployment.new_id())
    try:
        async with made(deployment, backend, template=template, snapshot=snapshot) as copy:
            await _is_limited(copy)
    finally:
        await backend.delete_snapshot(snapshot)


async def test_memory_below_the_limit_is_given(deployment: Deployment, backend: Backend) -> None:
    template = await deployment.limited(backend, cpu_count=1, memory_mb=_MEMORY_MB)
    async with made(deployment, backend, template=template) as box:
        done = await box.run(f"head -c {_MEMORY_MB // 4}m /dev/zero | tail -c {_MEMORY_MB // 8}m | wc -c")
        assert done.text() == str(_MEMORY_MB // 8 * 2**20)


async def test_processors_beyond_the_limit_are_not_given(deployment: Deployment, backend: Backend) -> None:
    """Two programs that want a processor each get one between them."""
    template = await deployment.limited(backend, cpu_count=1, memory_mb=_MEMORY_MB)
    spin = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done"
    async with made(deployment, backend, template=template) as box:
        done = await box.run(f"time -p sh -c '{spin} & {spin} & wait' 2>&1")
        if done.exit_code == 127:
            pytest.skip("the template cannot measure time")
        times = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
        used, passed = float(times["user"]) + float(times["sys"]), float(times["real"])
        assert used <= 1.35 * passed, f"{used:g} s of processor time in {passed:g} s with one processor"
