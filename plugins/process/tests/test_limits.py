"""What a sandbox may use is kept, and what it shows is what is kept (P7, H3; the processes of issue 3, B10 of the traps)."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_errors import FailedPrecondition, InvalidArgument
from sandgate_plugin_api import Capability
from sandgate_plugin_process.backend import ProcessBackend
from sandgate_plugin_process.boxes import Record, Shelf
from sandgate_plugin_process.freezing import remove_group
from sandgate_plugin_process.grounds import Ground
from sandgate_plugin_process.hierarchies import enable
from sandgate_plugin_process.limits import LIMITING, Limits, settings

MIB = 2**20
HOG = "python3 -c 'kept = [bytearray(2**20) for _ in range({})]; print(len(kept))'"
#: Starts as many processes as it may, a few more than 64 at most, and says how many there were at a time.
FORKS = """python3 -c '
import os, signal, time
made = []
try:
    for _ in range(400):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        made.append(pid)
except OSError as error:
    print(error.strerror)
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(len(made))
'"""


@pytest.fixture(scope="module")
def ground() -> Ground:
    return Ground.find()


@pytest.fixture
def all_limits(ground: Ground) -> None:
    if ground.limits < LIMITING:
        if "limits" in os.environ.get("SANDGATE_REQUIRE", ""):
            pytest.fail("there are no control groups that limit processes, memory and CPU here")
        pytest.skip("no control groups that limit processes, memory and CPU can be made here")


def record_of(gateway, placement) -> Record:
    record = Shelf(state=gateway.state, runtime=gateway.runtime).box(placement.handle["box"]).read()
    assert record is not None
    return record


async def measured(placement) -> agent_pb2.MetricsResponse:
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        return await agent_pb2_grpc.AgentStub(channel).Metrics(
            agent_pb2.MetricsRequest(), metadata=(("agent-token", placement.agent.token),), timeout=30
        )


async def terminal(placement, command: str) -> str:
    output = b""
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        call = process_pb2_grpc.ProcessStub(channel).Start(
            process_pb2.StartRequest(
                process=process_pb2.ProcessConfig(cmd="/bin/bash", args=["-l", "-c", command]),
                pty=process_pb2.PTY(size=process_pb2.PTY.Size(cols=80, rows=24)),
            ),
            metadata=(("agent-token", placement.agent.token), ("acting-user-bin", b"user")),
            timeout=60,
        )
        async for response in call:
            output += response.event.data.pty
    return output.decode(errors="replace")


def processes_in(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def names_in(group: Path) -> set[str]:
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes_in(group)}


async def test_memory_hog_is_killed_and_the_agent_survives(gateway, run, all_limits):
    # P7
    async with gateway.backend(memory_mb=192, pids=64) as backend:
        placement = await gateway.create(backend)
        code, said = await run(placement, HOG.format(400))
        assert code != 0
        assert "400" not in said
        assert await run(placement, "echo here") == (0, "here\n")
        assert await run(placement, HOG.format(60)) == (0, "60\n")
        await backend.destroy(placement.handle)


async def test_fork_storm_ends_at_the_limit_and_commands_go_on_after_it(gateway, run, all_limits):
    async with gateway.backend(pids=64) as backend:
        placement = await gateway.create(backend)
        code, said = await run(placement, FORKS)
        assert code == 0
        refused, made = said.splitlines()
        assert refused == "Resource temporarily unavailable"
        assert 40 <= int(made) <= 64
        assert await run(placement, "echo here") == (0, "here\n")
        await backend.destroy(placement.handle)


async def test_storm_that_lasts_can_be_paused_and_destroyed(gateway, run, all_limits):
    async with gateway.backend(pids=64) as backend:
        placement = await gateway.create(backend)
        storm = "(setsid bash -c 'bomb() { bomb & bomb & wait; }; sleep 0.2; timeout 20 bash -c \"$(declare -f bomb); bomb\"' >/dev/null 2>&1 </dev/null &)"
        await run(placement, storm)
        await asyncio.sleep(0.5)
        handle = await backend.pause(placement.handle, memory=True)
        placement = await backend.resume(handle)
        groups = record_of(gateway, placement).groups
        async with asyncio.timeout(30):
            await backend.destroy(placement.handle)
        assert not [path for path in groups.values() if Path(path).exists()]


async def test_default_holds_more_than_the_live_processes_of_the_agent(gateway, backend):
    # 1,024 commands may be listed at a time (X14); each may have some processes more.
    limit = backend._allowance.pids
    assert limit >= 2 * 1024


async def test_commands_and_terminals_are_in_groups_apart_from_the_agent(gateway, run, all_limits):
    # P7
    async with gateway.backend() as backend:
        placement = await gateway.create(backend)
        groups = {name: Path(path) for name, path in record_of(gateway, placement).groups.items()}
        memory, cpu = groups["memory"], groups["cpu"]
        commands, terminals = cpu / "user/commands", cpu / "user/terminals"
        sleeping = [
            asyncio.create_task(run(placement, "exec sleep 30")),
            asyncio.create_task(terminal(placement, "exec sleep 30")),
        ]
        # What starts commands, and the command; of terminals only the terminal.
        expected = {commands: {"sleep", "sandgate-root", "sandgate-spawn"}, terminals: {"sleep"}}
        for _ in range(400):
            if (names := {group: names_in(group) for group in expected}) == expected:
                break
            await asyncio.sleep(0.05)
        assert names == expected
        if (capped := memory / "user") != cpu / "user":
            assert processes_in(capped) == processes_in(commands) | processes_in(terminals)
        agents = processes_in(cpu / "agent")
        assert agents
        assert not agents & (processes_in(commands) | processes_in(terminals))
        weight = "cpu.weight" if (cpu / "cpu.weight").exists() else "cpu.shares"
        weights = {
            name: int((cpu / name / weight).read_text())
            for name in ("user/commands", "user/terminals", "agent", "user")
        }
        assert weights["user/terminals"] == weights["agent"] == 4 * weights["user/commands"] == 4 * weights["user"]
        await backend.destroy(placement.handle)
        for done in await asyncio.gather(*sleeping, return_exceptions=True):
            assert isinstance(done, grpc.aio.AioRpcError)


async def test_user_cannot_leave_its_groups(gateway, run, all_limits):
    if gateway.isolation == "none":
        pytest.skip("without isolation root can do anything")
    async with gateway.backend() as backend:
        placement = await gateway.create(backend)
        _, written = await run(
            placement,
            "for file in $(find /sys/fs/cgroup -type f); do (echo 0 > $file) 2>/dev/null && echo $file; done; echo end",
            "root",
        )
        assert written == "end\n"
        _, mounted = await run(placement, "mount -o remount,rw /sys/fs/cgroup/memory 2>&1 && echo could", "root")
        assert "could" not in mounted
        _, shown = await run(placement, "cat /proc/self/cgroup /proc/self/mountinfo", "root")
        assert record_of(gateway, placement).mark not in shown
        # None of the files through which processes are moved has reached a command.
        _, open_files = await run(placement, "ls -l /proc/self/fd", "user")
        assert "cgroup" not in open_files
        await backend.destroy(placement.handle)


async def test_what_a_sandbox_shows_is_what_it_has(gateway, run, all_limits):
    # H3
    async with gateway.backend(memory_mb=256, cpu_count=1) as backend:
        assert Capability.LIMITS in backend.capabilities
        (template,) = await backend.templates()
        assert (template.resources.memory_mb, template.resources.cpu_count) == (256, 1)
        placement = await gateway.create(backend)
        before = await measured(placement)
        assert (before.mem_total, before.cpu_count) == (256 * MIB, 1)
        assert 0 < before.mem_used < 256 * MIB
        await run(placement, "timeout 0.4 sh -c 'while :; do :; done'")
        after = await measured(placement)
        # Of its own CPU and no other's: the machine may be as busy as it likes.
        assert 0 < after.cpu_used_pct <= 100
        await backend.destroy(placement.handle)


async def test_cpu_is_what_the_limit_says(gateway, run, all_limits):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU cannot be limited to fewer")
    async with gateway.backend(cpu_count=1) as backend:
        placement = await gateway.create(backend)
        busy = "for i in 1 2 3; do timeout 1 sh -c 'while :; do :; done' & done; wait; times | tail -1"
        code, said = await run(placement, busy)
        assert code == 0
        minutes, seconds = said.split()[0].rstrip("s").split("m")
        assert int(minutes) * 60 + float(seconds) < 1.6
        await backend.destroy(placement.handle)


async def test_request_may_have_less_than_the_template(gateway, run, all_limits):
    """As a policy plugin may ask for one sandbox; a warm one has other limits and is not given then."""
    async with gateway.backend(warm=1) as backend:
        for _ in range(400):
            if list(gateway.runtime.glob("w*/agent.sock")):
                break
            await asyncio.sleep(0.05)
        (template,) = await backend.templates()
        small = replace(template, resources=replace(template.resources, memory_mb=128, cpu_count=1))
        placement = await gateway.create(backend, template=small)
        assert str(placement.handle["box"]).startswith("i")
        assert (await measured(placement)).mem_total == 128 * MIB
        usual = await gateway.create(backend)
        assert (await measured(usual)).mem_total > 128 * MIB
        for made in (placement, usual):
            await backend.destroy(made.handle)


async def test_warm_sandbox_has_the_limits_of_its_template(gateway, run, all_limits):
    async with gateway.backend(warm=1, memory_mb=192, pids=64) as backend:
        for _ in range(400):
            if list(gateway.runtime.glob("w*/agent.sock")):
                break
            await asyncio.sleep(0.05)
        placement = await gateway.create(backend)
        assert str(placement.handle["box"]).startswith("w")
        assert (await measured(placement)).mem_total == 192 * MIB
        assert (await run(placement, HOG.format(400)))[0] != 0
        await backend.destroy(placement.handle)


async def test_limits_hold_after_a_pause_without_memory(gateway, run, all_limits):
    async with gateway.backend(memory_mb=192) as backend:
        placement = await gateway.create(backend)
        first = record_of(gateway, placement).groups
        handle = await backend.pause(placement.handle, memory=False)
        assert not [path for path in first.values() if Path(path).exists()]
    # The operator has changed the template since: the sandbox keeps what it shows.
    async with gateway.backend(memory_mb=512) as backend:
        placement = await backend.resume(handle)
        assert (await measured(placement)).mem_total == 192 * MIB
        assert (await run(placement, HOG.format(400)))[0] != 0
        await backend.destroy(placement.handle)


async def test_more_than_the_machine_has_is_refused(gateway, all_limits):
    async with gateway.backend() as backend:
        (template,) = await backend.templates()
        for name in ("memory_mb", "cpu_count"):
            more = replace(template.resources, **{name: 2 * getattr(template.resources, name)})
            with pytest.raises(InvalidArgument, match="here, and no more"):
                await gateway.create(backend, template=replace(template, resources=more))
        other = replace(template.resources, disk_size_mb=1024)
        with pytest.raises(InvalidArgument, match="disk"):
            await gateway.create(backend, template=replace(template, resources=other))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"memory_mb": 10**9}, "memory_mb"),
        ({"cpu_count": 4000}, "cpu_count"),
        ({"limits": "maybe"}, "limits"),
        ({"limits": "off", "memory_mb": 256}, "memory_mb"),
        ({"pids": 1}, "pids"),
    ],
)
async def test_limit_that_cannot_be_is_refused_by_name(gateway, table, named):
    with pytest.raises(FailedPrecondition, match=named):
        async with gateway.backend(**table):
            pass


@pytest.fixture
def nothing_here(monkeypatch) -> None:
    """A machine where the gateway may make no control groups."""
    monkeypatch.setattr(Ground, "find", classmethod(lambda _: Ground()))


@pytest.mark.parametrize("table", [{"limits": "on"}, {"memory_mb": 64}, {"cpu_count": 1}])
async def test_what_cannot_be_kept_is_no_start(gateway, nothing_here, table):
    with pytest.raises(FailedPrecondition, match=r"cannot limit .*Delegate=yes"):
        async with gateway.backend(**table):
            pass


async def test_without_control_groups_processes_are_limited_where_the_kernel_can(gateway, run, nothing_here):
    async with gateway.backend(limits="auto") as backend:
        assert Capability.LIMITS not in backend.capabilities
        kept = backend._allowance
        assert kept.limits_resources is False
        if gateway.isolation == "none":
            assert "not: processes, memory, CPU" in kept.describe()
            return
    async with gateway.backend(pids=64) as backend:
        assert "by rlimit: the processes" in backend._allowance.describe()
        placement = await gateway.create(backend)
        code, said = await run(placement, FORKS)
        assert code == 0
        refused, made = said.splitlines()
        assert refused == "Resource temporarily unavailable"
        assert 30 <= int(made) <= 64
        # One's storm is not another's.
        other = await gateway.create(backend)
        assert await run(other, "echo here") == (0, "here\n")
        for box in (placement, other):
            await backend.destroy(box.handle)


async def test_limits_that_are_off_make_no_groups(gateway, run):
    async with gateway.backend(limits="off") as backend:
        placement = await gateway.create(backend)
        assert record_of(gateway, placement).groups == {}
        assert Capability.LIMITS not in backend.capabilities
        assert await run(placement, "echo here") == (0, "here\n")
        await backend.destroy(placement.handle)


async def test_groups_that_a_crash_left_are_removed_at_the_next_start(
    gateway, backend, all_limits, ground, monkeypatch
):
    from sandgate_plugin_process import grounds

    limits = Limits(pids=64, memory=None, machine_memory=2**30, cpus=None)
    left, young = (f"sandgate-{os.getpid():x}{number}{'0' * 8}" for number in (1, 2))
    ground.make(left, limits)
    monkeypatch.setattr(grounds, "_LEFT_BEHIND_SECONDS", 0.0)
    try:
        ground.sweep({left})
        assert all(Path(path).exists() for path in ground.boxes(left).values())
        monkeypatch.setattr(grounds, "_LEFT_BEHIND_SECONDS", 60.0)
        ground.make(young, limits)
        ground.sweep(())
        assert all(Path(path).exists() for path in ground.boxes(young).values())
    finally:
        grounds.remove_groups(ground.boxes(young))
        grounds.remove_groups(ground.boxes(left))
    assert not [path for path in ground.boxes(left).values() if Path(path).exists()]


async def test_doctor_says_what_is_kept(gateway):
    rows = {what: (works, how) for what, works, how in ProcessBackend.diagnose({"isolation": gateway.isolation})}
    works, how = rows["limits"]
    assert works
    assert "processes" in how
    table = {"isolation": gateway.isolation, "cpu_count": 4000}
    assert ("limits", False) in [(what, works) for what, works, _ in ProcessBackend.diagnose(table)]


@pytest.mark.parametrize(
    ("version", "controllers", "files"),
    [
        (
            2,
            LIMITING,
            [
                ("cgroup.subtree_control", "+cpu +memory +pids"),
                ("memory.max", str(256 * MIB)),
                ("?memory.swap.max", "0"),
                ("user/memory.max", str(224 * MIB)),
                ("pids.max", "4352"),
                ("user/pids.max", "4096"),
                ("user/cgroup.subtree_control", "+cpu"),
                ("cpu.max", "200000 100000"),
                ("agent/cpu.weight", "200"),
                ("user/cpu.weight", "50"),
                ("user/commands/cpu.weight", "50"),
                ("user/terminals/cpu.weight", "200"),
            ],
        ),
        (1, frozenset({"pids"}), [("pids.max", "4352"), ("user/pids.max", "4096")]),
        (
            1,
            frozenset({"memory"}),
            [
                ("memory.limit_in_bytes", str(256 * MIB)),
                ("?memory.memsw.limit_in_bytes", str(256 * MIB)),
                ("user/memory.limit_in_bytes", str(224 * MIB)),
            ],
        ),
        (1, frozenset({"cpuacct"}), []),
    ],
)
def test_files_of_each_version(version, controllers, files):
    """P7: a user's part of 256 MiB is 224, as an eighth is less than 128 MiB."""
    limits = Limits(pids=4096, memory=256 * MIB, machine_memory=2**34, cpus=2)
    assert list(settings(version, controllers, limits)) == files


@pytest.mark.parametrize(("version", "file"), [(1, ("cpu.shares", "102")), (2, ("cpu.weight", "10"))])
def test_sandbox_comes_behind_the_gateway_where_it_stands_beside_it_alone(version, file):
    limits = Limits(pids=4096, memory=None, machine_memory=2**34, cpus=None)
    alone = list(settings(version, frozenset({"cpu"}), limits, behind_gateway=True))
    assert alone[0] == file
    assert alone[1:] == list(settings(version, frozenset({"cpu"}), limits))
    assert file not in settings(version, frozenset({"memory"}), limits, behind_gateway=True)


def test_gateway_in_a_group_of_its_own_comes_before_its_sandboxes(ground, all_limits):
    limits = Limits(pids=64, memory=None, machine_memory=2**34, cpus=None)
    (usual,) = (found for found in ground.hierarchies if "cpu" in found.controllers)
    name = f"sandgate-{os.getpid():x}{'0' * 8}"
    own = replace(usual, own=usual.place / f"{name}-gateway")
    file = "cpu.weight" if usual.version == 2 else "cpu.shares"
    own.own.mkdir()
    try:
        if usual.version == 2:
            enable(own.own, frozenset({"cpu"}))
        for hierarchy, share in ((own, 0.1), (usual, 1 if usual.is_everybodys else 0.1)):
            Ground((replace(hierarchy, controllers=frozenset({"cpu"})),)).make(name, limits)
            weight = int((hierarchy.place / name / file).read_text())
            assert weight == int(share * (100 if usual.version == 2 else 1024))
    finally:
        for place in (usual.place / name, own.own):
            remove_group(place)


def test_large_machine_keeps_128_mib_for_the_agent():
    # P7
    limits = Limits(pids=1, memory=None, machine_memory=2**34, cpus=None)
    assert limits.user_memory == 2**34 - 128 * MIB
