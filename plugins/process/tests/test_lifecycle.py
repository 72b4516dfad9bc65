"""What every backend promises the core (``sandgate_plugin_api.backend``), kept by both isolations."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from sandgate_errors import Conflict, Internal, InvalidArgument, SandgateError
from sandgate_plugin_api import Capability, Template
from sandgate_plugin_process.boxes import Record, Shelf
from sandgate_plugin_process.pids import marked_by, names_itself, was_given


def record_file(gateway, handle) -> Path:
    return gateway.state / "boxes" / handle["box"] / "record.json"


def marked(record: dict) -> set:
    mark = record["mark"]
    return marked_by(lambda pid: names_itself(mark)(pid) or was_given(f"SANDGATE_BOX={mark}")(pid))


def with_argument(pattern: str) -> list[int]:
    """Processes of the machine whose command line has ``pattern``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and pattern.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


async def host_process(pattern: str, *, gone: bool = False) -> list[int]:
    """The same, once there is one (or none)."""
    for _ in range(200):
        if bool(found := with_argument(pattern)) != gone:
            break
        await asyncio.sleep(0.05)
    return found


@pytest.fixture
def bystander():
    """A process that is nobody's business."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


async def test_created_sandbox_runs_commands_at_once(gateway, backend, run):
    placement = await gateway.create(backend)
    assert await run(placement, "echo $((6*7))") == (0, "42\n")
    code, home = await run(placement, "pwd")
    assert code == 0
    assert home.strip().endswith("/home/user" if gateway.isolation == "bubblewrap" else "/home")


async def test_agent_refuses_a_wrong_token(gateway, backend, run):
    placement = await gateway.create(backend)
    stranger = replace(placement, agent=replace(placement.agent, token="x"))
    with pytest.raises(Exception, match="UNAUTHENTICATED"):
        await run(stranger, "true")


async def test_destroyed_sandbox_leaves_no_process_and_no_file(gateway, backend, run):
    placement = await gateway.create(backend)
    record = json.loads(record_file(gateway, placement.handle).read_text())
    seconds = 86400 + os.getpid()
    # One that left its group, its session and its parent.
    await run(placement, f"(setsid sleep {seconds} >/dev/null 2>&1 </dev/null &) ; true")
    assert await host_process(f"sleep\0{seconds}")
    await backend.destroy(placement.handle)
    assert await host_process(f"sleep\0{seconds}", gone=True) == []
    assert not marked(record)
    assert not list((gateway.state / "boxes").iterdir())
    assert not list(gateway.runtime.iterdir())
    assert await backend.locate(placement.handle) is None
    assert not await backend.survey()


async def test_destroy_is_idempotent(gateway, backend):
    placement = await gateway.create(backend)
    await asyncio.gather(*[backend.destroy(placement.handle) for _ in range(3)])
    await backend.destroy(placement.handle)
    await backend.destroy({"box": "i99999999999999999999"})


async def test_cancelled_destroy_runs_to_its_end(gateway, backend):
    placement = await gateway.create(backend)
    task = asyncio.create_task(backend.destroy(placement.handle))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await backend.survey()


@pytest.mark.parametrize("name", ["../x", "", "a/b", "x\0y", "I" * 21, "i" * 200, 7, None])
async def test_damaged_handle_is_refused(gateway, backend, name):
    with pytest.raises(Internal):
        await backend.destroy({"box": name})


@pytest.mark.parametrize("delay", [0, 0.002, 0.01, 0.03, 0.06])
async def test_cancelled_create_leaves_no_process(gateway, backend, delay, monkeypatch):
    records = []
    fresh = Record.fresh

    def remembered(**fields):
        records.append(fresh(**fields))
        return records[-1]

    monkeypatch.setattr(Record, "fresh", remembered)
    request = await gateway.request(backend)
    task = asyncio.create_task(backend.create(request, backend.reserve(request)))
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await backend.survey()
    assert not list(gateway.runtime.iterdir())
    assert not [record for record in records if marked({"mark": record.mark})]
    assert not with_argument(str(gateway.folder))


async def test_same_sandbox_is_not_made_twice(gateway, backend, run):
    request = await gateway.request(backend)
    results = await asyncio.gather(
        *[backend.create(request, backend.reserve(request)) for _ in range(2)], return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Placement"]
    placement = next(result for result in results if not isinstance(result, Conflict))
    assert await run(placement, "echo whole") == (0, "whole\n")


async def test_kill_during_create_leaves_nothing(gateway, backend):
    """C37: never a kill that succeeds and a sandbox that goes on."""
    request = await gateway.request(backend)
    handle = backend.reserve(request)
    create = asyncio.create_task(backend.create(request, handle))
    await asyncio.sleep(0.01)
    await backend.destroy(handle)
    await asyncio.gather(create, return_exceptions=True)
    assert not await backend.survey()


async def test_unknown_template_is_refused(gateway, backend):
    template = (await backend.templates())[0]
    strange = Template(id="other", resources=template.resources)
    with pytest.raises(InvalidArgument):
        await gateway.create(backend, template=strange)


async def test_internet_is_switched_off_or_the_request_refused(gateway, backend, run):
    """C54: deny all, or a refusal; never accepted and ignored."""
    if Capability.NO_INTERNET not in backend.capabilities:
        with pytest.raises(SandgateError):
            await gateway.create(backend, allow_internet_access=False)
        assert not await backend.survey()
        return
    placement = await gateway.create(backend, allow_internet_access=False)
    _, interfaces = await run(placement, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
    assert interfaces.split() == ["lo"]
    code, _ = await run(placement, "exec 3<>/dev/udp/127.0.0.1/9 && echo up")
    assert code == 0


async def test_next_core_finds_sandbox_and_its_commands(gateway, run):
    async with gateway.backend() as first:
        placement = await gateway.create(first)
        await run(placement, "echo kept > ~/note; (sleep 500 >/dev/null 2>&1 &)")
    async with gateway.backend() as second:
        assert [survivor.handle for survivor in await second.survey()] == [placement.handle]
        assert await second.locate(placement.handle) == placement
        assert await run(placement, "cat ~/note; pgrep -xc sleep >/dev/null && echo alive") == (0, "kept\nalive\n")


async def test_sandbox_outlives_a_killed_core(gateway, run):
    core = textwrap.dedent(
        """
        import asyncio, json, sys
        from pathlib import Path
        from sandgate_plugin_api import BackendContext, SandboxRequest
        from sandgate_plugin_process.backend import ProcessBackend

        async def main():
            state, runtime, isolation = sys.argv[1:]
            backend = ProcessBackend(BackendContext(
                state_dir=Path(state), runtime_dir=Path(runtime), settings={"isolation": isolation, "warm": 1}))
            await backend.open()
            template = (await backend.templates())[0]
            request = SandboxRequest(sandbox_id="i" + "7" * 20, template=template)
            while len(list(Path(runtime).glob("*/agent.sock"))) < 1:
                await asyncio.sleep(0.02)
            placement = await backend.create(request, backend.reserve(request))
            print(json.dumps(dict(placement.handle)), flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
        """
    )
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", core, str(gateway.state), str(gateway.runtime), gateway.isolation],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        handle = json.loads(await asyncio.to_thread(process.stdout.readline))
        process.send_signal(signal.SIGKILL)
    async with gateway.backend() as second:
        # Also under the handle that was reserved: the core may have died before it stored the one returned.
        for known in (handle, {"box": "i" + "7" * 20}):
            placement = await second.locate(known)
            assert placement is not None
            assert await run(placement, "echo here") == (0, "here\n")
        # What was made ahead and given to nobody is gone.
        assert [survivor.sandbox_id for survivor in await second.survey()] == ["i" + "7" * 20]
        await second.destroy({"box": "i" + "7" * 20})
        assert not await second.survey()


async def test_half_made_box_is_ended_by_its_mark(gateway, backend):
    """As when the core died between starting a process and writing down its pid."""
    placement = await gateway.create(backend)
    file = record_file(gateway, placement.handle)
    record = json.loads(file.read_text())
    assert marked(record)
    file.write_text(json.dumps({**record, "main": None, "init": None}))
    assert await backend.locate(placement.handle) is None
    assert [survivor.handle for survivor in await backend.survey()] == [placement.handle]
    await backend.destroy(placement.handle)
    assert not marked(record)


async def test_box_without_a_readable_record_is_surveyed_and_removed(gateway, backend):
    for name, content in (("i1", None), ("i2", b""), ("i3", b'{"x": 1}'), ("i4", b"[]")):
        folder = gateway.state / "boxes" / name
        folder.mkdir()
        if content is not None:
            (folder / "record.json").write_bytes(content)
    (gateway.runtime / "i5").mkdir()
    survivors = await backend.survey()
    assert sorted(survivor.sandbox_id for survivor in survivors) == ["i1", "i2", "i3", "i4", "i5"]
    for survivor in survivors:
        assert await backend.locate(survivor.handle) is None
        await backend.destroy(survivor.handle)
    assert not await backend.survey()


async def test_pids_of_another_boot_mean_nothing(gateway, backend, bystander):
    placement = await gateway.create(backend)
    file = record_file(gateway, placement.handle)
    record = json.loads(file.read_text())
    start = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
    someone = {"pid": bystander.pid, "start": start}
    (gateway.state / "boxes" / "i0").mkdir()
    (gateway.state / "boxes" / "i0" / "record.json").write_text(
        json.dumps({**record, "boot_id": "another", "main": someone, "init": someone, "base": None})
    )
    assert await backend.locate({"box": "i0"}) is None
    await backend.destroy({"box": "i0"})
    assert bystander.poll() is None


async def test_reused_pid_is_not_killed(gateway, backend, bystander):
    """X8: a process that took over the number of a dead one is somebody else."""
    placement = await gateway.create(backend)
    file = record_file(gateway, placement.handle)
    record = json.loads(file.read_text())
    other = {"pid": bystander.pid, "start": 1}
    (gateway.state / "boxes" / "i0").mkdir()
    (gateway.state / "boxes" / "i0" / "record.json").write_text(
        json.dumps({**record, "mark": "sandgate-none", "main": other, "init": other, "base": None, "group": None})
    )
    assert await backend.locate({"box": "i0"}) is None
    await backend.destroy({"box": "i0"})
    assert bystander.poll() is None
    assert await backend.locate(placement.handle) == placement


async def test_dead_agent_means_no_sandbox(gateway, backend):
    placement = await gateway.create(backend)
    record = json.loads(record_file(gateway, placement.handle).read_text())
    os.kill((record["init"] or record["main"])["pid"], signal.SIGKILL)
    for _ in range(100):
        if await backend.locate(placement.handle) is None:
            break
        await asyncio.sleep(0.05)
    assert await backend.locate(placement.handle) is None
    await backend.destroy(placement.handle)
    assert not marked(record)


async def test_processes_that_keep_forking_are_ended(gateway, backend, run):
    placement = await gateway.create(backend)
    seconds = 172800 + os.getpid()
    await run(placement, f"(while :; do (sleep {seconds} &); sleep 0.01; done >/dev/null 2>&1 &) ; sleep 0.3")
    await asyncio.wait_for(backend.destroy(placement.handle), 30)
    assert await host_process(f"sleep\0{seconds}", gone=True) == []


async def test_hostile_file_tree_is_removed(gateway, backend, run):
    placement = await gateway.create(backend)
    code, output = await run(
        placement,
        """
        python3 - <<'END'
        import os
        for name in range(300):
            os.mkdir(f"d{name}")
        for _ in range(1500):
            os.mkdir("deep"); os.chdir("deep")
        END
        mkdir -p closed/inner/more && touch closed/inner/more/file && chmod 000 closed/inner closed
        ln -s / root; ln -s /etc/passwd etc; mkfifo pipe; touch "$(printf 'odd\\n\\xff name')" -- -rf
        """.replace("\n        ", "\n"),
    )
    assert (code, output) == (0, "")
    await asyncio.wait_for(backend.destroy(placement.handle), 60)
    assert not list((gateway.state / "boxes").iterdir())
    assert Path("/etc/passwd").exists()


async def test_nothing_piles_up(gateway, backend):
    """No descriptor, no unreaped process and no range of ids is left by a sandbox that was."""

    def unreaped() -> int:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return sum("State:\tZ" in Path(f"/proc/{pid}/status").read_text() for pid in children)

    await backend.destroy((await gateway.create(backend)).handle)
    before = len(os.listdir("/proc/self/fd")), unreaped()
    for _ in range(3):
        placement = await gateway.create(backend)
        await backend.destroy(placement.handle)
    await asyncio.sleep(0.2)
    assert (len(os.listdir("/proc/self/fd")), unreaped()) == before
    assert not backend._bases


async def test_failed_start_frees_everything_and_names_no_path(gateway, backend, caplog):
    """The agent's library is broken: the operator reads why in the log, the client nothing of the host."""
    backend._bundle = gateway.folder / "broken"
    backend._bundle.mkdir()
    (backend._bundle / "__main__.py").write_text("import sandgate_agent")
    with pytest.raises(Internal) as caught:
        await gateway.create(backend)
    assert str(gateway.folder) not in caught.value.message
    assert "sandgate_agent" in caplog.text
    assert not await backend.survey()
    assert not list(gateway.runtime.iterdir())


async def test_records_are_private(gateway, backend):
    placement = await gateway.create(backend)
    assert record_file(gateway, placement.handle).stat().st_mode & 0o777 == 0o600
    box = Shelf(state=gateway.state, runtime=gateway.runtime).box(placement.handle["box"])
    assert box.folder.stat().st_mode & 0o777 == 0o700
    assert box.runtime.stat().st_mode & 0o777 == 0o700
    assert placement.agent.token not in repr(placement)
