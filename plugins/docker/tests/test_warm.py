"""Sandboxes made ahead."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from sandgate_testing.engine import docker
from sandgate_testing.gateway import wait_until


@pytest.fixture
def warm(gateway):
    def warm(size: int, **settings: object):
        return gateway.backend(templates={"base": {"image": gateway.images.debian(), "warm": size, **settings}})

    return warm


async def filled(backend, size: int) -> list[str]:
    """Names of the containers made ahead, once there are ``size`` that are up."""
    for _ in range(1200):
        ready = backend._pools["base"]._ready
        if len(ready) >= size:
            return [spare.container for spare in ready]
        await asyncio.sleep(0.05)
    pytest.fail("the pool was not filled")


async def test_create_takes_a_warm_one_and_another_is_made(gateway, warm, run):
    async with warm(1) as backend:
        await filled(backend, 1)
        # Nobody's yet: the core must not take it for a stray.
        assert not await backend.survey()
        request = await gateway.request(backend)
        reserved = backend.reserve(request)
        placement = await gateway.create(backend)
        assert str(placement.handle["box"]).startswith("w")
        assert await run(placement, "echo warm") == (0, "warm\n")
        assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
        await filled(backend, 1)
        assert reserved["container"] != placement.handle["container"]
    # The claimed one stays, the spare one ends with its backend.
    assert gateway.containers() == [placement.handle["container"]]


async def test_claimed_one_is_found_by_the_handle_that_was_reserved(gateway, warm):
    """As after a crash right after the claim, before the core could store what create returned."""
    async with warm(1) as backend:
        await filled(backend, 1)
        request = await gateway.request(backend)
        reserved = backend.reserve(request)
        placement = await backend.create(request, reserved)
        assert reserved != placement.handle
        assert await backend.locate(reserved) == placement
        await backend.destroy(reserved)
        assert not [name for name in gateway.containers() if request.sandbox_id in name]
        assert not (gateway.runtime / str(placement.handle["box"])).exists()


async def test_dead_warm_one_is_not_given_away(gateway, warm, run):
    async with warm(1) as backend:
        (name,) = await filled(backend, 1)
        docker("kill", name)
        placement = await gateway.create(backend)
        assert await run(placement, "echo whole") == (0, "whole\n")
        assert name not in gateway.containers()


@pytest.mark.parametrize("agents", ["socket", "port"])
async def test_one_that_died_a_moment_ago_is_not_given_away(gateway, run, agents):
    """Not even the engine has heard of it."""
    templates = {"base": {"image": gateway.images.debian(), "warm": 1}}
    async with gateway.backend(templates=templates, agents=agents) as backend:
        (name,) = await filled(backend, 1)
        agent = Path("/proc", docker("inspect", "-f", "{{.State.Pid}}", name).stdout.strip(), "stat")
        os.kill(int(agent.parent.name), signal.SIGKILL)
        # The signal is on its way at first.
        wait_until(lambda: not agent.exists() or ") Z" in agent.read_text())
        placement = await gateway.create(backend)
        assert await run(placement, "echo whole") == (0, "whole\n")
        assert name not in gateway.containers()


async def test_spare_ones_of_a_core_that_died_end_at_the_next_start(gateway, warm):
    async with warm(1) as backend:
        (name,) = await filled(backend, 1)
        # What a crash leaves.
        backend._pools["base"]._ready.clear()
        backend._pools["base"]._size = 0
    assert name in gateway.containers()
    async with gateway.backend():
        assert name not in gateway.containers()


async def test_spare_ones_of_another_image_are_not_given_away(gateway, warm, run):
    image = gateway.images.busybox("ENV OLD=1")
    docker("tag", image, f"sgt-moving:{gateway.folder.name.lower()}")
    moving = f"sgt-moving:{gateway.folder.name.lower()}"
    try:
        async with gateway.backend(templates={"base": {"image": moving, "warm": 1}}) as backend:
            (old,) = await filled(backend, 1)
            docker("tag", gateway.images.busybox("ENV NEW=1"), moving)
            backend._images.forget(moving)
            placement = await gateway.create(backend)
            assert await run(placement, "echo $NEW$OLD", shell="/bin/sh") == (0, "1\n")
            assert "NEW" in (await backend.find_template("base")).envs
            await filled(backend, 1)
            assert old not in gateway.containers()
    finally:
        docker("rmi", "-f", moving, check=False)


async def test_concurrent_creates_share_no_sandbox(gateway, warm):
    async with warm(2) as backend:
        await filled(backend, 2)
        placements = await asyncio.gather(*[gateway.create(backend) for _ in range(4)])
        assert len({placement.agent.target for placement in placements}) == 4


@pytest.mark.parametrize("steps", [1, 3, 6])
async def test_cancelled_claim_leaves_nothing(gateway, warm, steps):
    async with warm(1) as backend:
        await filled(backend, 1)
        request = await gateway.request(backend)
        task = asyncio.create_task(backend.create(request, backend.reserve(request)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await backend.survey()
