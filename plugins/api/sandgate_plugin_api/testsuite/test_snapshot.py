"""Copies of a sandbox's files: what is claimed works, what is not is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from sandgate_errors import CapabilityMissing, NotFound, SandgateError
from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.testsuite.box import Box, made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_CANCELLED = 4


def _needs_snapshots(backend: Backend) -> None:
    if Capability.SNAPSHOT not in backend.capabilities:
        pytest.skip(f"backend '{backend.name}' does not claim {Capability.SNAPSHOT.value}")


async def test_snapshot_that_is_not_claimed_is_refused(box: Box) -> None:
    if Capability.SNAPSHOT in box.backend.capabilities:
        pytest.skip("it claims snapshots")
    with pytest.raises(CapabilityMissing, match=box.backend.name):
        await box.backend.snapshot(box.handle, snapshot_id="s1")
    with pytest.raises(CapabilityMissing, match=box.backend.name):
        await box.backend.delete_snapshot({"snapshot": "s1"})


async def test_sandbox_made_from_a_snapshot_has_its_files_and_a_life_of_its_own(
    deployment: Deployment, backend: Backend
) -> None:
    _needs_snapshots(backend)
    async with made(deployment, backend) as box:
        (await box.run("echo before > mark")).text()
        snapshot = await backend.snapshot(box.handle, snapshot_id=deployment.new_id())
        assert json.loads(json.dumps(dict(snapshot))) == dict(snapshot)
        try:
            # The sandbox goes on, and what it does from now on is not in the copy.
            assert (await box.run("cat mark; echo after > mark")).text() == "before"
            async with made(deployment, backend, snapshot=snapshot) as copy:
                assert (await copy.run("cat mark")).text() == "before"
                await backend.destroy(box.handle)
                await backend.delete_snapshot(snapshot)
                assert (await copy.run("cat mark; echo other > mark; cat mark")).text() == "before\nother"
        finally:
            await backend.delete_snapshot(snapshot)


async def test_snapshot_outlives_its_sandbox_and_the_gateway(deployment: Deployment) -> None:
    async with deployment.backend() as before:
        _needs_snapshots(before)
        async with made(deployment, before) as box:
            (await box.run("echo kept > mark")).text()
            snapshot = dict(await before.snapshot(box.handle, snapshot_id=deployment.new_id()))
    snapshot = json.loads(json.dumps(snapshot))
    async with deployment.backend() as after:
        try:
            assert list(await after.survey()) == [], "a snapshot is no sandbox"
            async with made(deployment, after, snapshot=snapshot) as copy:
                assert (await copy.run("cat mark")).text() == "kept"
        finally:
            await after.delete_snapshot(snapshot)


async def test_deleting_a_snapshot_may_be_repeated(box: Box, deployment: Deployment) -> None:
    _needs_snapshots(box.backend)
    snapshot = await box.backend.snapshot(box.handle, snapshot_id=deployment.new_id())
    await box.backend.delete_snapshot(snapshot)
    await box.backend.delete_snapshot(snapshot)


async def test_snapshot_is_given_up_by_its_id_alone(deployment: Deployment, backend: Backend) -> None:
    """What the core knows of one that it died over: never the handle."""
    _needs_snapshots(backend)
    await backend.delete_snapshot({"snapshot_id": deployment.new_id()})
    async with made(deployment, backend) as box:
        snapshot_id = deployment.new_id()
        snapshot = await backend.snapshot(box.handle, snapshot_id=snapshot_id)
        await backend.delete_snapshot({"snapshot_id": snapshot_id})
        with pytest.raises(NotFound):
            async with made(deployment, backend, snapshot=snapshot):
                pass


async def test_snapshot_of_one_that_is_gone_is_not_found(deployment: Deployment, backend: Backend) -> None:
    _needs_snapshots(backend)
    async with made(deployment, backend) as box:
        handle = box.handle
    with pytest.raises(NotFound):
        await backend.snapshot(handle, snapshot_id=deployment.new_id())


async def test_processes_go_on_over_a_snapshot(box: Box, deployment: Deployment) -> None:
    _needs_snapshots(box.backend)
    async with box.agent() as agent:
        await agent.background("echo $$ > pid; exec sleep 600")
        (await agent.run('until grep -q sleep "/proc/$(cat pid)/cmdline"; do sleep 0.05; done 2>/dev/null')).text()
    snapshot = await box.backend.snapshot(box.handle, snapshot_id=deployment.new_id())
    await box.backend.delete_snapshot(snapshot)
    # Another sandbox on its files may have a process of that number.
    assert (await box.run("tr '\\0' ' ' < /proc/$(cat pid)/cmdline")).text() == "sleep 600"


async def test_cancelled_snapshot_keeps_nothing_and_leaves_the_sandbox_as_it_was(
    box: Box, deployment: Deployment
) -> None:
    _needs_snapshots(box.backend)
    (await box.run("head -c 8m /dev/urandom > some")).text()
    for number in range(_CANCELLED):
        snapshot_id = deployment.new_id()
        keeping = asyncio.create_task(box.backend.snapshot(box.handle, snapshot_id=snapshot_id))
        await asyncio.sleep(0.02 * number)
        keeping.cancel()
        await asyncio.wait({keeping}, timeout=60)
        assert keeping.done(), "snapshot() does not end when it is cancelled"
        if not keeping.cancelled() and keeping.exception() is None:
            await box.backend.delete_snapshot(keeping.result())
        else:
            # Nothing is kept, so a create from what was asked for finds nothing.
            with pytest.raises(SandgateError):
                async with made(deployment, box.backend, snapshot={"snapshot_id": snapshot_id}):
                    pass
        assert (await box.run("echo works")).text() == "works"
