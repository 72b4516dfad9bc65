"""The tree of files: behaviour.md section 7."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandgate_agent.accounts import Accounts, OwnerNames
from sandgate_agent.files import list_directory
from sandgate_agent.services.filesystem import in_thread
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_testing.agent_process import Agent, code_of

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXISTS = grpc.StatusCode.ALREADY_EXISTS
INTERNAL = grpc.StatusCode.INTERNAL
FILE, DIRECTORY, SYMLINK = pb.FILE_TYPE_FILE, pb.FILE_TYPE_DIRECTORY, pb.FILE_TYPE_SYMLINK


async def make_dir(agent: Agent, path: str, user: str | None = None) -> pb.EntryInfo:
    return (await agent.files.MakeDir(pb.MakeDirRequest(path=path), metadata=agent.metadata(user=user))).entry


async def move(agent: Agent, source: str, destination: str) -> pb.EntryInfo:
    request = pb.MoveRequest(source=source, destination=destination)
    return (await agent.files.Move(request, metadata=agent.metadata())).entry


async def remove(agent: Agent, path: str) -> None:
    await agent.files.Remove(pb.RemoveRequest(path=path), metadata=agent.metadata())


async def test_entry_of_a_file_has_every_field(any_agent: Agent) -> None:
    """F6, F8-F12."""
    path = any_agent.home / "f.txt"
    path.write_bytes(b"12345")
    path.chmod(0o4640)
    if any_agent.identity == "switch":
        os.chown(path, 65534, 65534)
        path.chmod(0o4640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    entry = await any_agent.stat(str(path))
    assert (entry.name, entry.path, entry.type, entry.size) == ("f.txt", str(path), FILE, 5)
    assert (entry.mode, entry.permissions) == (0o640, "urw-r-----")
    assert (entry.owner, entry.group) == (any_agent.user, "nogroup" if any_agent.user == "nobody" else "user")
    assert (entry.modified_time.seconds, entry.modified_time.nanos) == (1_700_000_000, 123_456_789)
    assert not entry.HasField("symlink_target")
    assert not entry.is_symlink
    assert not entry.metadata


async def test_owner_without_a_name_is_its_number(agent: Agent) -> None:
    """F11."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path = agent.home / "f"
    path.touch()
    os.chown(path, 54321, 54322)
    entry = await agent.stat("f")
    assert (entry.owner, entry.group) == ("54321", "54322")


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o755, "drwxr-xr-x"),
        (0o1777, "dtrwxrwxrwx"),
        (0o2750, "dgrwxr-x---"),
        (0o7000, "dugt---------"),
    ],
)
async def test_permissions_read_as_in_go(agent: Agent, mode: int, text: str) -> None:
    """F10."""
    path = agent.home / "d"
    path.mkdir()
    path.chmod(mode)
    entry = await agent.stat("d")
    assert entry.permissions == text
    assert entry.mode == mode & 0o777


async def test_special_files_are_of_unspecified_type(agent: Agent) -> None:
    """F7, F10."""
    os.mkfifo(agent.home / "pipe", 0o644)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(agent.home / "sock"))
        texts = {entry.name: (entry.type, entry.permissions[0]) for entry in await agent.listing("")}
    assert texts == {"pipe": (0, "p"), "sock": (0, "S")}
    assert (await agent.stat("/dev/null")).permissions == "Dcrw-rw-rw-"


async def test_links(agent: Agent) -> None:
    """F7-F10, F13, F16, F17; a link that leads nowhere has the link's own type."""
    (agent.home / "real").write_text("abc")
    (agent.home / "real").chmod(0o600)
    (agent.home / "dir").mkdir()
    for name, target in {"file": "real", "two": "file", "folder": "dir", "broken": "nothing", "loop": "loop"}.items():
        (agent.home / name).symlink_to(target)
    home = os.path.realpath(agent.home)
    entries = {entry.name: entry for entry in await agent.listing("")}
    for name in ("file", "two"):
        entry = entries[name]
        assert (entry.type, entry.mode, entry.is_symlink) == (FILE, 0o600, True)
        assert entry.symlink_target == f"{home}/real"
        assert entry.permissions == "Lrwxrwxrwx"
        assert entry.size == len(os.readlink(agent.home / name))
    assert (entries["folder"].type, entries["folder"].symlink_target) == (DIRECTORY, f"{home}/dir")
    for name in ("broken", "loop"):
        assert (entries[name].type, entries[name].symlink_target) == (SYMLINK, f"{agent.home}/{name}")
        assert await agent.stat(name) == entries[name]


async def test_missing_paths_are_not_found(agent: Agent) -> None:
    """F16, F22, F29, B29."""
    (agent.home / "f").touch()
    for path in ("no", "no/such", "f/below"):
        async with code_of(NOT_FOUND, f"path '{agent.home}/{path}' does not exist"):
            await agent.stat(path)
        async with code_of(NOT_FOUND):
            await agent.listing(path)
        async with code_of(NOT_FOUND):
            await move(agent, path, "elsewhere")
        await remove(agent, path)
    assert sorted(os.listdir(agent.home)) == ["f"]


async def test_paths_mean_what_they_mean_to_the_acting_user(agent: Agent) -> None:
    """F2-F5."""
    (agent.home / "a").mkdir()
    for path in ("a", "~/a", "./a/../a/", f"{agent.home}//a", "a/.", "~//a"):
        assert (await agent.stat(path)).path == f"{agent.home}/a", path
    assert (await agent.stat("")).path == str(agent.home)
    assert (await agent.stat("//")).path == "/"
    assert (await agent.stat("/..")).name == "/"
    await agent.init(default_workdir="/usr")
    assert (await agent.stat("")).path == "/usr"
    assert (await agent.stat("a")).path == f"{agent.home}/a"


@pytest.mark.parametrize("path", ["~root", "~root/x", "a\0b", "x/" * 2500, "y" * 256, "ü" * 128])
async def test_paths_that_cannot_be_are_refused(agent: Agent, path: str) -> None:
    """F3."""
    for call in (agent.stat, agent.listing, agent.read, agent.write):
        async with code_of(INVALID):
            await call(path)  # type: ignore[operator]


async def test_listing_is_in_pre_order_by_bytes(agent: Agent) -> None:
    """F18-F20, B31."""
    for path in ("a/c/e", "a-b", "a/b", "ü", "Z", ".hidden"):
        (agent.home / path).mkdir(parents=True)
    (agent.home / "a.txt").touch()

    async def names(depth: int) -> list[str]:
        return [os.path.relpath(entry.path, agent.home) for entry in await agent.listing("", depth)]

    top = [".hidden", "Z", "a", "a-b", "a.txt", "ü"]
    assert await names(0) == await names(1) == top
    assert await names(2) == [".hidden", "Z", "a", "a/b", "a/c", "a-b", "a.txt", "ü"]
    assert await names(99) == [".hidden", "Z", "a", "a/b", "a/c", "a/c/e", "a-b", "a.txt", "ü"]
    assert await names(4_000_000_000) == await names(3)


def test_listing_whose_caller_has_gone_stops_at_the_next_directory(tmp_path: Path) -> None:
    """Its thread cannot be cancelled; one that walks on would keep the others waiting."""
    (tmp_path / "/".join("d" * 100)).mkdir(parents=True)
    accounts = Accounts("same", {"user": str(tmp_path)})
    names = OwnerNames(accounts, accounts.find("user"))
    answers = iter([False] * 5 + [True])
    assert len(list_directory(str(tmp_path), 1000, names, cancelled=lambda: next(answers))) == 5


async def test_cancelled_listing_tells_its_thread() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def walk(cancelled: Callable[[], bool]) -> None:
        begun.set()
        while not cancelled():
            time.sleep(0.001)
        stopped.set()

    walking = asyncio.create_task(in_thread(walk))
    assert await asyncio.to_thread(begun.wait, 20)
    walking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await walking
    assert await asyncio.to_thread(stopped.wait, 20)


async def test_listing_follows_a_link_at_its_root_only(agent: Agent) -> None:
    """F21."""
    (agent.home / "d/sub").mkdir(parents=True)
    (agent.home / "link").symlink_to("d")
    (agent.home / "d/up").symlink_to("..")
    paths = [entry.path for entry in await agent.listing("link", 9)]
    assert paths == [f"{agent.home}/link/sub", f"{agent.home}/link/up"]


async def test_listing_what_is_no_directory(agent: Agent) -> None:
    """F22."""
    (agent.home / "f").touch()
    (agent.home / "loop").symlink_to("loop")
    async with code_of(INVALID, "is not a directory"):
        await agent.listing("f")
    async with code_of(grpc.StatusCode.FAILED_PRECONDITION):
        await agent.listing("loop")


async def test_names_that_are_not_text_do_not_break_a_listing(agent: Agent) -> None:
    os.mkdir(os.fsencode(agent.home) + b"/\xff\xfe")
    os.mkdir(os.fsencode(agent.home) + b"/\xff\xfe/in")
    entries = await agent.listing("", 2)
    assert [entry.name for entry in entries] == ["\ufffd\ufffd", "in"]


async def test_listing_while_entries_vanish(agent: Agent) -> None:
    """F23, B31."""
    script = "while :; do mkdir -p d/e; touch d/e/f; rm -rf d; touch g; rm g; done"
    async with agent.running("/bin/sh", "-c", script, cwd="~"):
        for _ in range(100):
            await agent.listing("", 5)
    await agent.listing("/proc/self/fd")
    await agent.listing("/dev", 9)


async def test_listing_much_is_fast(agent: Agent) -> None:
    for number in range(10_000):
        os.close(os.open(agent.home / f"{number}", os.O_CREAT | os.O_WRONLY))
    assert len(await agent.listing("")) == 10_000

    def agent_cpu() -> float:
        fields = Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    # Processor time and not the clock's: that depends on what else runs.
    began = time.process_time()
    for _ in range(10):
        with os.scandir(agent.home) as entries:
            assert len([os.lstat(entry.path) for entry in entries]) == 10_000
    plain = time.process_time() - began
    began = agent_cpu()
    for _ in range(10):
        await agent.listing("")
    assert (agent_cpu() - began) / plain < 8


async def test_made_directories_belong_to_the_acting_user(any_agent: Agent) -> None:
    """F25, F1: anywhere, with parents; what is there already stays as it is."""
    base = any_agent.folder / "root-only"
    base.mkdir(mode=0o700)
    entry = await make_dir(any_agent, f"{base}/x/y")
    assert (entry.name, entry.type, entry.mode, entry.owner) == ("y", DIRECTORY, 0o755, any_agent.user)
    uid = 65534 if any_agent.identity == "switch" else os.geteuid()
    for path in (base / "x", base / "x/y"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (uid, 0o755)
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert base.stat().st_uid == os.geteuid()


async def test_making_what_is_there(agent: Agent) -> None:
    """F26, F27."""
    (agent.home / "d").mkdir()
    (agent.home / "f").touch()
    (agent.home / "l").symlink_to("d")
    (agent.home / "broken").symlink_to("nothing")
    for path in ("d", "", "/", "l"):
        async with code_of(EXISTS):
            await make_dir(agent, path)
    async with code_of(INVALID, "is not a directory"):
        await make_dir(agent, "f")
    async with code_of(INTERNAL, "a parent of path"):
        await make_dir(agent, "f/x")
    async with code_of(INTERNAL):
        await make_dir(agent, "broken/x")
    assert (await make_dir(agent, "l/x")).path == f"{agent.home}/l/x"
    assert (agent.home / "d/x").is_dir()


async def test_many_make_the_same_directory_at_once(agent: Agent) -> None:
    results = await asyncio.gather(*(make_dir(agent, "p/q/r") for _ in range(20)), return_exceptions=True)
    made = [result for result in results if not isinstance(result, BaseException)]
    assert len(made) == 1
    refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert {error.code() for error in refused} == {EXISTS}


async def test_move(agent: Agent) -> None:
    """F28, F30, F32."""
    (agent.home / "a").write_text("new")
    (agent.home / "b").write_text("old")
    (agent.home / "link").symlink_to("nowhere")
    entry = await move(agent, "a", "b")
    assert (entry.path, entry.size) == (f"{agent.home}/b", 3)
    await move(agent, "b", "x/y/z")
    assert (agent.home / "x/y/z").read_text() == "new"
    assert (await move(agent, "link", "link2")).type == SYMLINK
    (agent.home / "empty").mkdir()
    await move(agent, "x", "empty")
    assert (agent.home / "empty/y/z").exists()


async def test_moves_that_cannot_be_leave_the_source(agent: Agent) -> None:
    """F31."""
    (agent.home / "d/sub").mkdir(parents=True)
    (agent.home / "full/x").mkdir(parents=True)
    (agent.home / "f").touch()
    for source, destination in (("d", "full"), ("d", "d/sub/d"), ("f", "full"), ("d", "f"), ("f", "f/g")):
        async with code_of(INTERNAL):
            await move(agent, source, destination)
    async with code_of(INTERNAL, "another file system"):
        await move(agent, "f", f"/dev/shm/sandgate-test-{os.getpid()}")
    assert sorted(os.listdir(agent.home)) == ["d", "f", "full"]
    assert os.listdir(agent.home / "d") == ["sub"]


async def test_remove(agent: Agent) -> None:
    """F33."""
    (agent.home / "d/e/f").mkdir(parents=True)
    (agent.home / "d/e/f/file").touch()
    (agent.home / "d/out").symlink_to(agent.folder)
    (agent.home / "link").symlink_to("kept")
    (agent.home / "kept").mkdir()
    await remove(agent, "link")
    assert (agent.home / "kept").is_dir()
    await remove(agent, "d")
    assert sorted(os.listdir(agent.home)) == ["kept"]
    assert agent.folder.exists()
    for path in ("", "/", "//", "/.."):
        async with code_of(INVALID):
            await remove(agent, path)


async def test_remove_goes_to_any_depth_and_width(agent: Agent) -> None:
    """Deeper than a path or a recursion may be."""
    await agent.sh(
        "mkdir wide; cd wide; seq 3000 | xargs mkdir; cd ..; mkdir deep; cd deep;"
        " for i in $(seq 40); do mkdir -p a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q/r/s/t/u/v/w/x/y/z/1/2/3/4/5/6/7/8/9/0;"
        " cd -P a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q/r/s/t/u/v/w/x/y/z/1/2/3/4/5/6/7/8/9/0; touch file; done",
        cwd="~",
    )
    await remove(agent, "deep")
    await remove(agent, "wide")
    assert os.listdir(agent.home) == []


async def test_remove_while_others_write(agent: Agent) -> None:
    async with agent.running("/bin/sh", "-c", "while :; do mkdir -p d/e; touch d/e/$$ d/x; rm -rf d/x; done", cwd="~"):
        for _ in range(50):
            try:
                await remove(agent, "d")
            except grpc.aio.AioRpcError as error:
                refused: Any = error.details()
                # Something was made between the last look and the removal: said, not hidden.
                assert "Directory not empty" in refused


@pytest.mark.parametrize("second", [-(2**31), 2**32, 2**34, 300_000_000_000, 2**40])
async def test_time_beyond_all_calendars_does_not_hide_a_directory(agent: Agent, second: int) -> None:
    """Anybody may give a file any time; one that no reply can carry is shown as the nearest that can be."""
    file = agent.home / "f"
    file.touch()
    os.utime(file, (second, second))
    kept = os.stat(file).st_mtime
    (entry,) = await agent.listing(str(agent.home))
    assert entry.modified_time.seconds == min(kept, 253_402_300_799)
    entry.modified_time.ToJsonString()
