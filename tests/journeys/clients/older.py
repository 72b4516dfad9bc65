"""What programs written for older releases of the Python SDK do, in the words of those releases.

Argument: where names below the domain lead. Domain and key come from E2B_DOMAIN and E2B_API_KEY. One line of JSON for
each step, read by ``test_older_releases.py``; a step that the release lacks is not taken.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from uuid import uuid4

import e2b
import httpx
from e2b import AsyncSandbox, Sandbox
from steps import raises, step

DOMAIN = os.environ["E2B_DOMAIN"]
METADATA = {"release": uuid4().hex, "é &": "a=b"}
resolve = socket.getaddrinfo


def lead_here(host, *arguments, **options):
    """In place of DNS."""
    name = host.decode() if isinstance(host, bytes) else host
    here = name is not None and name.endswith(DOMAIN.partition(":")[0])
    return resolve("127.0.0.1" if here else host, *arguments, **options)


def made(**options):
    """Before release 2 the class itself made them."""
    return getattr(Sandbox, "create", Sandbox)(**options)


def items_of(listed):
    """A list, or a paginator."""
    return listed if isinstance(listed, list) else listed.next_items()


def commands(sandbox):
    with step("run"):
        result = sandbox.commands.run("echo $GREETING $NAME; pwd; id -un", envs={"NAME": "you"}, cwd="/tmp")
        assert (result.stdout, result.exit_code) == ("hello you\n/tmp\nuser\n", 0)
        with raises("CommandExitException") as caught:
            sandbox.commands.run("exit 3")
        assert caught[0].exit_code == 3
        assert sandbox.commands.run("id -u", user="root").stdout == "0\n"
    with step("stream"):
        out, err = [], []
        sandbox.commands.run("echo a; echo b >&2; echo ü", on_stdout=out.append, on_stderr=err.append)
        assert ("".join(out), "".join(err)) == ("a\nü\n", "b\n")
    with step("time_limit"), raises("TimeoutException"):
        sandbox.commands.run("sleep 50", timeout=3)
    with step("background"):
        handle = sandbox.commands.run("sleep 60", background=True)
        assert handle.pid in {process.pid for process in sandbox.commands.list()}
        assert sandbox.commands.connect(handle.pid).pid == handle.pid
        assert sandbox.commands.kill(handle.pid) is True
        assert sandbox.commands.kill(handle.pid) is False
    with step("stdin"):
        takes = inspect.signature(sandbox.commands.run).parameters
        handle = sandbox.commands.run("head -c 5", background=True, **({"stdin": True} if "stdin" in takes else {}))
        sandbox.commands.send_stdin(handle.pid, "hello")
        assert handle.wait().stdout == "hello"
    with step("terminal"):
        terminal = sandbox.pty.create(e2b.PtySize(24, 80))
        sandbox.pty.resize(terminal.pid, e2b.PtySize(30, 100))
        sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2))\nexit\n")
        shown = []
        terminal.wait(on_pty=shown.append)
        assert b"42" in b"".join(shown)


def files(sandbox):
    with step("files"):
        assert sandbox.files.write("d/a.txt", "text").path == "/home/user/d/a.txt"
        assert sandbox.files.read("d/a.txt") == "text"
        assert b"".join(sandbox.files.read("d/a.txt", format="stream")) == b"text"
        assert (sandbox.files.exists("d/a.txt"), sandbox.files.exists("nothing")) == (True, False)
        assert (sandbox.files.make_dir("e"), sandbox.files.make_dir("e")) == (True, False)
        assert [(entry.name, entry.type.value) for entry in sandbox.files.list("d")] == [("a.txt", "file")]
        assert sandbox.files.rename("d/a.txt", "d/b.txt").path == "/home/user/d/b.txt"
        sandbox.files.write("d/b.txt", b"\0\xff")
        assert bytes(sandbox.files.read("d/b.txt", format="bytes")) == b"\0\xff"
        sandbox.files.remove("d/b.txt")
        for call in (sandbox.files.read, sandbox.files.list):
            try:
                call("d/b.txt")
            except e2b.NotFoundException:
                # Or a relative of it: releases from 2.16 on have one for files.
                continue
            raise AssertionError(f"{call.__name__} found what is not there")
    with step("watch"):
        sandbox.files.make_dir("w")
        watch = sandbox.files.watch_dir("w")
        sandbox.files.write("w/x", "1")
        seen = set()
        deadline = time.monotonic() + 20
        while "x" not in seen and time.monotonic() < deadline:
            seen |= {event.name for event in watch.get_new_events()}
        watch.stop()
        assert "x" in seen
    with step("urls"):
        done = httpx.post(sandbox.upload_url("u"), files={"file": b"by url"})
        assert done.status_code == 200, done.text
        assert httpx.get(sandbox.download_url("u")).text == "by url"


def others(sandbox):
    with step("list"):
        assert [item.metadata for item in items_of(Sandbox.list()) if item.sandbox_id in sandbox.sandbox_id] == [
            METADATA
        ]
    if hasattr(sandbox, "get_info"):
        with step("get_info"):
            info = sandbox.get_info()
            assert info.end_at > info.started_at
    if hasattr(sandbox, "get_metrics"):
        with step("metrics"):
            deadline = time.monotonic() + 30
            while not (found := sandbox.get_metrics()) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert found[0].cpu_count > 0
    with step("set_timeout"):
        sandbox.set_timeout(90)
    with step("connect"):
        assert Sandbox.connect(sandbox.sandbox_id).commands.run("echo again").stdout == "again\n"
    pause = getattr(sandbox, "pause", None) or getattr(sandbox, "beta_pause", None)
    if pause is not None:
        with step("pause"):
            sandbox.files.write("kept", "as it was")
            pause()
            resumed = getattr(Sandbox, "resume", Sandbox.connect)(sandbox.sandbox_id)
            assert resumed.files.read("kept") == "as it was"


async def asynchronous():
    sandbox = await AsyncSandbox.create(timeout=60)
    try:
        assert (await sandbox.commands.run("echo hi")).stdout == "hi\n"
        seen = asyncio.Event()
        watch = await sandbox.files.watch_dir(".", on_event=lambda event: event.name == "y" and seen.set())
        await sandbox.files.write("y", "1")
        await asyncio.wait_for(seen.wait(), 20)
        await watch.stop()
        assert await sandbox.files.read("y") == "1"
    finally:
        await sandbox.kill()


def main():
    socket.getaddrinfo = lead_here
    with step("create"):
        sandbox = made(timeout=120, metadata=METADATA, envs={"GREETING": "hello"})
        assert sandbox.is_running()
        assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.{DOMAIN}"
    commands(sandbox)
    files(sandbox)
    others(sandbox)
    with step("kill"):
        # Before release 2 the method of an instance said nothing.
        assert sandbox.kill() in {True, None}
        assert Sandbox.kill(sandbox.sandbox_id) is False
        assert sandbox.is_running() is False
    with step("asynchronous"):
        asyncio.run(asynchronous())


main()
