"""The whole road where no agent is in the sandbox: the official SDK, a gateway, a real OpenSandbox server and its containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from sandgate_errors import FailedPrecondition
from sandgate_plugin_api import AgentFeature
from sandgate_plugin_opensandbox.backend import OpenSandboxBackend
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings
from sandgate_testing.backend_suite import run_backend_suite
from sandgate_testing.gateway import Gateway, wait_until
from sandgate_testing.images import Images
from sandgate_testing.opensandbox import OnServer, OpenSandboxServer

#: Seconds. Many times what it needs on a machine with nothing else to do.
pytestmark = pytest.mark.timeout(950)


@dataclass(frozen=True, kw_only=True)
class WithoutAgents(OnServer):
    """Gateways under test that put nothing of ours into sandboxes."""

    def prepare(self, state_dir: Path) -> None:
        """There is nothing to be put ready."""

    def options(self, folder: Path) -> list[str]:
        config = folder / "config.toml"
        table = {**self.server.settings, "execd_only": True}
        lines = ["[backends.opensandbox]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
        lines += [
            "[backends.opensandbox.templates.base]",
            f'image = "{self.image}"',
            "cpu_count = 1",
            "memory_mb = 512",
        ]
        config.write_text("\n".join(lines) + "\n")
        return ["--backend", "opensandbox", "--config", str(config)]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


@pytest.fixture(scope="module")
def server(start_server) -> Iterator[OpenSandboxServer]:
    with start_server() as server:
        yield server


@pytest.fixture(scope="module")
def running(server: OpenSandboxServer, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    containers = WithoutAgents(image=images.debian(), bundle=tmp_path_factory.mktemp("none"), server=server)
    gateway = Gateway(containers=containers, on_exit="keep")
    try:
        gateway.start()
        yield gateway
        gateway.stop()
        assert gateway.remains() == []
    finally:
        gateway.discard()


@pytest.fixture
def sandbox(running: Gateway) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(timeout=600, envs={"FROM_CREATE": "given"}, **running.sdk_options)
    yield sandbox
    sandbox.kill()


def test_backend_passes_the_suite_without_agents(server: OpenSandboxServer, images: Images, tmp_path: Path) -> None:
    # Servers of one engine list each other's sandboxes, and whoever has a gateway's name clears up after it.
    table = {**server.settings, "execd_only": True, "gateway": "suite-without-agents"}
    lines = ["[backends.opensandbox]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    lines += ["[backends.opensandbox.templates.base]", f'image = "{images.debian()}"\n']
    assert " passed" in run_backend_suite("opensandbox", config="\n".join(lines), folder=tmp_path)


def test_nothing_of_the_gateways_runs_in_the_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("ls /opt/sandgate /run/sandgate/agent 2>/dev/null | wc -l").stdout.strip() == "0"
    shown = sandbox.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "sandgate_agent" not in shown


def test_commands_run_as_with_an_agent(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("printf 'a\\r\\nb'; printf e >&2; echo $FROM_CREATE $MORE; id -un", envs={"MORE": "m"})
    assert (done.stdout, done.stderr, done.exit_code) == ("a\r\nbgiven m\nroot\n", "e", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 60", timeout=1)
    pieces: list[str] = []
    sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.2; done", on_stdout=pieces.append)
    assert "".join(pieces) == "1\n2\n3\n"
    reading = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    assert [process.pid for process in sandbox.commands.list()] == [reading.pid]
    sandbox.commands.send_stdin(reading.pid, "this\n")
    assert reading.wait().stdout == "got this\n"
    sleeping = sandbox.commands.run("sleep 600", background=True)
    followed = sandbox.commands.connect(sleeping.pid)
    assert sandbox.commands.kill(sleeping.pid)
    with pytest.raises(CommandExitException) as killed:
        followed.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(sleeping.pid)
    assert sandbox.commands.list() == []


def test_terminal_works(sandbox: Sandbox) -> None:
    seen: list[bytes] = []
    terminal = sandbox.pty.create(PtySize(rows=20, cols=77))
    reader = threading.Thread(target=_follow, args=(terminal, seen))
    reader.start()
    sandbox.pty.resize(terminal.pid, PtySize(rows=11, cols=66))
    wait_until(lambda: _answers(sandbox, terminal.pid, seen, b"11 66"))
    sandbox.pty.send_stdin(terminal.pid, b"exit 0\n")
    reader.join(60)
    assert not reader.is_alive()


def _follow(terminal, seen: list[bytes]) -> None:
    with contextlib.suppress(CommandExitException):
        terminal.wait(on_pty=seen.append)


def _answers(sandbox: Sandbox, pid: int, seen: list[bytes], answer: bytes) -> bool:
    sandbox.pty.send_stdin(pid, b"stty size\n")
    time.sleep(0.3)
    return answer in b"".join(seen)


def test_files_work(sandbox: Sandbox) -> None:
    content = os.urandom(3_000_000)
    sandbox.files.write("dir/data", content)
    assert bytes(sandbox.files.read("dir/data", format="bytes")) == content
    sandbox.files.write_files([{"path": "dir/a", "data": "text ä"}, {"path": "dir/b", "data": b"\0\1"}])
    assert sandbox.files.read("dir/a") == "text ä"
    assert sandbox.commands.run("wc -c < dir/data").stdout.strip() == str(len(content))
    assert {entry.name: entry.size for entry in sandbox.files.list("dir")} == {"a": 7, "b": 2, "data": len(content)}
    assert sandbox.files.get_info("dir/a").owner == "root"
    assert not sandbox.files.make_dir("dir")
    assert sandbox.files.rename("dir/a", "other/a").path == "/root/other/a"
    sandbox.files.remove("dir")
    assert not sandbox.files.exists("dir")
    with pytest.raises(NotFoundException):
        sandbox.files.read("dir/a")
    url = sandbox.upload_url("by url")
    assert httpx.post(url, files={"file": b"signed"}).status_code == 200
    assert httpx.get(sandbox.download_url("by url")).content == b"signed"


def test_watch_works(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched")
    watch = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/sub/new", "x")
    assert {(event.name, event.type.value) for event in watch.get_new_events()} >= {
        ("sub", "create"),
        ("sub/new", "create"),
        ("sub/new", "write"),
    }
    watch.stop()


def test_what_there_is_not_is_refused_in_words(sandbox: Sandbox) -> None:
    with pytest.raises(AuthenticationException, match="done as 'root'"):
        sandbox.commands.run("true", user="user")
    with pytest.raises(SandboxException, match="metadata of files"):
        sandbox.files.write("x", "x", metadata={"a": "b"})
    cat = sandbox.commands.run("cat", background=True, stdin=True)
    with pytest.raises(SandboxException, match="cannot close the standard input"):
        sandbox.commands.close_stdin(cat.pid)
    assert cat.kill()


def test_port_is_reached(sandbox: Sandbox, running: Gateway) -> None:
    sandbox.files.write("site/page", "from inside")
    sandbox.commands.run("cd site && python3 -m http.server 8123 --bind 127.0.0.1", background=True)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8123"}

    def page() -> bytes | None:
        answer = httpx.get(f"{running.url}/page", headers=headers)
        return answer.content if answer.status_code == 200 else None

    assert wait_until(page) == b"from inside"


def test_gateway_that_is_killed_leaves_commands_to_the_next(running: Gateway) -> None:
    sandbox = Sandbox.create(timeout=600, envs={"FROM_CREATE": "given"}, **running.sdk_options)
    counting = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.1; done"
    command = sandbox.commands.run(counting, background=True)
    wait_until(lambda: sandbox.files.exists("count"))
    running.stop(hard=True)
    running.start()
    again = Sandbox.connect(sandbox.sandbox_id, **running.sdk_options)
    assert [(process.pid, process.args[-1]) for process in again.commands.list()] == [(command.pid, counting)]
    assert again.commands.run("echo $FROM_CREATE").stdout == "given\n"
    before = int(again.files.read("count"))
    wait_until(lambda: int(again.files.read("count") or 0) > before)
    assert again.commands.kill(command.pid)
    assert again.commands.list() == []
    again.kill()


def test_pause_with_memory_lets_everything_go_on(sandbox: Sandbox, running: Gateway) -> None:
    command = sandbox.commands.run("i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.1; done", background=True)
    wait_until(lambda: sandbox.files.exists("count"))
    limited = sandbox.commands.run("exec sleep 600", background=True, timeout=3)
    sandbox.pause()
    # Longer than the limit, which is kept as soon as it can be.
    time.sleep(4)
    again = Sandbox.connect(sandbox.sandbox_id, **running.sdk_options)
    before = int(again.files.read("count") or 0)
    wait_until(lambda: int(again.files.read("count") or 0) > before)
    wait_until(lambda: limited.pid not in {process.pid for process in again.commands.list()})
    assert [process.pid for process in again.commands.list()] == [command.pid]


def test_settings_for_an_agent_are_refused_where_there_is_none() -> None:
    for table in ({"agent_mount": True}, {"agent_port": 5000}, {"sudo": True}):
        with pytest.raises(FailedPrecondition, match=f"'{next(iter(table))}' is for sandboxes with an agent"):
            OpenSandboxSettings.read({"server": "http://x", "execd_only": True, **table})
    templates = {"base": {"image": "i", "sudo": False}}
    with pytest.raises(FailedPrecondition, match=r"templates\.base\.sudo"):
        OpenSandboxSettings.read({"server": "http://x", "execd_only": True, "templates": templates})


async def test_doctor_says_what_is_missing_without_an_agent(make_gateway) -> None:
    gateway = make_gateway(agent_mount=False)
    settings = {**gateway.context().settings, "execd_only": True}
    del settings["agent_mount"]
    rows = await asyncio.to_thread(OpenSandboxBackend.diagnose, settings)
    (row,) = [row for row in rows if row[0] == "agents"]
    assert row[1]
    assert all(feature.value in row[2] for feature in AgentFeature)
