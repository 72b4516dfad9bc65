"""Containers with a name that was asked for: whose they are does not hang on it, and it is one sandbox's at a time."""

from __future__ import annotations

import json

import pytest

from sandgate_errors import AlreadyExists, InvalidArgument, NotFound
from sandgate_plugin_api import Resources
from sandgate_testing.engine import docker


@pytest.fixture
def name(gateway):
    return f"asked-for-{gateway.folder.name.lower().strip('-')}"


async def test_container_has_the_name_that_was_asked_for(gateway, backend, run, name):
    placement = await gateway.create(backend, name=name)
    assert gateway.containers() == [name]
    assert await run(placement, "echo here") == (0, "here\n")
    assert await backend.locate(placement.handle) == placement
    assert docker("inspect", "-f", "{{.NetworkSettings.Networks}}", name).stdout
    address = await backend.address(placement.handle)
    networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", name).stdout)
    assert [network["IPAddress"] for network in networks.values()] == [address]


async def test_sandbox_with_a_name_is_found_after_a_restart(gateway, run, name):
    async with gateway.backend() as backend:
        placement = await gateway.create(backend, name=name)
    async with gateway.backend() as backend:
        (survivor,) = await backend.survey()
        assert survivor.handle == placement.handle
        assert survivor.sandbox_id == placement.handle["box"]
        assert await run(await backend.locate(survivor.handle), "echo here") == (0, "here\n")


async def test_name_that_is_taken_is_refused_and_its_holder_lives(gateway, backend, run, name):
    placement = await gateway.create(backend, name=name)
    second = await gateway.request(backend, name=name)
    handle = backend.reserve(second)
    with pytest.raises(AlreadyExists, match=name):
        await backend.create(second, handle)
    # What the core then does with the handle of a create that failed.
    await backend.destroy(handle)
    assert await backend.locate(handle) is None
    assert await backend.address(handle) is None
    for change in (
        backend.pause(handle, memory=True),
        backend.resume(handle),
        backend.snapshot(handle, snapshot_id="s"),
    ):
        with pytest.raises(NotFound):
            await change
    assert await run(placement, "echo still here") == (0, "still here\n")


async def test_container_of_somebody_else_keeps_its_name(gateway, backend, name):
    docker("create", "--name", name, gateway.images.debian(), "true")
    try:
        request = await gateway.request(backend, name=name)
        handle = backend.reserve(request)
        with pytest.raises(AlreadyExists):
            await backend.create(request, handle)
        await backend.destroy(handle)
        assert docker("inspect", "-f", "{{.Name}}", name).stdout == f"/{name}\n"
    finally:
        docker("rm", name)


@pytest.mark.parametrize("asked", ["a", "-a", "a/b", "a b", "é" * 3, "x" * 200, "sandgate-12345678-i1", "a\n"])
async def test_name_that_cannot_be_one_is_refused(gateway, backend, asked):
    request = await gateway.request(backend, name=asked)
    with pytest.raises(InvalidArgument, match="cannot be called"):
        backend.reserve(request)


async def test_sandbox_may_have_other_limits_than_its_template(gateway, backend, run):
    request = await gateway.request(backend)
    own = request.template.resources
    limits = Resources(cpu_count=1, memory_mb=96, disk_size_mb=own.disk_size_mb)
    template = type(request.template)(**{**vars(request.template), "resources": limits})
    placement = await gateway.create(backend, template="base")
    plain = docker("inspect", "-f", "{{.HostConfig.Memory}}", str(placement.handle["container"])).stdout
    assert plain == "0\n"
    limited = type(request)(**{**vars(request), "template": template})
    placement = await backend.create(limited, backend.reserve(limited))
    shown = docker("inspect", "-f", "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}", placement.handle["container"])
    assert shown.stdout == f"{96 * 2**20} {10**9}\n"


@pytest.mark.parametrize(("changes", "said"), [({"cpu_count": 100_000}, "CPUs"), ({"memory_mb": 1}, "MiB of memory")])
async def test_limits_that_nobody_can_keep_are_refused(gateway, backend, changes, said):
    request = await gateway.request(backend)
    resources = type(request.template.resources)(**{**vars(request.template.resources), **changes})
    template = type(request.template)(**{**vars(request.template), "resources": resources})
    wrong = type(request)(**{**vars(request), "template": template})
    with pytest.raises(InvalidArgument, match=said):
        await backend.create(wrong, backend.reserve(wrong))
    assert not gateway.containers()
