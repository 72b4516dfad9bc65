"""What a first-time user does, with the synchronous Python SDK; the same text for every release of it.

Address and key come from E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, as they do for the user. SERVER_PORT is one that is
free, as sandboxes with internet may share the machine's ports.
"""

from __future__ import annotations

import datetime as dt
import io
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from typing import TypeVar

from e2b import CommandExitException, PtySize, Sandbox, SandboxQuery, exceptions
from steps import raises, step

# Newer releases have a class of its own for a sandbox that is gone in the midst of a call (errors.md 3.5).
GONE = "SandboxNotRunningException" if hasattr(exceptions, "SandboxNotRunningException") else "TimeoutException"
T = TypeVar("T")
MARK = uuid.uuid4().hex


def taken(take: Callable[[], T]) -> T | None:
    """A snapshot; None where the gateway's backend keeps none, which it must say."""
    try:
        return take()
    except exceptions.SandboxException as error:
        if "does not offer snapshots" not in str(error):
            raise
        return None


def main() -> None:
    with step("create"):
        sandbox = Sandbox.create(timeout=120, metadata={"journey": MARK, "é &": "a=b"}, envs={"GREETING": "hello"})
        assert sandbox.sandbox_id.isalnum()
    information(sandbox)
    commands(sandbox)
    input_and_background(sandbox)
    terminals(sandbox)
    files(sandbox)
    life(sandbox)
    pauses(sandbox)
    end(sandbox)


def information(sandbox: Sandbox) -> None:
    with step("get_info"):
        info = sandbox.get_info()
        assert info.sandbox_id == sandbox.sandbox_id
        assert info.metadata == {"journey": MARK, "é &": "a=b"}, info.metadata
        assert info.state.value == "running"
        assert dt.timedelta(seconds=115) < info.end_at - info.started_at < dt.timedelta(seconds=125)
    with step("list_by_metadata"):
        found = Sandbox.list(query=SandboxQuery(metadata={"journey": MARK, "é &": "a=b"})).next_items()
        assert [item.sandbox_id for item in found] == [sandbox.sandbox_id]
        assert Sandbox.list(query=SandboxQuery(metadata={"journey": "another"})).next_items() == []


def commands(sandbox: Sandbox) -> None:
    with step("run_with_envs_and_cwd"):
        sandbox.files.make_dir("place")
        result = sandbox.commands.run('echo "$GREETING $NAME"; pwd', envs={"NAME": "wörld\n$x"}, cwd="place")
        assert result.exit_code == 0
        greeting, place = result.stdout.removesuffix("\n").rsplit("\n", 1)
        assert greeting == "hello wörld\n$x", greeting
        assert place.endswith("/place"), place
    with step("envs_last_one_command"):
        assert sandbox.commands.run('echo "$GREETING,$NAME"').stdout == "hello,\n"
    with step("output_while_running"):
        output_while_running(sandbox)
    with step("failing_command"):
        with raises("CommandExitException") as caught:
            sandbox.commands.run("echo out; echo err >&2; exit 3")
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].stdout, caught[0].stderr) == (3, "out\n", "err\n")
    with step("death_by_signal"):
        with raises("CommandExitException") as caught:
            sandbox.commands.run("kill -9 $$")
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].error) == (-1, "signal: killed")
    with step("command_timeout"):
        began = time.monotonic()
        with raises("TimeoutException"):
            sandbox.commands.run("sleep 50", timeout=1)
        assert time.monotonic() - began < 20
        until_no_command_runs(sandbox)
    with step("missing_cwd"), raises("InvalidArgumentException", "/no/such"):
        sandbox.commands.run("pwd", cwd="/no/such")
    with step("unknown_user"), raises("AuthenticationException", "nobody-of-this-name"):
        sandbox.commands.run("id", user="nobody-of-this-name")


def until_no_command_runs(sandbox: Sandbox) -> None:
    """Newer releases also time the stream themselves, so their exception may come a moment before the gateway's."""
    end = time.monotonic() + 10
    while sandbox.commands.list():
        assert time.monotonic() < end, "the command is still listed"
        time.sleep(0.05)


def output_while_running(sandbox: Sandbox) -> None:
    """The command waits for a file that is written only once its first line has arrived."""
    order: list[str] = []

    def on_stdout(text: str) -> None:
        order.append(text)
        if text == "first\n":
            sandbox.files.write("go-on", "")

    command = "echo first; until [ -e go-on ]; do sleep 0.05; done; echo second"
    result = sandbox.commands.run(command, on_stdout=on_stdout, timeout=40)
    assert order == ["first\n", "second\n"], order
    assert result.stdout == "first\nsecond\n"


def input_and_background(sandbox: Sandbox) -> None:
    with step("stdin"):
        handle = sandbox.commands.run("cat; echo end", background=True, stdin=True, timeout=40)
        sandbox.commands.send_stdin(handle.pid, "one\n")
        sandbox.commands.send_stdin(handle.pid, "zwö\n")
        sandbox.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "one\nzwö\nend\n"
    with step("background_and_connect"):
        handle = sandbox.commands.run(
            "until [ -e release ]; do sleep 0.05; done; echo released; exit 4", background=True, timeout=0
        )
        handle.disconnect()
        assert [process.pid for process in sandbox.commands.list()] == [handle.pid]
        again = sandbox.commands.connect(handle.pid, timeout=40)
        sandbox.files.write("release", "")
        with raises("CommandExitException") as caught:
            again.wait()
        assert isinstance(caught[0], CommandExitException)
        assert (caught[0].exit_code, caught[0].stdout) == (4, "released\n")
        assert sandbox.commands.list() == []
    with step("background_and_kill"):
        handle = sandbox.commands.run("sleep 300", background=True, timeout=0)
        assert handle.kill() is True
        with raises("CommandExitException"):
            handle.wait()
        assert sandbox.commands.kill(handle.pid) is False
    with step("connect_to_unknown_pid"), raises("NotFoundException"):
        sandbox.commands.connect(999999)
    with step("sudo"):
        assert sandbox.commands.run('sudo echo "$FOO"; sudo id -u', envs={"FOO": "bar"}).stdout == "bar\n0\n"


def terminals(sandbox: Sandbox) -> None:
    with step("terminal"):
        terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
        sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=133))
        sandbox.pty.send_stdin(terminal.pid, "stty size; printf '─漢😀\\n'; exit 3\n".encode())
        seen = bytearray()
        with raises("CommandExitException") as caught:
            terminal.wait(on_pty=seen.extend)
        assert isinstance(caught[0], CommandExitException)
        assert caught[0].exit_code == 3
        assert "40 133\r\n─漢😀\r\n" in seen.decode()
    with step("terminal_connect"):
        terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
        terminal.disconnect()
        assert [process.pid for process in sandbox.commands.list()] == [terminal.pid]
        again = sandbox.pty.connect(terminal.pid, timeout=60)
        sandbox.pty.send_stdin(terminal.pid, b"echo st''ill here; exit\n")
        seen = bytearray()
        again.wait(on_pty=seen.extend)
        assert b"still here\r\n" in seen
    with step("terminal_kill"):
        terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
        assert sandbox.pty.kill(terminal.pid) is True
        with raises("CommandExitException"):
            terminal.wait()
        assert sandbox.pty.kill(terminal.pid) is False
        assert sandbox.commands.list() == []


def files(sandbox: Sandbox) -> None:
    with step("write_and_read"):
        written = sandbox.files.write("notes/day one.txt", "grün\n")
        assert written.name == "day one.txt"
        assert written.path.endswith("/notes/day one.txt"), written.path
        assert sandbox.files.read("notes/day one.txt") == "grün\n"
        assert sandbox.commands.run("cat 'notes/day one.txt'").stdout == "grün\n"
    with step("bytes_and_empty"):
        content = bytes(range(256)) * 2048
        sandbox.files.write("notes/bytes", content)
        assert sandbox.files.read("notes/bytes", format="bytes") == content
        sandbox.files.write("notes/empty", "")
        assert sandbox.files.read("notes/empty") == ""
        assert b"".join(sandbox.files.read("notes/bytes", format="stream")) == content
    with step("write_several"):
        names = ["several/a.txt", "several/b/ü+%20 'q\".txt"]
        sandbox.files.write_files([{"path": name, "data": name} for name in names])
        assert [sandbox.files.read(name) for name in names] == names
    with step("list_files"):
        assert [(entry.name, entry.type.value) for entry in sandbox.files.list("several")] == [
            ("a.txt", "file"),
            ("b", "dir"),
        ]
        assert len(sandbox.files.list("several", depth=2)) == 3
    with step("file_info"):
        info = sandbox.files.get_info("notes/day one.txt")
        assert (info.name, info.type.value, info.size) == ("day one.txt", "file", len("grün\n".encode()))
        assert info.permissions == "-rw-r--r--", info.permissions
    with step("exists"):
        assert sandbox.files.exists("notes/empty") is True
        assert sandbox.files.exists("notes/none") is False
    with step("rename"):
        moved = sandbox.files.rename("notes/empty", "notes/renamed")
        assert moved.path.endswith("/notes/renamed"), moved.path
        assert (sandbox.files.exists("notes/empty"), sandbox.files.exists("notes/renamed")) == (False, True)
    with step("make_dir"):
        assert sandbox.files.make_dir("deep/er/est") is True
        assert sandbox.files.make_dir("deep/er/est") is False
    with step("remove"):
        sandbox.files.remove("deep")
        assert sandbox.files.exists("deep") is False
        sandbox.files.remove("deep")
    transfers(sandbox)
    watching(sandbox)
    missing_files(sandbox)


def transfers(sandbox: Sandbox) -> None:
    content = b"".join(b"line %d\n" % number for number in range(200_000))
    with step("gzip_both_ways"):
        sandbox.files.write("transfers/zipped", content, gzip=True)
        assert sandbox.files.read("transfers/zipped", format="bytes", gzip=True) == content
        assert sandbox.commands.run("wc -c < transfers/zipped").stdout.strip() == str(len(content))
    with step("stream_up_and_down"):
        sandbox.files.write("transfers/streamed", io.BytesIO(content))
        assert b"".join(sandbox.files.read("transfers/streamed", format="stream")) == content
        # A text file has no length that could be announced.
        sandbox.files.write("transfers/text", io.StringIO("zwei\n" * 1000))
        assert sandbox.files.read("transfers/text") == "zwei\n" * 1000
    with step("file_metadata"):
        written = sandbox.files.write("transfers/named", "x", metadata={"Author": "me", "kind": "a b"})
        assert written.metadata == {"author": "me", "kind": "a b"}, written.metadata
        assert sandbox.files.get_info("transfers/named").metadata == {"author": "me", "kind": "a b"}
        found = {entry.name: entry.metadata for entry in sandbox.files.list("transfers")}
        assert found["named"] == {"author": "me", "kind": "a b"}, found
        assert not found["text"], found
        with raises("InvalidArgumentException"):
            sandbox.files.write("transfers/named", "x", metadata={"big": "x" * 5000})
    with step("signed_urls"):
        upload = sandbox.upload_url("transfers/by url é", use_signature_expiration=60)
        assert send(upload, b"sent by url") == 200
        assert sandbox.files.read("transfers/by url é") == "sent by url"
        download = sandbox.download_url("transfers/by url é")
        with urllib.request.urlopen(download) as answer:
            assert answer.read() == b"sent by url"
        assert send(download, b"overwritten") == 401
        assert send(sandbox.upload_url("other", use_signature_expiration=-60), b"late") == 401
        assert sandbox.files.exists("other") is False


def send(url: str, content: bytes) -> int:
    """Upload with a plain client; the status."""
    request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def watching(sandbox: Sandbox) -> None:
    with step("watch_dir"):
        sandbox.files.make_dir("watched")
        handle = sandbox.files.watch_dir("watched", include_entry=True)
        sandbox.files.write("watched/new.txt", "x")
        events = handle.get_new_events()
        assert [(event.name, event.type.value) for event in events] == [
            ("new.txt", "create"),
            ("new.txt", "chmod"),
            ("new.txt", "write"),
        ], events
        assert all(event.entry is not None and event.entry.name == "new.txt" for event in events), events
        sandbox.files.rename("watched/new.txt", "watched/newer.txt")
        sandbox.files.remove("watched/newer.txt")
        events = handle.get_new_events()
        assert [(event.name, event.type.value) for event in events] == [
            ("new.txt", "rename"),
            ("newer.txt", "create"),
            ("newer.txt", "remove"),
        ], events
        assert handle.get_new_events() == []
        handle.stop()
    with step("watch_dir_recursive"):
        handle = sandbox.files.watch_dir("watched", recursive=True)
        sandbox.files.write("watched/a/b/c.txt", "x")
        names = [event.name for event in handle.get_new_events() if event.type.value == "create"]
        assert names == ["a", "a/b", "a/b/c.txt"], names
        handle.stop()
    with step("watch_what_cannot_be_watched"):
        with raises("FileNotFoundException"):
            sandbox.files.watch_dir("no/such")
        with raises("InvalidArgumentException"):
            sandbox.files.watch_dir("notes/bytes")


def missing_files(sandbox: Sandbox) -> None:
    with step("missing_file"):
        for call in (sandbox.files.read, sandbox.files.list, sandbox.files.get_info):
            with raises("FileNotFoundException"):
                call("no/such")
        with raises("FileNotFoundException"):
            sandbox.files.rename("no/such", "other")
    with step("wrong_kind_of_path"):
        with raises("InvalidArgumentException"):
            sandbox.files.read("notes")
        with raises("InvalidArgumentException"):
            sandbox.files.write("notes", "x")
        with raises("InvalidArgumentException"):
            sandbox.files.list("notes/bytes")


def life(sandbox: Sandbox) -> None:
    with step("is_running"):
        assert sandbox.is_running() is True
    with step("set_timeout"):
        sandbox.set_timeout(600)
        assert remaining(sandbox) > 500
        sandbox.set_timeout(90)
        assert remaining(sandbox) < 100
    with step("connect"):
        again = Sandbox.connect(sandbox.sandbox_id, timeout=30)
        # A running sandbox's end never moves forward by a connect (C42).
        assert remaining(again) > 50
        assert again.files.read("notes/day one.txt") == "grün\n"
        assert again.commands.run("echo again").stdout == "again\n"
    with step("unknown_template"), raises("SandboxException", "404"):
        Sandbox.create("no-such-template")
    with step("wrong_api_key"), raises("AuthenticationException"):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def pauses(sandbox: Sandbox) -> None:
    with step("metrics"):
        sample = eventually(sandbox.get_metrics)[0]
        assert 0 < sample.mem_used < sample.mem_total
        assert sample.cpu_count > 0
    with step("pause"):
        sandbox.files.write("over the pause", "kept")
        worker = sandbox.commands.run("sleep 1000", background=True, timeout=0)
        assert sandbox.pause() is True
        assert sandbox.get_info().state.value == "paused"
        assert sandbox.is_running() is False
    with step("pause_again"):
        assert sandbox.pause() is False
    with step("connect_resumes"):
        again = Sandbox.connect(sandbox.sandbox_id, timeout=90)
        assert again.get_info().state.value == "running"
        assert 60 < remaining(again) < 100
        assert worker.pid in [process.pid for process in again.commands.list()]
        assert again.files.read("over the pause") == "kept"
    with step("pause_files_only"):
        assert sandbox.pause(keep_memory=False) is True
        again = Sandbox.connect(sandbox.sandbox_id, timeout=90)
        assert again.commands.list() == []
        assert again.files.read("over the pause") == "kept"
        assert again.commands.run("echo anew").stdout == "anew\n"
    with step("snapshots"):
        sandbox.files.write("in the snapshot", "before")
        snapshot = taken(lambda: sandbox.create_snapshot(name=f"journey-{os.getpid()}"))
        if snapshot is not None:
            assert any(f"journey-{os.getpid()}" in name for name in snapshot.names)
            sandbox.files.write("in the snapshot", "after")
            copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
            assert copy.files.read("in the snapshot") == "before"
            assert copy.get_info().template_id == snapshot.snapshot_id
            listed = sandbox.list_snapshots().next_items()
            assert snapshot.snapshot_id in [item.snapshot_id for item in listed]
            assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
            assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
            assert copy.files.read("in the snapshot") == "before"
            copy.kill()
    with step("pause_at_the_end"):
        short = Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause"})
        eventually(lambda: short.get_info().state.value == "paused")
        # The choice outlives the resume (B44).
        Sandbox.connect(short.sandbox_id, timeout=2)
        eventually(lambda: short.get_info().state.value == "paused")
        assert short.kill() is True
    with step("traffic_wakes"):
        sleeper = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
        assert sleeper.pause() is True
        assert sleeper.commands.run("echo woken").stdout == "woken\n"
        assert sleeper.get_info().state.value == "running"
        sleeper.kill()
    with step("get_host"):
        port = int(os.environ["SERVER_PORT"])
        server = sandbox.commands.run(f"python3 -m http.server {port} --bind 127.0.0.1", background=True, timeout=0)
        sandbox.files.write("page.html", "<p>a page</p>")
        host = sandbox.get_host(port)
        assert host.startswith(f"{port}-{sandbox.sandbox_id}.")
        assert eventually(lambda: page_of(host)) == b"<p>a page</p>"
        server.kill()


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


def eventually(ask: Callable[[], T]) -> T:
    for _ in range(300):
        if answer := ask():
            return answer
        time.sleep(0.1)
    raise AssertionError("it did not come to pass")


def remaining(sandbox: Sandbox) -> float:
    now = dt.datetime.now(dt.UTC)
    return (sandbox.get_info().end_at - now).total_seconds()


def end(sandbox: Sandbox) -> None:
    with step("kill_while_a_command_runs"):
        kill_while_a_command_runs(sandbox)
    with step("kill_again"):
        assert sandbox.kill() is False
    with step("gone_is_not_running"):
        assert sandbox.is_running() is False
    with step("gone_for_the_control_plane"):
        with raises("SandboxNotFoundException"):
            sandbox.get_info()
        with raises("SandboxNotFoundException"):
            sandbox.set_timeout(60)
        with raises("SandboxNotFoundException"):
            Sandbox.connect(sandbox.sandbox_id)
    with step("gone_for_commands"), raises(GONE):
        sandbox.commands.run("echo")
    with step("gone_for_files"):
        with raises(GONE):
            sandbox.files.read("notes/bytes")
        with raises(GONE):
            sandbox.files.exists("notes")
    with step("gone_from_the_list"):
        assert Sandbox.list(query=SandboxQuery(metadata={"journey": MARK})).next_items() == []


def kill_while_a_command_runs(sandbox: Sandbox) -> None:
    """B16: the waiting call ends at once and says that the sandbox is gone."""
    started = threading.Event()
    ended: list[tuple[float, str]] = []

    def wait_for_command() -> None:
        try:
            sandbox.commands.run("echo up; sleep 300", timeout=0, on_stdout=lambda _: started.set())
        except Exception as error:
            ended.append((time.monotonic(), type(error).__name__))
        else:
            ended.append((time.monotonic(), "no exception"))
        finally:
            started.set()

    waiting = threading.Thread(target=wait_for_command, daemon=True)
    waiting.start()
    assert started.wait(30)
    killed = time.monotonic()
    assert sandbox.kill() is True
    waiting.join(30)
    assert ended, "the call still waits"
    assert ended[0][1] == GONE, ended
    assert ended[0][0] - killed < 3, f"{ended[0][0] - killed} s"


if __name__ == "__main__":
    main()
