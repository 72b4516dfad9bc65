"""Content of files: behaviour.md section 9."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from sandgate_agent.content import PIECE_SIZE
from sandgate_api.agent.v1 import agent_pb2 as pb
from sandgate_testing.agent_process import Agent, code_of, eventually

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
INTERNAL = grpc.StatusCode.INTERNAL


async def header(agent: Agent, path: str) -> pb.ReadFileResponse.Header:
    request = pb.ReadFileRequest(path=path, header_only=True)
    (only,) = [part async for part in agent.agent.ReadFile(request, metadata=agent.metadata())]
    return only.header


@pytest.mark.parametrize(
    "size", [0, 1, 127, 128, 16_383, 16_384, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, 3_000_001]
)
async def test_content_comes_back_as_it_went(any_agent: Agent, size: int) -> None:
    """D11, D23, D24, B26."""
    data = os.urandom(size)
    pieces = [data[start : start + 100_000] for start in range(0, size, 100_000)]
    path = any_agent.home / "sub/f.bin"
    entry = await any_agent.write(str(path), *pieces)
    assert path.read_bytes() == data
    assert (entry.name, entry.path, entry.size, entry.type) == ("f.bin", str(path), size, 1)
    assert (entry.mode, entry.owner) == (0o644, any_agent.user)
    assert await any_agent.read(str(path)) == data
    found = await header(any_agent, str(path))
    assert (found.path, found.name, found.size) == (str(path), "f.bin", size)
    assert found.modified_time.ToNanoseconds() == path.stat().st_mtime_ns


async def test_ranges(agent: Agent) -> None:
    data = bytes(range(256)) * 3000
    await agent.write("f", data)
    for offset, length in ((0, 10), (5, 300_000), (767_990, 100), (768_000, 1), (10**15, 5), (3, 0), (2**64 - 1, 1)):
        assert await agent.read("f", offset=offset, length=length) == data[offset : offset + length]
    assert await agent.read("f", offset=700_000) == data[700_000:]


async def test_what_cannot_be_read(agent: Agent) -> None:
    """D5, D14."""
    os.mkfifo(agent.home / "pipe")
    (agent.home / "f").touch()
    (agent.home / "loop").symlink_to("loop")
    async with code_of(NOT_FOUND, f"path '{agent.home}/no' does not exist"):
        await agent.read("no")
    async with code_of(NOT_FOUND):
        await agent.read("f/x")
    for path in ("", "/tmp"):
        async with code_of(INVALID, "is a directory"):
            await agent.read(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(agent.home / "sock"))
        for path in ("pipe", "sock", "/dev/null", "/dev/zero", "/dev/tty"):
            async with code_of(INVALID, "is not a regular file"):
                await agent.read(path)
            async with code_of(INVALID, "is not a regular file"):
                await agent.write(path, b"x")
    async with code_of(grpc.StatusCode.FAILED_PRECONDITION):
        await agent.read("loop")


async def test_virtual_files_are_read_to_their_end(agent: Agent) -> None:
    """D12."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    assert await agent.read("/proc/sys/kernel/random/boot_id") == boot_id
    assert (await agent.read("/proc/cpuinfo")).startswith(b"processor")


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/self/clear_refs"])
async def test_virtual_file_that_has_nothing_to_read_is_the_callers_mistake(agent: Agent, path: str) -> None:
    """EIO and EINVAL of the kernel are no fault of the agent."""
    async with code_of(INVALID, f"the system does not accept this for path '{path}'"):
        await agent.read(path)


async def test_virtual_file_that_refuses_what_is_written_is_the_callers_mistake(agent: Agent) -> None:
    """D31: EINVAL for what is no number, EIO for an address where nothing is."""
    for path in ("/proc/self/oom_score_adj", "/proc/self/clear_refs", "/proc/self/mem"):
        async with code_of(INVALID, f"the system does not accept this for path '{path}'"):
            await agent.write(path, b"junk")


async def test_file_that_grows_is_read_to_where_it_ended(agent: Agent) -> None:
    async with agent.running("/bin/sh", "-c", "exec cat /dev/zero > grows", cwd="~"):
        await eventually(lambda: (agent.home / "grows").exists() and (agent.home / "grows").stat().st_size > 1_000_000)
        request = pb.ReadFileRequest(path="grows")
        call = agent.agent.ReadFile(request, metadata=agent.metadata())
        parts = [part async for part in call]
    assert sum(len(part.data) for part in parts) == parts[0].header.size
    (agent.home / "grows").unlink()


async def test_links_are_followed(agent: Agent) -> None:
    """D13, D25."""
    (agent.home / "real").write_text("old")
    (agent.home / "link").symlink_to("real")
    (agent.home / "broken").symlink_to("made")
    assert await agent.read("link") == b"old"
    await agent.write("link", b"new!")
    assert (agent.home / "real").read_text() == "new!"
    await agent.write("broken", b"x")
    assert (agent.home / "made").read_text() == "x"
    assert (agent.home / "link").is_symlink()


async def test_existing_file_is_written_in_place(switching: Agent) -> None:
    """D23, D24: mode and hard links stay, the owner becomes the acting user."""
    path = switching.home / "f"
    path.write_text("a much longer old content")
    path.chmod(0o664)
    os.link(path, switching.home / "other")
    os.chown(path, 12345, 12345)
    entry = await switching.write(str(path), b"short")
    assert (switching.home / "other").read_text() == "short"
    assert (entry.mode, entry.owner, entry.size) == (0o664, "nobody", 5)
    await switching.write(str(path), user="root")
    assert path.read_bytes() == b""
    assert path.stat().st_uid == 0


async def test_other_users_files_in_sticky_directories_can_be_overwritten(switching: Agent) -> None:
    """F1: where the kernel refuses O_CREAT on an existing file even to root."""
    folder = switching.folder / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "f").write_text("theirs")
    os.chown(folder / "f", 12345, 12345)
    os.chown(folder, 54321, 54321)
    await switching.write(f"{folder}/f", b"ours")
    assert (folder / "f").read_text() == "ours"


async def test_parents_are_made_for_the_acting_user(switching: Agent) -> None:
    """D22, D32, B28."""
    await asyncio.gather(*(switching.write(f"/{switching.folder}/p/{n % 5}/x/{n}", b"%d" % n) for n in range(60)))
    for number in range(60):
        path = switching.folder / f"p/{number % 5}/x/{number}"
        assert path.read_text() == str(number)
        for made in (path, path.parent, path.parent.parent, path.parent.parent.parent):
            assert made.stat().st_uid == 65534
            assert made.stat().st_mode & 0o777 == (0o644 if made == path else 0o755)


async def test_what_cannot_be_written(agent: Agent) -> None:
    """D26."""
    (agent.home / "f").touch()
    for path in ("", "/tmp"):
        async with code_of(INVALID, "is a directory"):
            await agent.write(path, b"x")
    async with code_of(INTERNAL, "a parent of path"):
        await agent.write("f/x", b"x")


async def test_messages_out_of_order_are_refused(agent: Agent) -> None:
    async def send(*requests: pb.WriteFileRequest) -> None:
        async def stream() -> AsyncIterator[pb.WriteFileRequest]:
            for request in requests:
                yield request

        await agent.agent.WriteFile(stream(), metadata=agent.metadata())

    head = pb.WriteFileRequest(header=pb.WriteFileRequest.Header(path="f"))
    for requests in ([], [pb.WriteFileRequest(data=b"x")], [pb.WriteFileRequest()], [head, head]):
        async with code_of(INVALID):
            await send(*requests)


async def test_broken_off_upload_keeps_what_arrived(agent: Agent) -> None:
    """D24, and no descriptor."""
    (agent.home / "f").write_bytes(b"o" * 300_000)
    before = agent.descriptors()
    arrived = asyncio.Event()

    async def stream() -> AsyncIterator[pb.WriteFileRequest]:
        yield pb.WriteFileRequest(header=pb.WriteFileRequest.Header(path="f"))
        yield pb.WriteFileRequest(data=b"n" * 100_000)
        arrived.set()
        await asyncio.sleep(60)

    call = agent.agent.WriteFile(stream(), metadata=agent.metadata())
    await arrived.wait()
    await eventually(lambda: (agent.home / "f").read_bytes() == b"n" * 100_000)
    call.cancel()
    await eventually(lambda: agent.descriptors() <= before)
    assert (agent.home / "f").read_bytes() == b"n" * 100_000


async def test_broken_off_download_leaves_no_descriptor(agent: Agent) -> None:
    (agent.home / "big").write_bytes(bytes(20_000_000))
    before = agent.descriptors()
    for _ in range(20):
        call = agent.agent.ReadFile(pb.ReadFileRequest(path="big"), metadata=agent.metadata())
        await call.read()
        call.cancel()
    await eventually(lambda: agent.descriptors() <= before)


async def test_memory_stays_flat_both_ways(agent: Agent) -> None:
    """D34."""
    piece = os.urandom(250_000)

    async def round_trip() -> None:
        await agent.write("big", *([piece] * 400))
        digest = hashlib.sha256()
        async for part in agent.agent.ReadFile(pb.ReadFileRequest(path="big"), metadata=agent.metadata()):
            digest.update(part.data)
        assert digest.digest() == hashlib.sha256(piece * 400).digest()

    await round_trip()
    before = _peak(agent.pid)
    await round_trip()
    assert _peak(agent.pid) < before + 20_000


def _peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


@pytest.fixture
def small_disk(agent: Agent) -> Iterator[Path]:
    """A file system of 1 MiB and 20 inodes."""
    folder = agent.folder / "disk"
    folder.mkdir()
    options = "size=1m,nr_inodes=20"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


async def test_full_disk_says_how_much_was_attempted(agent: Agent, small_disk: Path) -> None:
    """D29, B35."""
    text = "attempted to write 2000000 bytes: not enough disk space available"
    with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
        await agent.write(f"{small_disk}/f", b"x" * 1_000_000, b"x" * 1_000_000)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ())["error-reason"] == "no_space"
    assert (await agent.run("echo", "ok")).text == "ok\n"
    size = (small_disk / "f").stat().st_size
    await agent.write(f"{small_disk}/f", b"y" * size)
    assert (small_disk / "f").read_bytes() == b"y" * size


async def test_no_inodes_left_is_no_space(agent: Agent, small_disk: Path) -> None:
    """D29."""
    for number in range(18):
        (small_disk / str(number)).touch()
    async with code_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "not enough inodes available"):
        await asyncio.gather(*(agent.write(f"{small_disk}/new{number}", b"x") for number in range(5)))


def keeps_attributes(folder: Path) -> bool:
    probe = folder / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.probe", b"1")
    except OSError:
        return False
    finally:
        probe.unlink()
    return True


async def test_metadata_is_kept_shown_and_replaced(agent: Agent) -> None:
    """F14, D35."""
    if not keeps_attributes(agent.home):
        pytest.skip("the file system keeps no user attributes")
    entry = await agent.write("f", b"x", metadata={"one": "1", "two": "2"})
    assert dict(entry.metadata) == {"one": "1", "two": "2"}
    # What was said of the old content is not true of the new.
    assert dict((await agent.write("f", b"y")).metadata) == {}
    assert dict((await agent.stat("f")).metadata) == {}
    await agent.write("f", b"z", metadata={"two": "zwei"})
    os.setxattr(agent.home / "f", "user.e2b.raw", b"\xff")
    os.setxattr(agent.home / "f", "user.other", b"1")
    assert dict((await agent.stat("f")).metadata) == {"two": "zwei"}
    assert [dict(entry.metadata) for entry in await agent.listing("")] == [{"two": "zwei"}]


async def test_file_system_without_attributes_stores_none_and_fails_nothing(agent: Agent) -> None:
    """F15, D31, D36."""
    path = "/proc/sys/kernel/domainname"
    if not os.access(path, os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs a virtual file to write")
    old = await agent.read(path)
    entry = await agent.write(path, old, metadata={"k": "v"})
    assert dict(entry.metadata) == {}


async def test_variables_of_every_command_are_told(agent: Agent) -> None:
    """H4: those of the last Init, and the agent's own, which win (P13, P15)."""
    envs = {"ONE": "eins", "E2B_SANDBOX_ID": "another"}
    init = pb.InitRequest(sandbox_id="ione", template_id="base", envs=envs)
    await agent.agent.Init(init, metadata=agent.metadata())
    reply = await agent.agent.GetEnvs(pb.GetEnvsRequest(), metadata=agent.metadata())
    own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "ione", "E2B_TEMPLATE_ID": "base"}
    assert dict(reply.envs) == {"ONE": "eins", **own}


async def test_metrics_are_plausible(agent: Agent) -> None:
    """H3."""
    await agent.agent.Metrics(pb.MetricsRequest(), metadata=agent.metadata())
    await agent.sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    reply = await agent.agent.Metrics(pb.MetricsRequest(), metadata=agent.metadata())
    assert reply.cpu_count == len(os.sched_getaffinity(0))
    assert 0 < reply.cpu_used_pct <= 100
    assert 0 < reply.mem_used < reply.mem_total
    assert 0 < reply.disk_used < reply.disk_total
    assert abs(reply.time.seconds - __import__("time").time()) < 60
