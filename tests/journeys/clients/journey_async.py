"""What a first-time user does, with the asynchronous Python SDK.

Address and key come from E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, as they do for the user. SERVER_PORT is one that is
free, as sandboxes with internet may share the machine's ports.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from e2b import AsyncSandbox, CommandExitException, FilesystemEvent, PtySize, SandboxException, SandboxQuery
from steps import raises, step

GONE = "SandboxNotRunningException"
T = TypeVar("T")
MARK = uuid.uuid4().hex


async def taken(taking: Awaitable[T]) -> T | None:
    """A snapshot; None where the gateway's backend keeps none, which it must say."""
    try:
        return await taking
    except SandboxException as error:
        if "does not offer snapshots" not in str(error):
            raise
        return None


async def main() -> None:
    with step("create"):
        sandbox = await AsyncSandbox.create(
            timeout=120, metadata={"journey": MARK, "é &": "a=b"}, envs={"GREETING": "hello"}
        )
        assert sandbox.sandbox_id.isalnum()
    await information(sandbox)
    await commands(sandbox)
    await input_and_background(sandbox)
    await terminals(sandbox)
    await files(sandbox)
    await life(sandbox)
    await pauses(sandbox)
    await end(sandbox)


async def information(sandbox: AsyncSandbox) -> None:
    with step("get_info"):
        info = await sandbox.get_info()
        assert info.sandbox_id == sandbox.sandbox_id
        assert info.metadata == {"journey": MARK, "é &": "a=b"}, info.metadata
        assert info.state.value == "running"
        assert dt.timedelta(seconds=115) < info.end_at - info.started_at < dt.timedelta(seconds=125)
    with step("list_by_metadata"):
        assert await listed({"journey": MARK, "é &": "a=b"}) == [sandbox.sandbox_id]
        assert await listed({"journey": "another"}) == []


async def listed(metadata: dict[str, str]) -> list[str]:
    return [item.sandbox_id for item in await AsyncSandbox.list(query=SandboxQuery(metadata=metadata)).next_items()]


async def commands(sandbox: AsyncSandbox) -> None:
    with step("run_with_envs_and_cwd"):
        await sandbox.files.make_dir("place")
        result = await sandbox.commands.run('echo "$GREETING $NAME"; pwd', envs={"NAME": "wörld\n$x"}, cwd="place")
        assert result.exit_code == 0
        greeting, place = result.stdout.removesuffix("\n").rsplit("\n", 1)
        assert greeting == "hello wörld\n$x", greeting
        assert place.endswith("/place"), place
    with step("envs_last_one_command"):
        assert (await sandbox.commands.run('echo "$GREETING,$NAME"')).stdout == "hello,\n"
    with step("output_while_running"):
        await output_while_running(sandbox)
    with step("failing_command"):
        with raises("CommandExitException") as caught:
            await sandbox.commands.run("echo out; echo err >&2; exit 3")
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].stdout, caught[0].stderr) == (3, "out\n", "err\n")
    with step("death_by_signal"):
        with raises("CommandExitException") as caught:
            await sandbox.commands.run("kill -9 $$")
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].error) == (-1, "signal: killed")
    with step("command_timeout"):
        began = time.monotonic()
        with raises("TimeoutException"):
            await sandbox.commands.run("sleep 50", timeout=1)
        assert time.monotonic() - began < 20
        await until_no_command_runs(sandbox)
    with step("missing_cwd"), raises("InvalidArgumentException", "/no/such"):
        await sandbox.commands.run("pwd", cwd="/no/such")
    with step("unknown_user"), raises("AuthenticationException", "nobody-of-this-name"):
        await sandbox.commands.run("id", user="nobody-of-this-name")


async def until_no_command_runs(sandbox: AsyncSandbox) -> None:
    """This SDK also times the stream itself, so its exception may come a moment before the gateway's."""
    async with asyncio.timeout(10):
        while await sandbox.commands.list():  # noqa: ASYNC110 - the list is in another process
            await asyncio.sleep(0.05)


async def output_while_running(sandbox: AsyncSandbox) -> None:
    """The command waits for a file that is written only once its first line has arrived."""
    order: list[str] = []

    async def on_stdout(text: str) -> None:
        order.append(text)
        if text == "first\n":
            await sandbox.files.write("go-on", "")

    command = "echo first; until [ -e go-on ]; do sleep 0.05; done; echo second"
    result = await sandbox.commands.run(command, on_stdout=on_stdout, timeout=40)
    assert order == ["first\n", "second\n"], order
    assert result.stdout == "first\nsecond\n"


async def input_and_background(sandbox: AsyncSandbox) -> None:
    with step("stdin"):
        handle = await sandbox.commands.run("cat; echo end", background=True, stdin=True, timeout=40)
        await sandbox.commands.send_stdin(handle.pid, "one\n")
        await sandbox.commands.send_stdin(handle.pid, "zwö\n")
        await sandbox.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "one\nzwö\nend\n"
    with step("background_and_connect"):
        handle = await sandbox.commands.run(
            "until [ -e release ]; do sleep 0.05; done; echo released; exit 4", background=True, timeout=0
        )
        await handle.disconnect()
        assert [process.pid for process in await sandbox.commands.list()] == [handle.pid]
        again = await sandbox.commands.connect(handle.pid, timeout=40)
        await sandbox.files.write("release", "")
        with raises("CommandExitException") as caught:
            await again.wait()
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].stdout) == (4, "released\n")
        assert await sandbox.commands.list() == []
    with step("background_and_kill"):
        handle = await sandbox.commands.run("sleep 300", background=True, timeout=0)
        assert await handle.kill() is True
        with raises("CommandExitException"):
            await handle.wait()
        assert await sandbox.commands.kill(handle.pid) is False
    with step("connect_to_unknown_pid"), raises("NotFoundException"):
        await sandbox.commands.connect(999999)
    with step("sudo"):
        become_root = await sandbox.commands.run('sudo echo "$FOO"; sudo id -u', envs={"FOO": "bar"})
        assert become_root.stdout == "bar\n0\n"


async def terminals(sandbox: AsyncSandbox) -> None:
    with step("terminal"):
        seen = bytearray()
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), seen.extend, timeout=60)
        await sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=133))
        await sandbox.pty.send_stdin(terminal.pid, "stty size; printf '─漢😀\\n'; exit 3\n".encode())
        with raises("CommandExitException") as caught:
            await terminal.wait()
        assert isinstance(caught[0], CommandExitException)
        assert caught[0].exit_code == 3
        assert "40 133\r\n─漢😀\r\n" in seen.decode()
    with step("terminal_connect"):
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), lambda _: None, timeout=0)
        await terminal.disconnect()
        assert [process.pid for process in await sandbox.commands.list()] == [terminal.pid]
        seen = bytearray()
        again = await sandbox.pty.connect(terminal.pid, seen.extend, timeout=60)
        await sandbox.pty.send_stdin(terminal.pid, b"echo st''ill here; exit\n")
        await again.wait()
        assert b"still here\r\n" in seen
    with step("terminal_kill"):
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), lambda _: None, timeout=0)
        assert await sandbox.pty.kill(terminal.pid) is True
        with raises("CommandExitException"):
            await terminal.wait()
        assert await sandbox.pty.kill(terminal.pid) is False
        assert await sandbox.commands.list() == []


async def files(sandbox: AsyncSandbox) -> None:
    with step("write_and_read"):
        written = await sandbox.files.write("notes/day one.txt", "grün\n")
        assert written.name == "day one.txt"
        assert written.path.endswith("/notes/day one.txt"), written.path
        assert await sandbox.files.read("notes/day one.txt") == "grün\n"
        assert (await sandbox.commands.run("cat 'notes/day one.txt'")).stdout == "grün\n"
    with step("bytes_and_empty"):
        content = bytes(range(256)) * 2048
        await sandbox.files.write("notes/bytes", content)
        assert await sandbox.files.read("notes/bytes", format="bytes") == content
        await sandbox.files.write("notes/empty", "")
        assert await sandbox.files.read("notes/empty") == ""
        pieces = [piece async for piece in await sandbox.files.read("notes/bytes", format="stream")]
        assert b"".join(pieces) == content
    with step("write_several"):
        names = ["several/a.txt", "several/b/ü+%20 'q\".txt"]
        await sandbox.files.write_files([{"path": name, "data": name} for name in names])
        assert [await sandbox.files.read(name) for name in names] == names
    with step("list_files"):
        assert [(entry.name, entry.type.value) for entry in await sandbox.files.list("several")] == [
            ("a.txt", "file"),
            ("b", "dir"),
        ]
        assert len(await sandbox.files.list("several", depth=2)) == 3
    with step("file_info"):
        info = await sandbox.files.get_info("notes/day one.txt")
        assert (info.name, info.type.value, info.size) == ("day one.txt", "file", len("grün\n".encode()))
        assert info.permissions == "-rw-r--r--", info.permissions
    with step("exists"):
        assert await sandbox.files.exists("notes/empty") is True
        assert await sandbox.files.exists("notes/none") is False
    with step("rename"):
        moved = await sandbox.files.rename("notes/empty", "notes/renamed")
        assert moved.path.endswith("/notes/renamed"), moved.path
        assert await sandbox.files.exists("notes/empty") is False
        assert await sandbox.files.exists("notes/renamed") is True
    with step("make_dir"):
        assert await sandbox.files.make_dir("deep/er/est") is True
        assert await sandbox.files.make_dir("deep/er/est") is False
    with step("remove"):
        await sandbox.files.remove("deep")
        assert await sandbox.files.exists("deep") is False
        await sandbox.files.remove("deep")
    await transfers(sandbox)
    await watching(sandbox)
    await missing_files(sandbox)


async def transfers(sandbox: AsyncSandbox) -> None:
    content = b"".join(b"line %d\n" % number for number in range(200_000))
    with step("gzip_both_ways"):
        await sandbox.files.write("transfers/zipped", content, gzip=True)
        assert await sandbox.files.read("transfers/zipped", format="bytes", gzip=True) == content
        assert (await sandbox.commands.run("wc -c < transfers/zipped")).stdout.strip() == str(len(content))
    with step("stream_up_and_down"):
        await sandbox.files.write("transfers/streamed", io.BytesIO(content))
        pieces = [piece async for piece in await sandbox.files.read("transfers/streamed", format="stream")]
        assert b"".join(pieces) == content
        # A text file has no length that could be announced.
        await sandbox.files.write("transfers/text", io.StringIO("zwei\n" * 1000))
        assert await sandbox.files.read("transfers/text") == "zwei\n" * 1000
    with step("file_metadata"):
        written = await sandbox.files.write("transfers/named", "x", metadata={"Author": "me", "kind": "a b"})
        assert written.metadata == {"author": "me", "kind": "a b"}, written.metadata
        assert (await sandbox.files.get_info("transfers/named")).metadata == {"author": "me", "kind": "a b"}
        found = {entry.name: entry.metadata for entry in await sandbox.files.list("transfers")}
        assert found["named"] == {"author": "me", "kind": "a b"}, found
        assert not found["text"], found
        with raises("InvalidArgumentException"):
            await sandbox.files.write("transfers/named", "x", metadata={"big": "x" * 5000})
    with step("signed_urls"):
        upload = sandbox.upload_url("transfers/by url é", use_signature_expiration=60)
        assert await asyncio.to_thread(send, upload, b"sent by url") == 200
        assert await sandbox.files.read("transfers/by url é") == "sent by url"
        download = sandbox.download_url("transfers/by url é")
        with await asyncio.to_thread(urllib.request.urlopen, download) as answer:
            assert answer.read() == b"sent by url"
        assert await asyncio.to_thread(send, download, b"overwritten") == 401
        late = sandbox.upload_url("other", use_signature_expiration=-60)
        assert await asyncio.to_thread(send, late, b"late") == 401
        assert await sandbox.files.exists("other") is False


def send(url: str, content: bytes) -> int:
    """Upload with a plain client; the status."""
    request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def watching(sandbox: AsyncSandbox) -> None:
    seen: asyncio.Queue[FilesystemEvent] = asyncio.Queue()

    async def told(count: int) -> list[FilesystemEvent]:
        return [await asyncio.wait_for(seen.get(), 20) for _ in range(count)]

    with step("watch_dir"):
        await sandbox.files.make_dir("watched")
        handle = await sandbox.files.watch_dir("watched", seen.put_nowait, include_entry=True)
        await sandbox.files.write("watched/new.txt", "x")
        events = await told(3)
        assert [(event.name, event.type.value) for event in events] == [
            ("new.txt", "create"),
            ("new.txt", "chmod"),
            ("new.txt", "write"),
        ], events
        assert all(event.entry is not None and event.entry.name == "new.txt" for event in events), events
        await sandbox.files.rename("watched/new.txt", "watched/newer.txt")
        await sandbox.files.remove("watched/newer.txt")
        events = await told(3)
        assert [(event.name, event.type.value) for event in events] == [
            ("new.txt", "rename"),
            ("newer.txt", "create"),
            ("newer.txt", "remove"),
        ], events
        await handle.stop()
        assert seen.empty()
    with step("watch_dir_recursive"):
        handle = await sandbox.files.watch_dir("watched", seen.put_nowait, recursive=True)
        await sandbox.files.write("watched/a/b/c.txt", "x")
        names: list[str] = []
        while len(names) < 3:
            names += [event.name for event in await told(1) if event.type.value == "create"]
        assert names == ["a", "a/b", "a/b/c.txt"], names
        await handle.stop()
    with step("watch_what_cannot_be_watched"):
        with raises("FileNotFoundException"):
            await sandbox.files.watch_dir("no/such", seen.put_nowait)
        with raises("InvalidArgumentException"):
            await sandbox.files.watch_dir("notes/bytes", seen.put_nowait)


async def missing_files(sandbox: AsyncSandbox) -> None:
    with step("missing_file"):
        for call in (sandbox.files.read, sandbox.files.list, sandbox.files.get_info):
            with raises("FileNotFoundException"):
                await call("no/such")
        with raises("FileNotFoundException"):
            await sandbox.files.rename("no/such", "other")
    with step("wrong_kind_of_path"):
        with raises("InvalidArgumentException"):
            await sandbox.files.read("notes")
        with raises("InvalidArgumentException"):
            await sandbox.files.write("notes", "x")
        with raises("InvalidArgumentException"):
            await sandbox.files.list("notes/bytes")


async def life(sandbox: AsyncSandbox) -> None:
    with step("is_running"):
        assert await sandbox.is_running() is True
    with step("set_timeout"):
        await sandbox.set_timeout(600)
        assert await remaining(sandbox) > 500
        await sandbox.set_timeout(90)
        assert await remaining(sandbox) < 100
    with step("connect"):
        again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=30)
        # A running sandbox's end never moves forward by a connect (C42).
        assert await remaining(again) > 50
        assert await again.files.read("notes/day one.txt") == "grün\n"
        assert (await again.commands.run("echo again")).stdout == "again\n"
    with step("unknown_template"), raises("SandboxException", "404"):
        await AsyncSandbox.create("no-such-template")
    with step("wrong_api_key"), raises("AuthenticationException"):
        await AsyncSandbox.create(api_key="e2b_" + "0" * 40)


async def pauses(sandbox: AsyncSandbox) -> None:
    with step("metrics"):
        sample = (await eventually(sandbox.get_metrics))[0]
        assert 0 < sample.mem_used < sample.mem_total
        assert sample.cpu_count > 0
    with step("pause"):
        await sandbox.files.write("over the pause", "kept")
        worker = await sandbox.commands.run("sleep 1000", background=True, timeout=0)
        assert await sandbox.pause() is True
        assert (await sandbox.get_info()).state.value == "paused"
        assert await sandbox.is_running() is False
    with step("pause_again"):
        assert await sandbox.pause() is False
    with step("connect_resumes"):
        again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=90)
        assert (await again.get_info()).state.value == "running"
        assert 60 < await remaining(again) < 100
        assert worker.pid in [process.pid for process in await again.commands.list()]
        assert await again.files.read("over the pause") == "kept"
    with step("pause_files_only"):
        assert await sandbox.pause(keep_memory=False) is True
        again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=90)
        assert await again.commands.list() == []
        assert await again.files.read("over the pause") == "kept"
        assert (await again.commands.run("echo anew")).stdout == "anew\n"
    with step("snapshots"):
        await sandbox.files.write("in the snapshot", "before")
        snapshot = await taken(sandbox.create_snapshot(name=f"journey-{os.getpid()}"))
        if snapshot is not None:
            assert any(f"journey-{os.getpid()}" in name for name in snapshot.names)
            await sandbox.files.write("in the snapshot", "after")
            copy = await AsyncSandbox.create(snapshot.snapshot_id, timeout=60)
            assert await copy.files.read("in the snapshot") == "before"
            assert (await copy.get_info()).template_id == snapshot.snapshot_id
            listed = await sandbox.list_snapshots().next_items()
            assert snapshot.snapshot_id in [item.snapshot_id for item in listed]
            assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True
            assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is False
            assert await copy.files.read("in the snapshot") == "before"
            await copy.kill()
    with step("pause_at_the_end"):
        short = await AsyncSandbox.create(timeout=2, lifecycle={"on_timeout": "pause"})
        await eventually(lambda: is_paused(short))
        # The choice outlives the resume (B44).
        await AsyncSandbox.connect(short.sandbox_id, timeout=2)
        await eventually(lambda: is_paused(short))
        assert await short.kill() is True
    with step("traffic_wakes"):
        sleeper = await AsyncSandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
        assert await sleeper.pause() is True
        assert (await sleeper.commands.run("echo woken")).stdout == "woken\n"
        assert (await sleeper.get_info()).state.value == "running"
        await sleeper.kill()
    with step("get_host"):
        port = int(os.environ["SERVER_PORT"])
        serve = f"python3 -m http.server {port} --bind 127.0.0.1"
        server = await sandbox.commands.run(serve, background=True, timeout=0)
        await sandbox.files.write("page.html", "<p>a page</p>")
        host = sandbox.get_host(port)
        assert host.startswith(f"{port}-{sandbox.sandbox_id}.")
        assert await eventually(lambda: asyncio.to_thread(page_of, host)) == b"<p>a page</p>"
        await server.kill()


def page_of(host: str) -> bytes:
    """As a browser would ask for it whose DNS leads the host to the gateway; nothing while the server is not up."""
    request = urllib.request.Request(f"{os.environ['E2B_SANDBOX_URL']}/page.html", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        if error.code != 502:
            raise
        return b""


async def is_paused(sandbox: AsyncSandbox) -> bool:
    return (await sandbox.get_info()).state.value == "paused"


async def eventually(ask: Callable[[], Awaitable[T]]) -> T:
    for _ in range(300):
        if answer := await ask():
            return answer
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come to pass")


async def remaining(sandbox: AsyncSandbox) -> float:
    now = dt.datetime.now(dt.UTC)
    return ((await sandbox.get_info()).end_at - now).total_seconds()


async def end(sandbox: AsyncSandbox) -> None:
    with step("kill_while_a_command_runs"):
        await kill_while_a_command_runs(sandbox)
    with step("kill_again"):
        assert await sandbox.kill() is False
    with step("gone_is_not_running"):
        assert await sandbox.is_running() is False
    with step("gone_for_the_control_plane"):
        with raises("SandboxNotFoundException"):
            await sandbox.get_info()
        with raises("SandboxNotFoundException"):
            await sandbox.set_timeout(60)
        with raises("SandboxNotFoundException"):
            await AsyncSandbox.connect(sandbox.sandbox_id)
    with step("gone_for_commands"), raises(GONE):
        await sandbox.commands.run("echo")
    with step("gone_for_files"):
        with raises(GONE):
            await sandbox.files.read("notes/bytes")
        with raises(GONE):
            await sandbox.files.exists("notes")
    with step("gone_from_the_list"):
        assert await listed({"journey": MARK}) == []


async def kill_while_a_command_runs(sandbox: AsyncSandbox) -> None:
    """B16: the waiting call ends at once and says that the sandbox is gone."""
    started = asyncio.Event()
    ended: list[tuple[float, str]] = []

    async def wait_for_command() -> None:
        try:
            await sandbox.commands.run("echo up; sleep 300", timeout=0, on_stdout=lambda _: started.set())
        except Exception as error:
            ended.append((time.monotonic(), type(error).__name__))
        finally:
            started.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(wait_for_command())
        await started.wait()
        killed = time.monotonic()
        assert await sandbox.kill() is True
    assert ended, "the call ended without an exception"
    assert ended[0][1] == GONE, ended
    assert ended[0][0] - killed < 3, f"{ended[0][0] - killed} s"


if __name__ == "__main__":
    asyncio.run(main())
