"""``Template.resources``: enforced where that is claimed."""

from __future__ import annotations

import dataclasses

import pytest

from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.records import Resources
from sandgate_plugin_api.testsuite.box import made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_MEMORY_MB = 256


async def _limited(deployment: Deployment, backend: Backend, *, cpu_count: int) -> object:
    if Capability.LIMITS not in backend.capabilities:
        pytest.skip(f"backend '{backend.name}' does not claim {Capability.LIMITS.value}")
    template = await deployment.template(backend)
    resources = Resources(cpu_count=cpu_count, memory_mb=_MEMORY_MB, disk_size_mb=template.resources.disk_size_mb)
    return dataclasses.replace(template, resources=resources)


async def test_memory_beyond_the_limit_is_not_given_and_the_agent_lives(
    deployment: Deployment, backend: Backend
) -> None:
    template = await _limited(deployment, backend, cpu_count=1)
    async with made(deployment, backend, template=template) as box:
        # `tail` keeps a line until it ends, and this one does not.
        done = await box.run(f"head -c {3 * _MEMORY_MB}m /dev/zero | tail -c {2 * _MEMORY_MB}m | wc -c")
        assert done.stdout.strip() != str(2 * _MEMORY_MB * 2**20), "twice the memory limit was held in memory"
        assert (await box.run("echo works")).text() == "works"


async def test_memory_below_the_limit_is_given(deployment: Deployment, backend: Backend) -> None:
    template = await _limited(deployment, backend, cpu_count=1)
    async with made(deployment, backend, template=template) as box:
        done = await box.run(f"head -c {_MEMORY_MB // 4}m /dev/zero | tail -c {_MEMORY_MB // 8}m | wc -c")
        assert done.text() == str(_MEMORY_MB // 8 * 2**20)


async def test_processors_beyond_the_limit_are_not_given(deployment: Deployment, backend: Backend) -> None:
    """Two programs that want a processor each get one between them."""
    template = await _limited(deployment, backend, cpu_count=1)
    spin = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done"
    async with made(deployment, backend, template=template) as box:
        done = await box.run(f"time -p sh -c '{spin} & {spin} & wait' 2>&1")
        if done.exit_code == 127:
            pytest.skip("the template cannot measure time")
        times = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
        used, passed = float(times["user"]) + float(times["sys"]), float(times["real"])
        assert used <= 1.35 * passed, f"{used:g} s of processor time in {passed:g} s with one processor"
