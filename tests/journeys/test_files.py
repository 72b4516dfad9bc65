"""Files on the whole road: traps B26 to B35, what no path leads to, and watches that outlive the gateway's processes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    Sandbox,
    SandboxException,
)

from sandgate_testing.boxes import descriptors_of
from sandgate_testing.gateway import Gateway, wait_until
from sandgate_testing.raw_http import request


@pytest.fixture(scope="module")
def sandbox(gateway: Gateway) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(timeout=600, **gateway.sdk_options)
    yield sandbox
    sandbox.kill()


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=60) as client:
        yield client


def queues_of(pid: int) -> int:
    return sum("inotify" in target for target in descriptors_of(pid))


# B26


def test_content_arrives_as_it_was_sent(sandbox: Sandbox, http: httpx.Client) -> None:
    """B26, D7, D8, D10, D11, D15."""
    sandbox.files.write("/tmp/e", "")
    assert sandbox.files.read("/tmp/e") == ""
    assert sandbox.files.read("/tmp/e", format="bytes") == b""
    content = bytes(range(256)) * 4096
    sandbox.files.write("/tmp/z", content, gzip=True)
    assert b"".join(sandbox.files.read("/tmp/z", format="stream", gzip=True)) == content
    url = sandbox.download_url("/tmp/z")
    whole = http.get(url, headers={"Accept-Encoding": "identity"})
    assert (whole.content, int(whole.headers["Content-Length"])) == (content, len(content))
    assert http.get(url).headers["Content-Encoding"] == "gzip"
    part = http.get(url, headers={"Range": "bytes=1000-1999"})
    assert (part.status_code, part.content) == (206, content[1000:2000])
    assert part.headers["Content-Range"] == f"bytes 1000-1999/{len(content)}"
    assert "Content-Encoding" not in part.headers
    assert http.get(url, headers={"Range": f"bytes={len(content)}-"}).status_code == 416
    unchanged = http.get(url, headers={"If-Modified-Since": whole.headers["Last-Modified"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert http.head(url).status_code == 405


def test_gzip_body_that_was_cut_off_is_no_file(sandbox: Sandbox, http: httpx.Client) -> None:
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    body = gzip.compress(os.urandom(100_000))
    url = sandbox.upload_url("/tmp/cut", use_signature_expiration=60)
    assert http.post(url, content=body, headers=headers).status_code == 200
    assert http.post(url, content=body[:-9], headers=headers).status_code == 400


def test_files_that_report_no_size_are_read_to_their_end(sandbox: Sandbox) -> None:
    """D12, both ways."""
    path = "/proc/sys/kernel/random/boot_id"
    assert len(sandbox.files.read(path)) == 37
    assert sandbox.files.read(path, gzip=True) == sandbox.commands.run(f"cat {path}").stdout


def test_a_file_system_without_attributes_takes_content_and_keeps_no_metadata(sandbox: Sandbox) -> None:
    """D36: nothing is told that is not stored; D31: virtual files are written."""
    waiting = sandbox.commands.run("exec sleep 300", background=True)
    try:
        path = f"/proc/{waiting.pid}/oom_score_adj"
        written = sandbox.files.write(path, "777", metadata={"from": "here"})
        assert not written.metadata
        assert not sandbox.files.get_info(path).metadata
        assert sandbox.files.read(path) == "777\n"
    finally:
        waiting.kill()


def test_large_download_is_sent_from_the_agents_open_file(
    gateway: Gateway, sandbox: Sandbox, pytestconfig: pytest.Config
) -> None:
    """Past gRPC where edge and agent are on one machine; the bytes are the same, and nothing stays open (D11)."""
    if pytestconfig.getoption("--backend") == "opensandbox":
        pytest.skip("these agents are reached at a port")
    sandbox.commands.run("head -c 40000000 /dev/urandom > large-one; sha256sum large-one > sum")
    edge = gateway.child("sandgate_edge")
    assert edge is not None
    url = httpx.URL(sandbox.download_url("large-one"))
    names = {"Host": str(url.host), "E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}

    def held() -> bool:
        return any(target.endswith("/large-one") for target in descriptors_of(edge))

    with socket.socket() as client:
        client.settimeout(60)
        # So little that the rest has to wait for whoever reads it.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.connect(gateway.address)
        client.sendall(request("GET", url.raw_path.decode(), names))
        wait_until(held)
        received = bytearray()
        while piece := client.recv(1 << 20):
            received += piece
    body = bytes(received.partition(b"\r\n\r\n")[2])
    assert hashlib.sha256(body).hexdigest() == sandbox.files.read("sum").split()[0]
    wait_until(lambda: not held())
    with socket.create_connection(gateway.address, timeout=60) as client:
        client.sendall(request("GET", url.raw_path.decode(), names))
        wait_until(held)
    wait_until(lambda: not held())


# B28, B29, B31


async def test_many_uploads_into_a_new_directory_all_succeed(gateway: Gateway) -> None:
    """B28, D32."""
    box = await AsyncSandbox.create(**gateway.sdk_options)
    try:
        await asyncio.gather(*(box.files.write(f"/tmp/p/{i % 5}/x/y/{i}.txt", str(i)) for i in range(60)))
        shown = await box.commands.run(
            "cat /tmp/p/0/x/y/0.txt; find /tmp/p -type f | wc -l; stat -c %U /tmp/p /tmp/p/4/x"
        )
        assert shown.stdout.split() == ["0" + "60", "user", "user"]
    finally:
        await box.kill()


MISSING: dict[str, Callable[[Sandbox], Any]] = {
    "read": lambda sb: sb.files.read("/tmp/no"),
    "list": lambda sb: sb.files.list("/tmp/no"),
    "get_info": lambda sb: sb.files.get_info("/tmp/no"),
    "rename": lambda sb: sb.files.rename("/tmp/no", "/tmp/x"),
    "watch_dir": lambda sb: sb.files.watch_dir("/tmp/no"),
}
WRONG_KIND: dict[str, Callable[[Sandbox], Any]] = {
    "write": lambda sb: sb.files.write("/tmp", "x"),
    "read": lambda sb: sb.files.read("/tmp"),
    "list": lambda sb: sb.files.list("/etc/passwd"),
    "make_dir": lambda sb: sb.files.make_dir("/etc/passwd"),
    "watch_dir": lambda sb: sb.files.watch_dir("/etc/passwd"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_paths_are_told_as_missing(sandbox: Sandbox, name: str) -> None:
    """B29."""
    with pytest.raises(FileNotFoundException, match="/tmp/no"):
        MISSING[name](sandbox)


@pytest.mark.parametrize("name", WRONG_KIND)
def test_paths_of_the_wrong_kind_are_told_as_such(sandbox: Sandbox, name: str) -> None:
    """B29."""
    with pytest.raises(InvalidArgumentException):
        WRONG_KIND[name](sandbox)


def test_making_and_removing_say_what_was_there(sandbox: Sandbox) -> None:
    """B29."""
    assert (sandbox.files.make_dir("/tmp/d1"), sandbox.files.make_dir("/tmp/d1")) == (True, False)
    sandbox.files.remove("/tmp/no")
    assert sandbox.files.exists("/tmp/no") is False
    with pytest.raises(SandboxException):
        sandbox.files.write("/etc/passwd/x", "x")


def test_listing_reaches_any_depth_and_special_files_hang_nobody(sandbox: Sandbox) -> None:
    """B31, D14."""
    sandbox.commands.run("mkdir -p /tmp/t/1/2/3/4/5/6; touch /tmp/t/1/2/3/4/5/6/f; mkfifo /tmp/t/ff")
    assert [len(sandbox.files.list("/tmp/t", depth=depth)) for depth in range(1, 9)] == [1, 2, 3, 4, 5, 6, 7, 7]
    for special in ("/tmp/t/ff", "/dev/zero", "/dev/null"):
        with pytest.raises(InvalidArgumentException, match="not a regular file"):
            sandbox.files.read(special)
        with pytest.raises(InvalidArgumentException, match="not a regular file"):
            sandbox.files.write(special, "x")
    for folder in ("/proc/self/fd", "/dev", "/proc"):
        sandbox.files.list(folder)


def test_listing_of_a_changing_directory_never_fails(sandbox: Sandbox) -> None:
    """B31, F23."""
    sandbox.files.make_dir("/tmp/changing")
    busy = sandbox.commands.run(
        "cd /tmp/changing; while :; do for i in 1 2 3 4 5; do mkdir -p d$i/e; : > d$i/f$i; done; rm -rf d*; done",
        background=True,
        timeout=0,
    )
    try:
        for _ in range(200):
            sandbox.files.list("/tmp/changing", depth=3)
    finally:
        busy.kill()


# B34


def test_polled_watches_leave_nothing(gateway: Gateway, sandbox: Sandbox) -> None:
    """B34: 400 of them, and one that is polled late."""
    agent = gateway.boxes()[sandbox.sandbox_id].agent()
    late = sandbox.files.watch_dir("/tmp")
    before = len(descriptors_of(agent))
    for _ in range(400):
        sandbox.files.watch_dir("/tmp").stop()
    wait_until(lambda: len(descriptors_of(agent)) <= before)
    sandbox.files.write("/tmp/late", "1")
    assert "late" in {event.name for event in late.get_new_events()}
    late.stop()
    wait_until(lambda: queues_of(agent) == 0)


async def test_streamed_watches_leave_nothing(gateway: Gateway) -> None:
    """B34: half of them end with their connection and not by stop()."""
    box = await AsyncSandbox.create(**gateway.sdk_options)
    try:
        agent = gateway.boxes()[box.sandbox_id].agent()
        before = len(descriptors_of(agent))
        for _ in range(50):
            handle = await box.files.watch_dir("/tmp", lambda _: None)
            await handle.stop()  # type: ignore[no-untyped-call]
        wait_until(lambda: queues_of(agent) == 0)
        await asyncio.gather(*(_drop_a_watch(gateway, box) for _ in range(50)))
        wait_until(lambda: queues_of(agent) == 0 and len(descriptors_of(agent)) <= before + 4)
    finally:
        await box.kill()


async def _drop_a_watch(gateway: Gateway, box: AsyncSandbox) -> None:
    """A connection that breaks while its watch is active."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    body = b'{"path":"/tmp"}'
    head = [
        *("POST /filesystem.Filesystem/WatchDir HTTP/1.1", "Host: localhost", "Content-Type: application/connect+json"),
        *(f"E2b-Sandbox-Id: {box.sandbox_id}", "E2b-Sandbox-Port: 49983"),
        *(f"X-Access-Token: {box._envd_access_token}", f"Content-Length: {len(body) + 5}"),
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + b"\0" + len(body).to_bytes(4, "big") + body)
    try:
        async with asyncio.timeout(30):
            await reader.readuntil(b'"start"')
    finally:
        writer.transport.abort()


def test_watcher_outlives_the_gateways_processes(make_gateway: Callable[..., Gateway]) -> None:
    """F38: the agent has it, so neither an edge nor a core takes it along."""
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    sandbox = Sandbox.create(timeout=600, **gateway.sdk_options)
    watch = sandbox.files.watch_dir("/tmp", recursive=True)
    gateway.stop()
    gateway.start()
    sandbox.files.write("/tmp/after/restart", "x")
    assert {event.name for event in watch.get_new_events()} == {"after", "after/restart"}
    sandbox.kill()
    gateway.stop()


# B35


def test_full_disk_is_told_as_one_and_commands_still_run(gateway: Gateway, sandbox: Sandbox, isolation: str) -> None:
    """B35, D29: also for a text file, which is sent without a length."""
    if os.geteuid() != 0 or isolation == "none":
        pytest.skip("a small disk can only be put into a sandbox by root")
    sandbox.files.make_dir("/home/user/small")
    inside = ["nsenter", "--mount", "--target", str(gateway.boxes()[sandbox.sandbox_id].agent())]
    options = ["-o", "size=2m,mode=777", "none", "/home/user/small"]
    done = subprocess.run([*inside, "mount", "-t", "tmpfs", *options], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be made here: {done.stderr}")
    sandbox.commands.run("dd if=/dev/zero of=small/fill bs=64k; true", timeout=60)
    for content in (b"1" * 5_000_000, io.StringIO("1" * 5_000_000)):
        with pytest.raises(NotEnoughSpaceException, match="not enough disk space"):
            sandbox.files.write("small/x", content)
    assert sandbox.commands.run("echo ok; rm -f small/fill small/x").stdout == "ok\n"
    sandbox.files.write("small/x", io.StringIO("zwei"))
    sandbox.files.write("small/y", b"y" * 1_000_000)
    assert sandbox.files.read("small/x") == "zwei"


# What no path leads to


@pytest.fixture
def outside(gateway: Gateway) -> Iterator[Path]:
    """A secret file of the gateway's machine, readable by everybody there."""
    folder = gateway.state_dir.parent / "outside"
    folder.mkdir(mode=0o777)
    secret = folder / "secret"
    secret.write_text("of the host")
    folder.chmod(0o777)
    secret.chmod(0o666)
    yield secret
    secret.unlink()
    folder.rmdir()


def test_no_path_leads_out_of_the_sandbox(sandbox: Sandbox, outside: Path, isolation: str) -> None:
    """F1: the agent may do anything inside, and inside is all there is for it."""
    if isolation == "none":
        pytest.skip("without isolation there is no inside")
    sandbox.commands.run(f"ln -sfn {outside} ~/link; ln -sfn {outside.parent} ~/folder; ln -sfn / ~/root")
    ways = [
        str(outside),
        "/" + "../" * 30 + str(outside),
        f"/proc/self/root{outside}",
        f"/proc/1/root{outside}",
        f"/proc/self/cwd{outside}",
        f"/proc/self/task/self/root{outside}",
        f"root{outside}",
        "link",
        "folder/secret",
    ]
    for way in ways:
        sandbox.files.write("mine", "from inside")
        for act in (_read, _remove, _write, _read, _move_to, _read):
            try:
                seen = act(sandbox, way)
            except SandboxException as refused:
                seen = str(refused)
            # What was written under such a path is found again, inside.
            assert "of the host" not in str(seen), way
    assert outside.read_text() == "of the host"
    assert [path.name for path in outside.parent.iterdir()] == ["secret"]


def _read(sandbox: Sandbox, path: str) -> object:
    return sandbox.files.read(path)


def _write(sandbox: Sandbox, path: str) -> object:
    return sandbox.files.write(path, "from inside")


def _move_to(sandbox: Sandbox, path: str) -> object:
    return sandbox.files.rename("mine", path)


def _remove(sandbox: Sandbox, path: str) -> object:
    sandbox.files.remove(path)
    return None


def test_a_folder_that_turns_into_a_link_leads_nowhere_else(sandbox: Sandbox, outside: Path, isolation: str) -> None:
    """Hostile code swaps a directory for a link while files are written and removed through it."""
    if isolation == "none":
        pytest.skip("without isolation there is no inside")
    swap = f"cd ~; while :; do mkdir -p swap; rm -rf swap; ln -sfn {outside.parent} swap; rm -f swap; done"
    busy = sandbox.commands.run(swap, background=True, timeout=0)
    try:
        for _ in range(100):
            for act in (_write, _remove):
                try:
                    act(sandbox, "swap/secret")
                except SandboxException:
                    continue
    finally:
        busy.kill()
    assert outside.read_text() == "of the host"


def test_users_decide_homes_and_owners(sandbox: Sandbox) -> None:
    """F1, F2, D23, U3, U8."""
    assert sandbox.files.write("here", "x").path == "/home/user/here"
    assert sandbox.files.write("here", "x", user="root").path.endswith("/root/here")
    assert sandbox.files.get_info("here").owner == "user"
    assert sandbox.files.get_info("here", user="root").owner == "root"
    assert sandbox.files.make_dir("/made-by-user") is True
    assert sandbox.files.get_info("/made-by-user").owner == "user"
    for call in (sandbox.files.read, sandbox.files.list, sandbox.files.make_dir, sandbox.files.watch_dir):
        with pytest.raises(AuthenticationException, match="no-such-user"):
            call("here", user="no-such-user")


def test_account_made_by_a_command_may_act_at_once(sandbox: Sandbox, isolation: str) -> None:
    """U5."""
    if os.geteuid() != 0 or isolation == "none":
        pytest.skip("accounts can be made only where ids can be switched")
    sandbox.commands.run("echo 'late:x:1000:1000::/home/user/late:/bin/sh' >> /etc/passwd", user="root")
    assert sandbox.files.write("f", "x", user="late").path == "/home/user/late/f"


# Time


def test_small_files_are_written_and_read_quickly(sandbox: Sandbox) -> None:
    """Not a measurement: an order of magnitude above the goal, so that a stall does not pass unseen."""
    began = time.monotonic()
    for _ in range(100):
        sandbox.files.write("small.txt", "x" * 1024)
        assert len(sandbox.files.read("small.txt")) == 1024
    assert time.monotonic() - began < 30
