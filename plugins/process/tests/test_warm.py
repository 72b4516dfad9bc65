"""Sandboxes made ahead."""

import asyncio
import json
import os
import signal

import pytest


async def filled(gateway, size: int) -> list[str]:
    """The names of the boxes made ahead, once there are ``size`` with a socket."""
    for _ in range(400):
        names = sorted(path.parent.name for path in gateway.runtime.glob("w*/agent.sock"))
        if len(names) >= size:
            return names
        await asyncio.sleep(0.05)
    pytest.fail("the pool was not filled")


async def test_create_takes_a_warm_one_and_another_is_made(gateway, run):
    async with gateway.backend(warm=1) as backend:
        (first,) = await filled(gateway, 1)
        # Nobody's yet: the core must not take it for a stray.
        assert not await backend.survey()
        placement = await gateway.create(backend)
        assert placement.handle == {"box": first}
        assert await run(placement, "echo warm") == (0, "warm\n")
        assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
        await filled(gateway, 2)
    # The claimed one stays, the spare one ends with its backend.
    assert [path.name for path in (gateway.state / "boxes").iterdir()] == [first]


async def test_dead_warm_one_is_not_given_away(gateway, run):
    async with gateway.backend(warm=1) as backend:
        (name,) = await filled(gateway, 1)
        record = json.loads((gateway.state / "boxes" / name / "record.json").read_text())
        os.kill((record["init"] or record["main"])["pid"], signal.SIGKILL)
        await asyncio.sleep(0.2)
        placement = await gateway.create(backend)
        assert placement.handle != {"box": name}
        assert await run(placement, "echo whole") == (0, "whole\n")
        assert not (gateway.state / "boxes" / name).exists()


async def test_sandbox_without_internet_is_never_a_warm_one(gateway):
    if gateway.isolation == "none":
        pytest.skip("without isolation there are none without internet")
    async with gateway.backend(warm=1) as backend:
        await filled(gateway, 1)
        placement = await gateway.create(backend, allow_internet_access=False)
        assert str(placement.handle["box"]).startswith("i")


async def test_concurrent_creates_share_no_sandbox(gateway):
    async with gateway.backend(warm=2) as backend:
        await filled(gateway, 2)
        placements = await asyncio.gather(*[gateway.create(backend) for _ in range(4)])
        assert len({placement.agent.target for placement in placements}) == 4
        assert len({placement.agent.token for placement in placements}) == 4


async def test_cancelled_claim_leaves_nothing(gateway):
    async with gateway.backend(warm=1) as backend:
        await filled(gateway, 1)
        task = asyncio.create_task(gateway.create(backend))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await backend.survey()
