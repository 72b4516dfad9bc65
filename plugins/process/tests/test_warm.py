"""Sandboxes made ahead."""

import asyncio
import json
import os
import signal

import pytest

from sandgate_plugin_process.pids import ProcessId


async def filled(backend, size: int) -> list[str]:
    """The names of the boxes made ahead, once there are ``size`` to be given away."""
    ready = backend._warm._ready
    async with asyncio.timeout(60):
        while len(ready) < size:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.05)
    return [box.name for box in ready]


async def test_create_takes_a_warm_one_and_another_is_made(gateway, run):
    async with gateway.backend(warm=1) as backend:
        (first,) = await filled(backend, 1)
        # Nobody's yet: the core must not take it for a stray.
        assert not await backend.survey()
        placement = await gateway.create(backend)
        assert placement.handle == {"box": first}
        assert await run(placement, "echo warm") == (0, "warm\n")
        assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
        assert await filled(backend, 1) != [first]
    # The claimed one stays, the spare one ends with its backend.
    assert [path.name for path in (gateway.state / "boxes").iterdir()] == [first]


async def test_dead_warm_one_is_not_given_away(gateway, run):
    async with gateway.backend(warm=1) as backend:
        (name,) = await filled(backend, 1)
        record = json.loads((gateway.state / "boxes" / name / "record.json").read_text())
        pid = (record["init"] or record["main"])["pid"]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while ProcessId.of(pid) is not None:  # noqa: ASYNC110 - it is no child of this process
                await asyncio.sleep(0.01)
        placement = await gateway.create(backend)
        assert placement.handle != {"box": name}
        assert await run(placement, "echo whole") == (0, "whole\n")
        assert not (gateway.state / "boxes" / name).exists()


async def test_sandbox_without_internet_is_never_a_warm_one(gateway):
    if gateway.isolation == "none":
        pytest.skip("without isolation there are none without internet")
    async with gateway.backend(warm=1) as backend:
        await filled(backend, 1)
        placement = await gateway.create(backend, allow_internet_access=False)
        assert str(placement.handle["box"]).startswith("i")


async def test_concurrent_creates_share_no_sandbox(gateway):
    async with gateway.backend(warm=2) as backend:
        await filled(backend, 2)
        placements = await asyncio.gather(*[gateway.create(backend) for _ in range(4)])
        assert len({placement.agent.target for placement in placements}) == 4
        assert len({placement.agent.token for placement in placements}) == 4


async def test_cancelled_claim_leaves_nothing(gateway):
    async with gateway.backend(warm=1) as backend:
        await filled(backend, 1)
        task = asyncio.create_task(gateway.create(backend))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await backend.survey()
