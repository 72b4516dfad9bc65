"""Watching as the agent serves it (behaviour.md 8, trap B34)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sandgate_agent.shared_queue import SharedQueue
from sandgate_agent.tree_watch import TreeWatch
from sandgate_agent.watch import Watch
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_errors import Internal
from sandgate_testing.agent_process import Agent, an_agent, code_of, eventually


def told(events: Any) -> list[str]:
    return [f"{pb.EventType.Name(event.type).removeprefix('EVENT_TYPE_')} {event.name}" for event in events]


async def create(agent: Agent, path: object, **options: Any) -> str:
    request = pb.CreateWatcherRequest(path=str(path), **options)
    return str((await agent.files.CreateWatcher(request, metadata=agent.metadata())).watcher_id)


async def poll(agent: Agent, watcher: str) -> list[Any]:
    request = pb.GetWatcherEventsRequest(watcher_id=watcher)
    return list((await agent.files.GetWatcherEvents(request, metadata=agent.metadata())).events)


async def remove(agent: Agent, watcher: str) -> None:
    await agent.files.RemoveWatcher(pb.RemoveWatcherRequest(watcher_id=watcher), metadata=agent.metadata())


@asynccontextmanager
async def stream(agent: Agent, path: object, **options: Any) -> AsyncIterator[Any]:
    """A WatchDir call whose watch is active."""
    metadata = agent.metadata(**{key: options.pop(key) for key in ("timeout_ms", "keepalive") if key in options})
    call = agent.files.WatchDir(pb.WatchDirRequest(path=str(path), **options), metadata=metadata)
    try:
        first: Any = await call.read()
        assert first.WhichOneof("event") == "start", first  # F36
        yield call
    finally:
        call.cancel()


async def next_events(call: Any, count: int) -> list[str]:
    async with asyncio.timeout(20):
        return told([(await call.read()).filesystem for _ in range(count)])


def queues_of(agent: Agent) -> int:
    """The agent's inotify instances."""
    folder = f"/proc/{agent.pid}/fd"
    found = 0
    for name in os.listdir(folder):
        try:
            found += "inotify" in os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            pass
    return found


async def test_upload_of_a_new_file_is_three_events(any_agent: Agent) -> None:
    """F44 under every identity, by polling and by stream."""
    agent, home = any_agent, any_agent.home
    watcher = await create(agent, home)
    async with stream(agent, home) as call:
        await agent.write(f"{home}/f", b"content")
        assert told(await poll(agent, watcher)) == ["CREATE f", "CHMOD f", "WRITE f"]
        assert await next_events(call, 3) == ["CREATE f", "CHMOD f", "WRITE f"]
        await agent.write(f"{home}/f", b"CONTENT")
        assert told(await poll(agent, watcher)) == ["CHMOD f", "WRITE f"]
        assert await next_events(call, 2) == ["CHMOD f", "WRITE f"]
        await agent.write(f"{home}/empty")
        assert told(await poll(agent, watcher)) == ["CREATE empty", "CHMOD empty"]
        assert await next_events(call, 2) == ["CREATE empty", "CHMOD empty"]


async def test_metadata_of_an_upload_is_one_more_change_of_attributes(agent: Agent) -> None:
    """F44."""
    watcher = await create(agent, agent.home, include_entry=True)
    await agent.write(f"{agent.home}/f", b"content", metadata={"key": "value"})
    events = await poll(agent, watcher)
    assert told(events) == ["CREATE f", "CHMOD f", "WRITE f", "CHMOD f"]
    assert dict(events[-1].entry.metadata) == {"key": "value"}


async def test_events_of_an_answered_operation_are_there_at_once(agent: Agent) -> None:
    """F43: no window in which they are missing, however often it is tried."""
    watcher = await create(agent, agent.home, recursive=True)
    for number in range(60):
        await agent.write(f"{agent.home}/d{number}/f", b"x")
        events = told(await poll(agent, watcher))
        assert f"CREATE d{number}" in events
        assert f"CREATE d{number}/f" in events
    assert await poll(agent, watcher) == []


async def test_polled_watcher_outlives_the_connection_that_made_it(agent: Agent) -> None:
    """F38."""
    async with grpc.aio.insecure_channel(agent.target) as other:
        create_watcher = other.unary_unary(
            "/sandgate_api.envd.v1.Filesystem/CreateWatcher",
            request_serializer=pb.CreateWatcherRequest.SerializeToString,
            response_deserializer=pb.CreateWatcherResponse.FromString,
        )
        reply = await create_watcher(pb.CreateWatcherRequest(path=str(agent.home)), metadata=agent.metadata())
    (agent.home / "late").symlink_to("x")
    assert told(await poll(agent, reply.watcher_id)) == ["CREATE late"]


async def test_unknown_and_removed_watchers_are_not_found(agent: Agent) -> None:
    """F37."""
    watcher = await create(agent, agent.home)
    await remove(agent, watcher)
    for unknown in (watcher, "", "x" * 100_000):
        async with code_of(grpc.StatusCode.NOT_FOUND, "watcher"):
            await poll(agent, unknown)
        async with code_of(grpc.StatusCode.NOT_FOUND, "watcher"):
            await remove(agent, unknown)


async def test_entries_come_with_what_is_still_there(agent: Agent) -> None:
    """F45."""
    watcher = await create(agent, agent.home, include_entry=True)
    (agent.home / "f").write_text("four")
    os.symlink("f", agent.home / "link")
    (agent.home / "gone").touch()
    (agent.home / "gone").unlink()
    (agent.home / "f").rename(agent.home / "g")
    agent.home.chmod(0o700)
    events = await poll(agent, watcher)
    found = {f"{line}": event for line, event in zip(told(events), events, strict=True)}
    for line in ("REMOVE gone", "RENAME f"):
        assert not found[line].HasField("entry"), line
    entry = found["CREATE g"].entry
    assert (entry.name, entry.path, entry.size, entry.type) == ("g", f"{agent.home}/g", 4, pb.FILE_TYPE_FILE)
    assert found["CREATE link"].entry.is_symlink
    assert found["CHMOD ."].entry.path == str(agent.home)
    assert not any(event.HasField("entry") for event in await poll(agent, await create(agent, agent.home)))


async def test_recursive_watch_hears_of_new_directories_while_nobody_polls(agent: Agent) -> None:
    """F42: the agent reads by itself, so a directory is watched before much happens in it."""
    watcher = await create(agent, agent.home, recursive=True)
    (agent.home / "new").mkdir()
    async with stream(agent, agent.home / "new") as call:
        await asyncio.sleep(0.2)
        for number in range(3):
            (agent.home / f"new/{number}").symlink_to("x")
        await next_events(call, 3)
    for number in range(3):
        (agent.home / f"new/{number}").unlink()
    assert told(await poll(agent, watcher)) == [
        "CREATE new",
        *(f"CREATE new/{number}" for number in range(3)),
        *(f"REMOVE new/{number}" for number in range(3)),
    ]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("none", grpc.StatusCode.NOT_FOUND),
        ("file", grpc.StatusCode.INVALID_ARGUMENT),
        ("file/below", grpc.StatusCode.NOT_FOUND),
        ("loop", grpc.StatusCode.FAILED_PRECONDITION),
        ("~other", grpc.StatusCode.INVALID_ARGUMENT),
        ("nul\0byte", grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 300, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_cannot_be_watched_is_refused_both_ways(agent: Agent, path: str, code: grpc.StatusCode) -> None:
    """F34, B29."""
    (agent.home / "file").touch()
    (agent.home / "loop").symlink_to("loop")
    async with code_of(code):
        await create(agent, path)
    async with code_of(code), stream(agent, path):
        pass
    assert queues_of(agent) == 0


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A FUSE file system of another user: the kernel says what it is, and asks its server (there is none) nothing."""
    mount = tmp_path / "fuse"
    mount.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"this machine has no FUSE: {error}")
    command = ["mount", "-i", "-t", "fuse", "none", str(mount), "-o", f"fd={fd},rootmode=40000,user_id=1,group_id=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[fd])
    if done.returncode != 0:
        os.close(fd)
        pytest.skip(f"a FUSE file system cannot be mounted here: {done.stderr}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
        os.close(fd)


async def test_keepalives_fill_the_silence_and_the_time_limit_ends_the_stream(agent: Agent) -> None:
    async with stream(agent, agent.home, timeout_ms=2500, keepalive=1) as call:
        async with asyncio.timeout(20):
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["keepalive"] * 2
            async with code_of(grpc.StatusCode.DEADLINE_EXCEEDED, "time limit"):
                await call.read()
    await eventually(lambda: queues_of(agent) == 0)


async def test_caller_that_leaves_frees_the_watch(agent: Agent) -> None:
    """F48."""
    for _ in range(20):
        async with stream(agent, agent.home):
            assert queues_of(agent) == 1
        await eventually(lambda: queues_of(agent) == 0)


async def test_lost_events_fail_the_watch_both_ways(agent: Agent) -> None:
    """F46: an agent that stands still long enough loses events, and says so instead of showing a part."""
    longest = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if longest > 50_000:
        pytest.skip("this system's queue is too long to be filled here")
    watcher = await create(agent, agent.home)
    async with stream(agent, agent.home) as call:
        os.kill(agent.pid, signal.SIGSTOP)
        link = agent.home / "f"
        for _ in range(longest // 2 + 10):
            link.symlink_to("x")
            link.unlink()
        os.kill(agent.pid, signal.SIGCONT)
        async with code_of(grpc.StatusCode.INTERNAL, "too many changes"), asyncio.timeout(60):
            while await call.read() is not grpc.aio.EOF:
                pass
    for _ in range(2):
        async with code_of(grpc.StatusCode.INTERNAL, "too many changes"):
            await poll(agent, watcher)
    await remove(agent, watcher)
    await eventually(lambda: queues_of(agent) == 0)


async def test_events_that_nobody_fetches_end_the_watch_and_not_the_memory(tmp_path: Path) -> None:
    watch = Watch(
        TreeWatch(str(tmp_path), recursive=False, cancelled=lambda: False, queue=SharedQueue()),
        entries_by=None,
        most_events=10,
    )
    try:
        for number in range(10):
            (tmp_path / str(number)).symlink_to("x")
        await watch.read()
        assert len(watch.take()) == 10
        for number in range(10, 21):
            (tmp_path / str(number)).symlink_to("x")
        await watch.read()
        for _ in range(2):
            with pytest.raises(Internal, match="not fetched"):
                watch.take()
            await watch.read()
    finally:
        watch.close()


async def test_watches_come_and_go_without_a_trace(agent: Agent) -> None:
    """B34: polled ones stopped, streams dropped, openings cancelled in the middle."""
    (agent.home / "a/b/c").mkdir(parents=True)
    await remove(agent, await create(agent, agent.home))
    await eventually(lambda: queues_of(agent) == 0)
    before = agent.descriptors()
    for number in range(400):
        await remove(agent, await create(agent, agent.home, recursive=number % 2 == 0))
    calls = [
        agent.files.WatchDir(pb.WatchDirRequest(path=str(agent.home), recursive=True), metadata=agent.metadata())
        for _ in range(60)
    ]
    for number, call in enumerate(calls):
        if number % 3:
            await call.read()
        call.cancel()
    await eventually(lambda: queues_of(agent) == 0)
    await eventually(lambda: agent.descriptors() <= before)


def limited(setting: str, number: int) -> tuple[str, ...]:
    """A user namespace for an agent in which the kernel allows only so many: limits of this machine are others' too."""
    set_limit = f'echo {number} > /proc/sys/user/{setting} && exec "$@"'
    return ("unshare", "--user", "--map-root-user", "sh", "-c", set_limit, "sh")


async def test_three_hundred_watchers_in_one_sandbox_are_one_queue_of_the_kernel(agent: Agent) -> None:
    """B34: the kernel allows a user 128 queues, and all sandboxes of a gateway may be one user's."""
    watchers = [await create(agent, agent.home, recursive=number % 2 == 0) for number in range(300)]
    assert queues_of(agent) == 1
    await agent.write(f"{agent.home}/f", b"content")
    for watcher in watchers:
        assert told(await poll(agent, watcher)) == ["CREATE f", "CHMOD f", "WRITE f"]
    for watcher in watchers[1:]:
        await remove(agent, watcher)
    (agent.home / "late").symlink_to("x")
    assert told(await poll(agent, watchers[0])) == ["CREATE late"]
    await remove(agent, watchers[0])
    await eventually(lambda: queues_of(agent) == 0)


async def test_watch_is_refused_where_the_system_has_no_queue_left() -> None:
    prefix = limited("max_inotify_instances", 0)
    refused = code_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "inotify instances")
    async with an_agent("nested", prefix=prefix) as agent, refused:
        await create(agent, agent.home)


async def test_limit_of_watched_directories_is_told_and_frees_itself() -> None:
    async with an_agent("nested", prefix=limited("max_inotify_watches", 20)) as agent:
        for number in range(30):
            (agent.home / str(number)).mkdir()
        for _ in range(3):
            async with code_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit of watches"):
                await create(agent, agent.home, recursive=True)
            await eventually(lambda: queues_of(agent) == 0)
        flat = await create(agent, agent.home)
        async with code_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit of watches"):
            await create(agent, agent.home, recursive=True)
        (agent.home / "f").symlink_to("x")
        assert told(await poll(agent, flat)) == ["CREATE f"]
        assert len({await create(agent, agent.home / str(number)) for number in range(19)}) == 19


async def test_agent_ends_with_watches_open(agent: Agent) -> None:
    await create(agent, agent.home, recursive=True)
    async with stream(agent, agent.home) as call:
        assert agent.process is not None
        agent.process.terminate()
        assert await asyncio.to_thread(agent.process.wait, 10) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_network_file_systems_are_refused_unless_allowed(agent: Agent, fuse: Path) -> None:
    """F35."""
    async with code_of(grpc.StatusCode.INVALID_ARGUMENT, "network file system"):
        await create(agent, fuse)
    async with code_of(grpc.StatusCode.INVALID_ARGUMENT, "network file system"), stream(agent, fuse):
        pass
    # Let through, it fails for another reason: this one belongs to somebody else.
    async with code_of(grpc.StatusCode.PERMISSION_DENIED):
        await create(agent, fuse, allow_network_mounts=True)
