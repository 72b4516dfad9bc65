"""Making, finding and ending sandboxes on a real engine."""

import asyncio

import pytest

from sandgate_errors import DataLoss, InvalidArgument, NotFound
from sandgate_plugin_api import Egress
from sandgate_testing.engine import docker


async def test_create_gives_a_sandbox_in_which_commands_run(gateway, backend, run):
    placement = await gateway.create(backend)
    assert await run(placement, "id -un; id -u; pwd; echo $HOME") == (0, "user\n1000\n/home/user\n/home/user\n")
    assert await run(placement, "id -u", "root") == (0, "0\n")
    assert gateway.containers() == [placement.handle["container"]]


async def test_destroy_leaves_nothing_and_may_be_repeated(gateway, backend):
    placement = await gateway.create(backend)
    await backend.destroy(placement.handle)
    assert not gateway.containers()
    assert not list(gateway.runtime.iterdir())
    await backend.destroy(placement.handle)
    assert await backend.locate(placement.handle) is None


async def test_twenty_creates_at_once_all_succeed(gateway, backend, run):
    placements = await asyncio.gather(*[gateway.create(backend) for _ in range(20)])
    assert len({placement.agent.target for placement in placements}) == 20
    assert len({placement.agent.token for placement in placements}) == 20
    assert all([(await run(placement, "echo ok")) == (0, "ok\n") for placement in placements])


async def test_another_core_finds_sandboxes_that_a_dead_one_left(gateway, run):
    async with gateway.backend() as backend:
        placement = await gateway.create(backend)
    async with gateway.backend() as backend:
        assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
        found = await backend.locate(placement.handle)
        assert found == placement
        assert await run(found, "echo still here") == (0, "still here\n")


@pytest.mark.parametrize("delay", [0, 0.02, 0.1, 0.2, 0.4])
async def test_cancelled_create_leaves_no_container(gateway, backend, delay):
    task = asyncio.create_task(gateway.create(backend))
    done, _ = await asyncio.wait({task}, timeout=delay)
    if done:
        # An engine on an idle machine may be done by the last of these moments.
        await backend.destroy(task.result().handle)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not gateway.containers()
    assert not list(gateway.runtime.iterdir())


async def test_what_a_killed_gateway_had_in_hand_is_removed_at_the_next_start(gateway):
    """Containers that are there to look into an image, and the bundle of an earlier version on the engine's host."""
    image = gateway.images.busybox()
    async with gateway.backend():
        pass
    helper = docker("create", "--label", f"sandgate.helper={gateway.id}", image, "/never-started").stdout.strip()
    volumes = [f"sandgate-{gateway.id}-{name}" for name in ("old", "used")]
    for volume in volumes:
        docker("volume", "create", "--label", f"sandgate.gateway={gateway.id}", volume)
    user = docker("create", "-v", f"{volumes[1]}:/bundle", image, "/never-started").stdout.strip()
    try:
        async with gateway.backend():
            assert helper not in docker("ps", "-aq", "--no-trunc").stdout
            left = docker("volume", "ls", "-q", "--filter", f"label=sandgate.gateway={gateway.id}").stdout.split()
            assert left == [volumes[1]]
    finally:
        docker("rm", "-f", helper, user, check=False)
        docker("volume", "rm", "-f", *volumes, check=False)


async def test_container_removed_behind_our_back_is_gone_and_can_be_destroyed(gateway, backend):
    placement = await gateway.create(backend)
    docker("rm", "-f", str(placement.handle["container"]))
    assert await backend.locate(placement.handle) is None
    with pytest.raises(NotFound):
        await backend.pause(placement.handle, memory=True)
    await backend.destroy(placement.handle)
    assert not list(gateway.runtime.iterdir())


async def test_unknown_template_is_refused_by_name(gateway, backend):
    assert await backend.find_template("nothing") is None
    request = await gateway.request(backend)
    from dataclasses import replace

    with pytest.raises(InvalidArgument, match="'nothing'"):
        await backend.create(
            replace(request, template=replace(request.template, id="nothing")), backend.reserve(request)
        )


async def test_pause_with_memory_stops_and_goes_on(gateway, backend, run):
    placement = await gateway.create(backend)
    await run(placement, "sh -c 'while :; do date +%s%N > /tmp/t; sleep 0.05; done' >/dev/null 2>&1 &")
    handle = await backend.pause(placement.handle, memory=True)
    assert await backend.pause(handle, memory=True) == handle
    assert docker("inspect", "-f", "{{.State.Paused}}", str(handle["container"])).stdout == "true\n"
    resumed = await backend.resume(handle)
    assert resumed == placement
    assert await backend.resume(resumed.handle) == placement
    first = await run(placement, "cat /tmp/t")
    await asyncio.sleep(0.3)
    assert await run(placement, "cat /tmp/t") != first


@pytest.mark.parametrize("first_with_memory", [False, True])
async def test_pause_without_memory_keeps_files_and_ends_processes(gateway, backend, run, first_with_memory):
    placement = await gateway.create(backend)
    await run(placement, "echo kept > f; sleep 1000 >/dev/null 2>&1 &")
    handle = placement.handle
    if first_with_memory:
        handle = await backend.pause(handle, memory=True)
    handle = await backend.pause(handle, memory=False)
    assert await backend.pause(handle, memory=False) == handle
    with pytest.raises(DataLoss):
        await backend.pause(handle, memory=True)
    resumed = await backend.resume(handle)
    assert resumed == placement
    assert await run(resumed, "cat /home/user/f; pgrep -c sleep", "user") == (1, "kept\n0\n")


async def test_memory_that_an_engine_restart_took_is_told_apart_from_files(gateway, backend, run):
    placement = await gateway.create(backend)
    await run(placement, "echo kept > f")
    handle = await backend.pause(placement.handle, memory=True)
    # What a restart of the engine without live-restore does to it.
    docker("kill", str(handle["container"]))
    with pytest.raises(DataLoss):
        await backend.resume(handle)
    # By which the core finishes whatever did not come to its end: the files are not to be lost for that.
    assert await backend.pause(handle, memory=True) == handle
    handle = await backend.pause(handle, memory=False)
    resumed = await backend.resume(handle)
    assert await run(resumed, "cat /home/user/f", "user") == (0, "kept\n")


async def test_snapshot_starts_others_from_the_files_of_a_moment(gateway, backend, run):
    placement = await gateway.create(backend)
    await run(placement, "echo one > f")
    snapshot = await backend.snapshot(placement.handle, snapshot_id="s1")
    await run(placement, "echo two > f")
    await backend.destroy(placement.handle)
    copies = [await gateway.create(backend, snapshot=snapshot) for _ in range(2)]
    assert [await run(copy, "cat f; id -u") for copy in copies] == [(0, "one\n1000\n")] * 2
    second = await backend.snapshot(copies[0].handle, snapshot_id="s2")
    # Given up while a sandbox uses it: that one goes on.
    await backend.delete_snapshot(snapshot)
    await backend.delete_snapshot(snapshot)
    assert await run(copies[1], "cat f") == (0, "one\n")
    with pytest.raises(NotFound):
        await gateway.create(backend, snapshot=snapshot)
    again = await gateway.create(backend, snapshot=second)
    assert await run(again, "cat f") == (0, "one\n")
    # What the core knows of one that it died over.
    await backend.delete_snapshot({"snapshot_id": "s2"})


async def test_snapshot_that_a_crash_cut_off_goes_also_when_the_engine_ends_it_later(gateway, backend, monkeypatch):
    monkeypatch.setattr("sandgate_plugin_docker.fleet._STRAY_INTERVAL", 0.1)
    await backend.delete_snapshot({"snapshot_id": "late"})
    image = f"sandgate-{gateway.id}/snapshots:late"
    docker("tag", gateway.images.busybox(), image)
    for _ in range(300):
        if not docker("images", "-q", image).stdout:
            break
        await asyncio.sleep(0.1)
    assert not docker("images", "-q", image).stdout
    assert docker("images", "-q", gateway.images.busybox()).stdout


async def test_no_internet_access_means_no_network_at_all(gateway, backend, run):
    placement = await gateway.create(backend, allow_internet_access=False, egress=Egress(internet=False))
    assert await run(placement, "ls /sys/class/net") == (0, "lo\n")
    handle = await backend.pause(placement.handle, memory=False)
    resumed = await backend.resume(handle)
    assert await run(resumed, "ls /sys/class/net", "user") == (0, "lo\n")


async def test_usage_is_of_the_container_alone(gateway, run):
    templates = {"base": {"image": gateway.images.debian(), "memory_mb": 256, "cpu_count": 1}}
    async with gateway.backend(templates=templates) as backend:
        placement = await gateway.create(backend)
        usage = await backend.usage(placement.handle)
        assert usage is not None
        assert usage.mem_total == 256 * 2**20
        assert 0 < usage.mem_used < 256 * 2**20
        assert 0 <= usage.cpu_used_pct <= 100
        assert 0 < usage.disk_used < usage.disk_total
        await backend.destroy(placement.handle)
        assert await backend.usage(placement.handle) is None


async def test_sandbox_of_a_template_that_is_gone_still_starts_anew(gateway, run):
    image = gateway.images.debian("USER 2345")
    async with gateway.backend(templates={"old": {"image": image}}) as backend:
        placement = await gateway.create(backend, "old")
        assert await run(placement, "id -u; touch f") == (0, "2345\n")
        handle = await backend.pause(placement.handle, memory=False)
    async with gateway.backend() as backend:
        placement = await backend.resume(handle)
        assert await run(placement, "id -u; ls", "user") == (0, "2345\nf\n")


async def test_container_that_somebody_starts_from_a_snapshot_is_not_ours(gateway, backend):
    placement = await gateway.create(backend)
    snapshot = await backend.snapshot(placement.handle, snapshot_id="s1")
    name = f"sgt-{gateway.id}"
    docker("create", "--name", name, "--entrypoint", "/bin/true", str(snapshot["image"]))
    try:
        assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
    finally:
        docker("rm", "-f", name)
        await backend.delete_snapshot(snapshot)


async def test_resume_that_a_crash_cut_off_is_made_good_by_the_next(gateway, backend, run):
    placement = await gateway.create(backend)
    await run(placement, "touch f")
    handle = await backend.pause(placement.handle, memory=False)
    # The container runs, its first program waits for somebody who is gone.
    docker("start", str(handle["container"]))
    again = await backend.resume(handle)
    assert await run(again, "ls", "user") == (0, "f\n")
    # Now it is up, and a repeat changes nothing.
    await run(again, "sleep 1000 >/dev/null 2>&1 &", "user")
    assert await backend.resume(handle) == again
    assert await run(again, "pgrep -c sleep", "user") == (0, "1\n")
