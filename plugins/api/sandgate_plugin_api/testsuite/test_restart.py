"""A gateway that ends and starts again: what it remembers it finds, what it does not remember it learns of."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import pytest

from sandgate_plugin_api.records import SandboxRequest
from sandgate_plugin_api.testsuite.box import Box, made, request_for
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_CRASHES = 4


async def test_sandbox_is_adopted_with_all_that_runs_in_it(deployment: Deployment) -> None:
    async with deployment.backend() as before:
        request = await request_for(deployment, before)
        box = Box(backend=before, request=request, placement=await before.create(request, before.reserve(request)))
        async with box.agent() as agent:
            await agent.init(request.sandbox_id)
            await agent.background("echo $$ > pid; exec sleep 600")
            await _written(box, "pid")
    # As it comes out of the store.
    handle = json.loads(json.dumps(dict(box.handle)))
    async with deployment.backend() as after:
        try:
            found = await after.locate(handle)
            assert found is not None, "locate() does not find a sandbox that outlived the gateway"
            assert [survivor.sandbox_id for survivor in await after.survey()] == [request.sandbox_id]
            moved = box.moved(found)
            assert (await moved.run('kill -0 "$(cat pid)" && echo alive')).text() == "alive"
            assert await after.locate(handle) == found, "locate() may be repeated"
        finally:
            await after.destroy(handle)


async def _written(box: Box, name: str) -> None:
    for _ in range(100):
        if (await box.run(f"test -s {name}")).exit_code == 0:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"a command in the background did not write '{name}'")


async def test_sandbox_that_nobody_remembers_is_found_and_can_be_destroyed(deployment: Deployment) -> None:
    async with deployment.backend() as before:
        request = await request_for(deployment, before)
        await before.create(request, before.reserve(request))
    async with deployment.backend() as after:
        (survivor,) = await after.survey()
        assert survivor.sandbox_id == request.sandbox_id
        await after.destroy(json.loads(json.dumps(dict(survivor.handle))))
        assert list(await after.survey()) == []


async def test_sandbox_that_is_not_bound_to_its_host_is_found_from_another(deployment: Deployment) -> None:
    """``host_bound`` False: another core takes over with its settings and the stored handle, and nothing else."""
    async with deployment.backend() as one:
        if one.host_bound:
            pytest.skip("its sandboxes are bound to their host")
        async with made(deployment, one) as box, deployment.elsewhere() as other:
            assert other.host_bound is False
            (await box.run("echo kept > kept")).text()
            found = await other.locate(json.loads(json.dumps(dict(box.handle))))
            assert found is not None, "host_bound is False, and another core does not find the sandbox"
            assert (await box.moved(found).run("cat kept")).text() == "kept"
            assert [survivor.sandbox_id for survivor in await other.survey()] == [box.request.sandbox_id]
            await other.destroy(found.handle)
            assert await one.locate(box.handle) is None


async def test_destroyed_sandbox_does_not_come_back(deployment: Deployment) -> None:
    async with deployment.backend() as before, made(deployment, before) as box:
        handle = dict(box.handle)
    async with deployment.backend() as after:
        assert await after.locate(handle) is None
        assert list(await after.survey()) == []


async def test_gateway_killed_in_the_middle_of_a_create_leaves_what_can_be_cleared(deployment: Deployment) -> None:
    """SIGKILL at moments spread over a create: what is half made is surveyed or found by the reserved handle."""
    async with deployment.backend() as backend:
        template = await deployment.template(backend)
        started = time.monotonic()
        async with made(deployment, backend, init=False):
            usual = time.monotonic() - started
    moments = random.Random(backend.name)  # noqa: S311 - the same moments in each run
    for _ in range(_CRASHES):
        sandbox_id = deployment.new_id()
        order: dict[str, object] = {
            "backend": deployment.options.backend,
            "state_dir": str(deployment.state_dir),
            "runtime_dir": str(deployment.runtime_dir),
            "settings": deployment.options.settings,
            "template": template.id,
            "sandbox_id": sandbox_id,
        }
        await _crash(order, after=moments.uniform(0, 1.2 * usual))
        async with deployment.backend() as backend:
            reserved = backend.reserve(SandboxRequest(sandbox_id=sandbox_id, template=template))
            for survivor in await backend.survey():
                await backend.destroy(survivor.handle)
            await backend.destroy(reserved)
            assert await backend.locate(reserved) is None
            assert list(await backend.survey()) == []


async def _crash(order: dict[str, object], *, after: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sandgate_plugin_api.testsuite.crash",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        word = await asyncio.wait_for(process.stdout.readline(), 90)
        if word != b"creating\n":
            pytest.fail(f"a second gateway's backend did not open: {(await process.stderr.read()).decode()[-2000:]}")
        await asyncio.sleep(after)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
