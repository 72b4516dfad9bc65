"""Pausing with memory, by each way that can stop a box, and without it (behaviour.md C39, C40, C47; T11 is the agent's)."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from sandgate_errors import DataLoss, NotFound, SandgateError, Unavailable
from sandgate_plugin_process import backend as backend_module
from sandgate_plugin_process import rootfs, standstill
from sandgate_plugin_process.boxes import Record, Shelf
from sandgate_plugin_process.bubblewrap import Bubblewrap
from sandgate_plugin_process.freezing import possible_groups
from sandgate_plugin_process.pids import is_stopped

COUNTER = "(setsid bash -c 'echo $$ > pid; while sleep 0.01; do echo x >> counter; done' >/dev/null 2>&1 </dev/null &); until [ -s counter ]; do sleep 0.01; done"
ALIVE = "until [ -s pid ]; do sleep 0.01; done; kill -0 $(cat pid) && echo alive"


def record_of(gateway, handle) -> Record:
    record = Shelf(state=gateway.state, runtime=gateway.runtime).box(handle["box"]).read()
    assert record is not None
    return record


def members_of(backend, gateway, handle) -> list:
    record = record_of(gateway, handle)
    return backend._isolations[record.isolation].members(record)


def works(group) -> bool:
    try:
        group.make()
        group.remove()
    except OSError:
        return False
    return True


def kind_of(group) -> str:
    return "v1" if "freezer" in group.path.parts else "v2"


@pytest.fixture(params=["v2", "v1", "signals"])
def way(request, monkeypatch) -> str:
    """What stops a box: one kind of control group, or signals where there is none."""
    usable = [group for group in possible_groups("sandgate-probe") if kind_of(group) == request.param]
    if request.param != "signals" and not any(map(works, usable)):
        pytest.skip(f"no control groups of {request.param} can be made here")

    def only(name):
        return (group for group in possible_groups(name) if kind_of(group) == request.param)

    monkeypatch.setattr(standstill, "possible_groups", only)
    return request.param


async def test_paused_processes_run_no_instruction_and_go_on_where_they_were(gateway, backend, run, way):
    placement = await gateway.create(backend)
    await run(placement, COUNTER)
    identity = f"{ALIVE}; cat pid /proc/sys/kernel/random/boot_id"
    _, before = await run(placement, identity)
    handle = await backend.pause(placement.handle, memory=True)
    stopped = members_of(backend, gateway, handle)
    assert len(stopped) >= 3
    counter = next(
        path for path in gateway.state.rglob("counter") if path.is_file()
    )  # in the box's folder for both isolations
    size = counter.stat().st_size
    await asyncio.sleep(0.3)
    assert counter.stat().st_size == size
    record = record_of(gateway, handle)
    assert (record.group is None) == (way == "signals")
    if way == "signals":
        assert all(map(is_stopped, stopped))
    placement = await backend.resume(handle)
    assert await run(placement, identity) == (0, before)
    assert "alive" in before
    for _ in range(200):
        if counter.stat().st_size > size:
            break
        await asyncio.sleep(0.02)
    assert counter.stat().st_size > size


async def test_any_number_of_pauses_loses_nothing(gateway, backend, run, way):
    # C47
    placement = await gateway.create(backend)
    await run(placement, COUNTER)
    for _ in range(4):
        handle = await backend.pause(placement.handle, memory=True)
        placement = await backend.resume(handle)
        assert await run(placement, ALIVE) == (0, "alive\n")


async def test_pause_and_resume_may_be_repeated(gateway, backend, run, way):
    placement = await gateway.create(backend)
    handle = placement.handle
    for _ in range(2):
        handle = await backend.pause(handle, memory=True)
    assert all(map(is_stopped, members_of(backend, gateway, handle))) or way != "signals"
    for _ in range(2):
        placement = await backend.resume(handle)
    assert await run(placement, "echo here") == (0, "here\n")


async def test_code_that_forks_all_the_time_is_stopped_whole_or_not_at_all(gateway, backend, run, way):
    if gateway.isolation == "none":
        pytest.skip("for trusted code only: without a pid namespace such code cannot even be ended for certain")
    placement = await gateway.create(backend)
    forking = """
        import os, time
        # Long enough for the test, and no longer than the machine can bear.
        for _ in range(10000):
            if os.fork():
                os._exit(0)
            time.sleep(0.0005)
    """
    starts = "\n".join(line[8:] for line in forking.splitlines())
    await run(
        placement,
        f"cat > f.py <<'END'\n{starts}\nEND\nfor i in 1 2 3 4; do (setsid python3 f.py >/dev/null 2>&1 </dev/null &); done; sleep 0.3",
    )
    refused = None
    try:
        handle = await backend.pause(placement.handle, memory=True)
    except Unavailable as error:
        refused = error.message
    if refused is not None:
        assert way == "signals", "in its group from the start, nothing escapes"
        assert "faster than" in refused
        assert await run(placement, "echo here") == (0, "here\n")
    else:
        stopped = members_of(backend, gateway, handle)
        await asyncio.sleep(0.2)
        assert members_of(backend, gateway, handle) == stopped
    await backend.destroy(placement.handle)


async def test_process_that_was_stopped_before_stays_stopped(gateway, backend, run, way):
    placement = await gateway.create(backend)
    # Without isolation the tests of other workers are seen too.
    sleeper = f"sleep {259200 + os.getpid()}"
    await run(placement, f"(setsid {sleeper} >/dev/null 2>&1 </dev/null &); sleep 0.1; pkill -STOP -xf '{sleeper}'")
    state = f"sed -E 's/.*\\) (.).*/\\1/' /proc/$(pgrep -xf '{sleeper}')/stat"
    assert (await run(placement, state))[1] == "T\n"
    handle = await backend.pause(placement.handle, memory=True)
    # A second time, as after a crash half way: those that the pause has stopped are no others.
    handle = await backend.pause(handle, memory=True)
    placement = await backend.resume(handle)
    assert (await run(placement, state))[1] == "T\n"


async def test_shell_does_not_see_its_jobs_stopped(gateway, backend, run, way):
    placement = await gateway.create(backend)
    script = "set -m; sleep 1.2; echo status $?; jobs"
    task = asyncio.create_task(run(placement, script))
    await asyncio.sleep(0.3)
    handle = await backend.pause(placement.handle, memory=True)
    await asyncio.sleep(0.3)
    await backend.resume(handle)
    assert await task == (0, "status 0\n")


async def test_destroying_a_paused_sandbox_leaves_nothing(gateway, backend, run, way):
    placement = await gateway.create(backend)
    await run(placement, COUNTER)
    handle = await backend.pause(placement.handle, memory=True)
    stopped = members_of(backend, gateway, handle)
    group = record_of(gateway, handle).group
    async with asyncio.timeout(10):
        await backend.destroy(handle)
    assert not [process for process in stopped if process.is_alive()]
    assert group is None or not Path(group).exists()


async def test_paused_sandbox_is_resumed_by_another_core(gateway, run, way):
    async with gateway.backend() as first:
        placement = await gateway.create(first)
        await run(placement, COUNTER)
        handle = await first.pause(placement.handle, memory=True)
    async with gateway.backend() as second:
        assert [dict(survivor.handle) for survivor in await second.survey()] == [dict(handle)]
        placement = await second.resume(handle)
        assert await run(placement, ALIVE) == (0, "alive\n")


async def test_crash_in_the_middle_of_a_pause_is_mended_by_the_next(gateway, backend, run, way, monkeypatch):
    placement = await gateway.create(backend)

    def crash(*_, **__):
        raise MemoryError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(standstill, "stop_all", crash)
        patch.setattr(standstill, "go_on", lambda *_, **__: None)
        patch.setattr(Record, "dump", _dump_until(patch, Record.dump))
        with pytest.raises(MemoryError):
            await backend.pause(placement.handle, memory=True)
    assert record_of(gateway, placement.handle).paused == "memory"
    handle = await backend.pause(placement.handle, memory=True)
    placement = await backend.resume(handle)
    assert await run(placement, "echo here") == (0, "here\n")


def _dump_until(patch, dump):
    """Writes only what was written before the crash."""
    return lambda record: dump(record if record.paused else _as_paused(record))


def _as_paused(record: Record) -> Record:
    return replace(record, paused="memory")


async def test_failed_pause_lets_everything_go_on(gateway, backend, run, way, monkeypatch):
    placement = await gateway.create(backend)
    await run(placement, COUNTER)
    real = standstill.stop_all

    def fail(*arguments, **options):
        real(*arguments, **options)
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(standstill, "stop_all", fail)
        with pytest.raises(SandgateError, match="cannot be stopped"):
            await backend.pause(placement.handle, memory=True)
    assert await run(placement, "echo here") == (0, "here\n")


async def test_lost_memory_is_told_and_the_files_are_still_there(gateway, backend, run, way):
    placement = await gateway.create(backend)
    await run(placement, "echo kept > file")
    handle = await backend.pause(placement.handle, memory=True)
    record = record_of(gateway, handle)
    for process in (record.init, record.main):
        if process is not None:
            process.signal(signal.SIGKILL)
    for group in possible_groups(record.mark):
        group.thaw()
    for _ in range(200):
        if not record.is_alive():
            break
        await asyncio.sleep(0.01)
    with pytest.raises(DataLoss):
        await backend.resume(handle)
    handle = await backend.pause(handle, memory=False)
    placement = await backend.resume(handle)
    assert await run(placement, "cat file") == (0, "kept\n")


async def test_pause_of_the_files_ends_all_processes_and_starts_anew(gateway, backend, run):
    # C40
    placement = await gateway.create(backend)
    await run(placement, COUNTER)
    await run(placement, ALIVE)
    _, boot = await run(placement, "echo kept > file; cat /proc/sys/kernel/random/boot_id")
    before = members_of(backend, gateway, placement.handle)
    handle = await backend.pause(placement.handle, memory=False)
    assert not [process for process in before if process.is_alive()]
    assert await backend.locate(handle) is None
    handle = await backend.pause(handle, memory=False)
    placement = await backend.resume(handle)
    assert await run(placement, "cat file") == (0, "kept\n")
    if gateway.isolation == "bubblewrap":
        code, again = await run(placement, "cat /proc/sys/kernel/random/boot_id")
        assert code == 0
        assert again != boot
        assert again.strip() != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert await backend.locate(placement.handle) is not None
    with pytest.raises(DataLoss):
        await backend.pause(await backend.pause(placement.handle, memory=False), memory=True)


async def test_failed_new_start_leaves_it_paused(gateway, backend, run, monkeypatch):
    placement = await gateway.create(backend)
    await run(placement, "echo kept > file")
    handle = await backend.pause(placement.handle, memory=False)

    async def fail(*_):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "agent_ready", fail)
        with pytest.raises(SandgateError, match="could not be started"):
            await backend.resume(handle)
    assert await backend.locate(handle) is None
    assert record_of(gateway, handle).paused == "files"
    assert await run(await backend.resume(handle), "cat file") == (0, "kept\n")


async def test_cancelled_new_start_leaves_it_paused(gateway, backend, run):
    placement = await gateway.create(backend)
    handle = await backend.pause(placement.handle, memory=False)
    for delay in (0, 0.01, 0.05):
        resuming = asyncio.create_task(backend.resume(handle))
        await asyncio.sleep(delay)
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
    assert record_of(gateway, handle).main is None
    assert await run(await backend.resume(handle), "echo here") == (0, "here\n")


async def test_unknown_sandbox_is_neither_paused_nor_resumed(gateway, backend):
    for memory in (True, False):
        with pytest.raises(NotFound):
            await backend.pause({"box": "i99999999999999999999"}, memory=memory)
    with pytest.raises(NotFound):
        await backend.resume({"box": "i99999999999999999999"})


async def test_dead_sandbox_is_not_paused(gateway, backend):
    placement = await gateway.create(backend)
    record = record_of(gateway, placement.handle)
    (record.init or record.main).signal(signal.SIGKILL)
    for _ in range(200):
        if not record.is_alive():
            break
        await asyncio.sleep(0.01)
    with pytest.raises(NotFound):
        await backend.pause(placement.handle, memory=True)


@pytest.mark.parametrize("victim", ["/run/sandgate", "/etc", "/proc", "/dev", "/run/sandgate/agent", "/usr"])
async def test_link_in_place_of_a_mounted_folder_is_not_followed(gateway, backend, run, tmp_path, victim):
    """The sandbox's root owns its files; what is mounted on them at the next start is mounted by the host's."""
    if gateway.isolation != "bubblewrap":
        pytest.skip("nothing is mounted")
    placement = await gateway.create(backend)
    await run(placement, "echo kept > file")
    handle = await backend.pause(placement.handle, memory=False)
    box = Shelf(state=gateway.state, runtime=gateway.runtime).box(handle["box"])
    target = tmp_path / "outside"
    target.mkdir(mode=0o777)
    (box.rootfs / victim.lstrip("/")).rename(box.rootfs / "aside")
    (box.rootfs / victim.lstrip("/")).symlink_to(f"/oldroot{target}")
    placement = await backend.resume(handle)
    assert list(target.iterdir()) == []
    if victim != "/etc":  # with that, its accounts are moved aside too
        assert await run(placement, "cat file") == (0, "kept\n")


def test_every_mounted_place_is_mended(tmp_path):
    """A place that is mounted and not mended would be a way to have the host's root follow a link."""
    from sandgate_plugin_process.boxes import Box
    from sandgate_plugin_process.bubblewrap import _mount_points

    box = Box("i1", tmp_path / "folder", tmp_path / "run")
    record = Record.fresh(sandbox_id="i1", isolation="bubblewrap", bundle="", base=None, internet=True)
    record = replace(record, groups={"memory": str(tmp_path / "memory"), "cpu": str(tmp_path / "cpu")})
    options = list(Bubblewrap("true")._mounts(box, record, tmp_path))
    places = set()
    for number, option in enumerate(options):
        if option in {"--proc", "--dev", "--tmpfs", "--dir"}:
            places.add(options[number + 1])
        elif option.startswith(("--bind", "--ro-bind")):
            places.add(options[number + 2])
    mended = {*rootfs._MOUNTED, *(target for _, target in _mount_points(record))}
    # Below `/proc` and `/dev` everything is the kernel's or bubblewrap's own, made in the same start.
    made = ("/proc/", "/dev/")
    assert {place for place in places - mended - {"/"} if not place.startswith(made)} == set()


async def test_record_of_an_earlier_version_is_read(gateway, backend, run):
    placement = await gateway.create(backend)
    path = gateway.state / "boxes" / placement.handle["box"] / "record.json"
    fields = json.loads(path.read_text())
    for name in ("paused", "group", "grouped", "stopped"):
        del fields[name]
    path.write_text(json.dumps(fields))
    handle = await backend.pause(placement.handle, memory=True)
    assert await run(await backend.resume(handle), f"echo {os.getpid()}") == (0, f"{os.getpid()}\n")
