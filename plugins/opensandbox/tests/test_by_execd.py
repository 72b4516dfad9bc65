"""Commands and files by execd alone: the agent outside its sandbox, with the stand-in for execd as a program of this machine.

What it shares with the agent in sandboxes is tested there; here what goes another way. The whole road, from the SDK to a
container that has no agent, is in ``test_execd_only.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from sandgate_agent.accounts import Account
from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_plugin_api import Placement
from sandgate_plugin_api.testsuite.box import Agent, agent_at, rest_of
from sandgate_plugin_opensandbox.by_execd.agent import FarAgents, Surroundings
from sandgate_plugin_opensandbox.by_execd.ports import addressed
from sandgate_plugin_opensandbox.server import Endpoint
from sandgate_testing.cutting_proxy import CuttingProxy
from sandgate_testing.execd_stand_in import pack

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a program a folder /run/sandgate of its own"),
]

TOKEN = "known-to-execd"
AGENT_TOKEN = "known-to-the-gateway"
#: What a sandbox has of its own, and this machine for all tests together.
ALONE = 'mkdir -p /run/sandgate && mount -t tmpfs none /run/sandgate && exec "$@"'


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("execd") / "execd"
    pack(path)
    return path


class Execd:
    """The stand-in, which can be ended and started again at another port."""

    def __init__(self, program: Path, *, harsh: bool) -> None:
        self._program = program
        self._harsh = harsh
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        command = ["unshare", "--mount", "sh", "-c", ALONE, "sh", sys.executable, "-I", "-S", str(self._program)]
        environment = {"PATH": os.environ["PATH"], "EXECD_PORT": "0", "EXECD_ACCESS_TOKEN": TOKEN, "SECRET": "execd's"}
        environment["EXECD_HARSH"] = str(int(self._harsh))
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


@pytest.fixture(params=[False, True], ids=["", "as harsh as the genuine one"])
def execd(request: pytest.FixtureRequest, program: Path) -> Iterator[Execd]:
    execd = Execd(program, harsh=request.param)
    yield execd
    execd.stop()


@dataclass
class Sandbox:
    """A folder in the place of a sandbox's home, and gateways that work in it one after the other."""

    home: Path
    sockets: Path
    execd: Execd
    #: Where execd is said to be; execd's own port where nobody says otherwise.
    port: int | None = None

    @asynccontextmanager
    async def gateway(self, *, new: bool) -> AsyncIterator[Agent]:
        """The agent, as a gateway has it that has just made the sandbox, or finds it."""

        async def where(port: int) -> Endpoint:
            base = f"http://127.0.0.1:{self.port or self.execd.port}"
            return Endpoint(base if port == 44772 else f"{base}/proxy/{port}", {})

        account = Account(name="root", uid=0, gid=0, groups=(0,), home=str(self.home))
        surroundings = Surroundings(account=account, group="root", path=os.environ["PATH"])
        async with AsyncExitStack() as closing:
            session = await closing.enter_async_context(aiohttp.ClientSession())
            agents = FarAgents(session, self.sockets, tls=ssl.create_default_context)
            closing.push_async_callback(agents.close)
            agent = await agents.open(
                "isandbox",
                "id",
                where,
                token=AGENT_TOKEN,
                execd_token=TOKEN,
                surroundings=surroundings if new else None,
            )
            placement = Placement(handle={}, agent=agent.address)
            yield await closing.enter_async_context(agent_at(placement))


@pytest.fixture
async def sandbox(execd: Execd, tmp_path: Path) -> AsyncIterator[Sandbox]:
    # Short, for socket addresses.
    with tempfile.TemporaryDirectory(prefix="sgx-") as sockets:
        yield Sandbox(tmp_path, Path(sockets), execd)
        assert os.listdir(sockets) == []


@pytest.fixture
async def agent(sandbox: Sandbox) -> AsyncIterator[Agent]:
    async with sandbox.gateway(new=True) as agent:
        await agent.init("isandbox", envs={"FROM_CREATE": "given"})
        yield agent


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in other programs
            await asyncio.sleep(0.02)


def limited(agent: Agent, seconds: float) -> tuple[tuple[str, str | bytes], ...]:
    return (*agent.metadata(), ("timeout-ms", str(round(1000 * seconds))))


def of(pid: int) -> process_pb2.ProcessSelector:
    return process_pb2.ProcessSelector(pid=pid)


async def send_signal(agent: Agent, pid: int, number: int = process_pb2.SIGNAL_SIGKILL) -> None:
    request = process_pb2.SendSignalRequest(process=of(pid), signal=number)
    await agent.process.SendSignal(request, metadata=agent.metadata(), timeout=30)


async def send_input(agent: Agent, pid: int, **data: bytes) -> None:
    request = process_pb2.SendInputRequest(process=of(pid), input=process_pb2.ProcessInput(**data))
    await agent.process.SendInput(request, metadata=agent.metadata(), timeout=30)


async def listed(agent: Agent) -> list[process_pb2.ProcessInfo]:
    found = await agent.process.List(process_pb2.ListRequest(), metadata=agent.metadata(), timeout=30)
    return list(found.processes)


def gathered(events: list[process_pb2.ProcessEvent]) -> dict[str, bytes]:
    output = {"stdout": b"", "stderr": b"", "pty": b""}
    for event in events:
        if (kind := event.data.WhichOneof("output")) is not None:
            output[kind] += getattr(event.data, kind)
    return output


# Commands.


async def test_output_is_what_was_written_byte_for_byte_and_apart(agent: Agent) -> None:
    script = r"printf 'a\rb\n\n\000\377no end'; printf 'e\r\n' >&2; head -c 3000000 /dev/zero | tr '\0' x; exit 7"
    events = await rest_of(agent.start(script))
    output = gathered(events)
    assert output["stdout"] == b"a\rb\n\n\0\xffno end" + b"x" * 3_000_000
    assert output["stderr"] == b"e\r\n"
    assert (events[-1].end.exit_code, events[-1].end.exited, events[-1].end.status) == (7, True, "exit status 7")


async def test_command_has_the_variables_that_are_its_own_and_nothing_of_execds(agent: Agent, sandbox: Sandbox) -> None:
    done = await agent.run('env | sort; echo "$odd"', envs={"odd": "a 'b\" $c\n`d`", "A": "1"})
    variables = dict(line.partition("=")[::2] for line in done.stdout.splitlines() if "=" in line)
    assert "SECRET" not in variables
    assert "EXECD_ACCESS_TOKEN" not in variables
    assert variables["HOME"] == str(sandbox.home)
    assert (variables["FROM_CREATE"], variables["A"], variables["E2B_SANDBOX_ID"]) == ("given", "1", "isandbox")
    assert done.stdout.endswith("a 'b\" $c\n`d`\n")


async def test_program_with_an_odd_name_runs_as_it_is_named(agent: Agent, sandbox: Sandbox) -> None:
    program = sandbox.home / "a=b 'c'"
    program.write_text('#!/bin/sh\necho "$1"\n')
    program.chmod(0o755)
    process = process_pb2.ProcessConfig(cmd=str(program), args=["x 'y' $z"])
    call = agent.process.Start(process_pb2.StartRequest(process=process), metadata=agent.metadata(), timeout=30)
    assert gathered(await rest_of(call))["stdout"] == b"x 'y' $z\n"


async def test_command_starts_where_it_is_asked_to_or_not_at_all(agent: Agent, sandbox: Sandbox) -> None:
    (sandbox.home / "in here").mkdir()
    (sandbox.home / "file").touch()
    assert (await agent.run("pwd", cwd="in here")).text() == f"{sandbox.home}/in here"
    for cwd, words in (("missing", "does not exist"), ("file", "not a directory")):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await agent.run("touch ran", cwd=cwd)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await listed(agent) == []
    assert not (sandbox.home / "ran").exists()


async def test_command_too_long_for_execd_is_refused_and_the_longest_runs(agent: Agent) -> None:
    assert (await agent.run(f"# {'x' * 120_000}\necho ran")).text() == "ran"
    with pytest.raises(grpc.aio.AioRpcError, match="131071 bytes") as refused:
        await agent.run(f"# {'x' * 140_000}")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_signals_end_a_command_with_their_names(agent: Agent) -> None:
    for number, status in (
        (process_pb2.SIGNAL_SIGKILL, "signal: killed"),
        (process_pb2.SIGNAL_SIGTERM, "signal: terminated"),
    ):
        call = agent.start("exec sleep 600")
        pid = (await call.read()).event.start.pid
        await send_signal(agent, pid, number)
        end = (await rest_of(call))[-1].end
        assert (end.exit_code, end.exited, end.status) == (-1, False, status)
    assert await listed(agent) == []


async def test_kill_ends_a_command_whose_output_nobody_takes(agent: Agent) -> None:
    """Its end comes behind output that waits for a reader, who never comes."""
    process = process_pb2.ProcessConfig(cmd="/bin/sh", args=["-c", "exec cat /dev/zero"])
    call = agent.process.Start(process_pb2.StartRequest(process=process), metadata=agent.metadata())
    pid = (await call.read()).event.start.pid
    await asyncio.sleep(1)
    await send_signal(agent, pid)

    async def gone() -> bool:
        return await listed(agent) == []

    await until(gone)
    call.cancel()


async def test_last_output_of_a_command_comes_though_it_ends_behind_it(agent: Agent, sandbox: Sandbox) -> None:
    """The end is told first, and the command is not run once more by who comes for the rest."""
    for size in (70_000, 900_000):
        events = await rest_of(agent.start(f"echo ran >> runs; head -c {size} /dev/zero"))
        assert len(gathered(events)["stdout"]) == size
        assert events[-1].end.exit_code == 0
    assert (sandbox.home / "runs").read_text() == "ran\nran\n"


async def test_kill_ends_a_command_that_does_not_take_its_input(agent: Agent) -> None:
    call = agent.start("exec sleep 600", stdin=True)
    pid = (await call.read()).event.start.pid
    flood = asyncio.ensure_future(_error_of(lambda: send_input(agent, pid, stdin=b"x" * 4_000_000)))
    await asyncio.sleep(0.5)
    await send_signal(agent, pid)
    end = (await rest_of(call))[-1].end
    assert (end.exit_code, end.status) == (-1, "signal: killed")
    # What of it was on its way counts as written.
    await asyncio.wait({flood})
    assert await listed(agent) == []


async def test_time_limit_ends_a_command(agent: Agent) -> None:
    process = process_pb2.ProcessConfig(cmd="/bin/sh", args=["-c", "echo begun; exec sleep 600"])
    call = agent.process.Start(process_pb2.StartRequest(process=process), metadata=limited(agent, 0.5), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        await rest_of(call)
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await listed(agent) == []


async def test_input_arrives_whole_and_in_order(agent: Agent) -> None:
    call = agent.start("head -c 1000006 | sha256sum; cat > /dev/null", stdin=True)
    pid = (await call.read()).event.start.pid
    await send_input(agent, pid, stdin=b"begin\n")
    await send_input(agent, pid, stdin=bytes(range(250)) * 4000)
    digest = hashlib.sha256(b"begin\n" + bytes(range(250)) * 4000).hexdigest()
    while not (output := (await call.read()).event.data.stdout):
        pass
    assert output.split()[0] == digest.encode()
    await send_signal(agent, pid)
    await rest_of(call)


async def test_terminal_has_the_size_that_it_is_given_and_interrupts(agent: Agent) -> None:
    size = process_pb2.PTY.Size(cols=91, rows=17)
    process = process_pb2.ProcessConfig(cmd="/bin/sh")
    request = process_pb2.StartRequest(process=process, pty=process_pb2.PTY(size=size))
    call = agent.process.Start(request, metadata=agent.metadata(), timeout=60)
    pid = (await call.read()).event.start.pid
    assert (await listed(agent))[0].kind == process_pb2.PROCESS_KIND_TERMINAL
    seen = b""

    async def shown(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += (await call.read()).event.data.pty

    async def has_size(answer: bytes) -> None:
        nonlocal seen
        while True:
            seen = b""
            await send_input(agent, pid, pty=b"stty size; echo do'ne'\n")
            await shown(b"done")
            if answer in seen:
                return

    await has_size(b"17 91")
    size = process_pb2.PTY.Size(cols=44, rows=9)
    update = process_pb2.UpdateRequest(process=of(pid), pty=process_pb2.PTY(size=size))
    await agent.process.Update(update, metadata=agent.metadata(), timeout=30)
    await has_size(b"9 44")
    await send_input(agent, pid, pty=b"echo wai'ting'; sleep 600\n")
    await shown(b"waiting")
    await send_input(agent, pid, pty=b"\x03")
    await send_input(agent, pid, pty=b"echo st'ill'; exit 4\n")
    await shown(b"still")
    assert (await rest_of(call))[-1].end.exit_code == 4


async def test_nothing_of_a_command_is_left_where_it_ran(agent: Agent) -> None:
    (await agent.run("true")).text()

    async def clean() -> bool:
        # This one's own record is there while it asks.
        return (await agent.run("cd /run/sandgate/execd && echo *[0-9]* | wc -w")).text() == "1"

    await until(clean)


async def test_what_an_earlier_gateway_left_half_done_keeps_no_command_from_running(sandbox: Sandbox) -> None:
    """It was killed when a command's record was gone, and not yet all that stood beside it."""
    async with sandbox.gateway(new=True) as agent:
        await agent.init("isandbox")
        (await agent.run("for n in $(seq 1 40); do mkdir -p /run/sandgate/execd/$n/x; done")).text()
    async with sandbox.gateway(new=False) as agent:
        for _ in range(3):
            assert (await agent.run("echo ran")).text() == "ran"

        async def clean() -> bool:
            return (await agent.run("cd /run/sandgate/execd && echo *[0-9]* | wc -w")).text() == "1"

        await until(clean)


async def test_variables_with_odd_names_are_variables_and_no_options(agent: Agent) -> None:
    odd = {"-u": "HOME", "--split-string": "touch ran", "-S": "x", "--": "y", "a b": "c'\"\n", "%?#": "é", "-": "z"}
    # Not by way of a shell, which passes on none of these.
    process = process_pb2.ProcessConfig(cmd="env", args=["-0"], envs=odd)
    call = agent.process.Start(process_pb2.StartRequest(process=process), metadata=agent.metadata(), timeout=30)
    told = gathered(await rest_of(call))["stdout"].decode()
    found = dict(entry.partition("=")[::2] for entry in told.split("\0") if entry)
    assert {name: found.get(name) for name in odd} == odd


async def test_many_commands_at_once_all_run_and_leave_nothing(agent: Agent) -> None:
    await agent.run("true")
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    done = await asyncio.gather(*(agent.run(f"echo {number}; exit {number % 7}") for number in range(200)))
    assert [(each.stdout, each.exit_code) for each in done] == [(f"{number}\n", number % 7) for number in range(200)]
    assert await listed(agent) == []
    # 200 that stayed would be hundreds; the library for calls and idle connections are few.
    connections = 100

    async def closed() -> bool:
        return (
            len(os.listdir("/proc/self/fd")) < before + connections and len(asyncio.all_tasks()) < tasks + connections
        )

    await until(closed)


async def test_paths_with_odd_characters_are_what_they_are(agent: Agent, sandbox: Sandbox) -> None:
    options: dict[str, Any] = {"metadata": agent.metadata(), "timeout": 30}
    for name in (
        "a\nb",
        "100%",
        "%2e%2e",
        "what?",
        "a#b",
        "a&b=c",
        "+ +",
        "é\u202e",
        "'\"`$(x)",
        "-rf",
        "x" * 255,
        "\\",
    ):
        await agent.write(name, name.encode())
        assert (sandbox.home / name).read_text() == name
        assert await agent.read(name) == name.encode()
        moved = await agent.filesystem.Move(filesystem_pb2.MoveRequest(source=name, destination=f"d/{name}"), **options)
        assert moved.entry.path == f"{sandbox.home}/d/{name}"
        entries = (await agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(path="d", depth=1), **options)).entries
        assert [entry.name for entry in entries] == [name]
        (sandbox.home / "d" / name).unlink()
        (sandbox.home / "d" / name).mkdir()
        assert (await agent.run("pwd", cwd=f"d/{name}")).stdout == f"{sandbox.home}/d/{name}\n"
        await agent.filesystem.Remove(filesystem_pb2.RemoveRequest(path=f"d/{name}"), **options)
        assert os.listdir(sandbox.home / "d") == []
    for path, code in (
        ("a\0b", grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 256, grpc.StatusCode.INVALID_ARGUMENT),
        ("x/" * 3000, grpc.StatusCode.INVALID_ARGUMENT),
        ("../" * 50 + "no such", grpc.StatusCode.NOT_FOUND),
    ):
        error = await _error_of(lambda path=path: agent.read(path))  # type: ignore[misc]
        assert error is not None
        assert error.code() is code


async def test_what_execd_cannot_do_is_refused_by_name(agent: Agent) -> None:
    call = agent.start("cat", stdin=True)
    pid = (await call.read()).event.start.pid
    with pytest.raises(grpc.aio.AioRpcError, match="cannot close the standard input") as refused:
        await agent.process.CloseStdin(
            process_pb2.CloseStdinRequest(process=of(pid)), metadata=agent.metadata(), timeout=30
        )
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await send_signal(agent, pid)
    await rest_of(call)
    with pytest.raises(grpc.aio.AioRpcError, match="done as 'root'") as refused:
        await agent.run("true", user="user")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError, match="metadata of files") as refused:
        await agent.write("file", b"x", metadata={"a": "b"})
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


# Cuts, and other gateways.


async def test_cut_sockets_lose_no_output_and_no_input(sandbox: Sandbox) -> None:
    with CuttingProxy(("127.0.0.1", sandbox.execd.port)) as proxy:
        sandbox.port = int(proxy.address.rpartition(":")[2])
        async with sandbox.gateway(new=True) as agent:
            script = "i=0; while [ $i -lt 300 ]; do echo line$i; i=$((i+1)); sleep 0.01; done; read word; echo $word"
            call = agent.start(script, stdin=True)
            pid = (await call.read()).event.start.pid
            events = []
            for _ in range(4):
                events.append((await call.read()).event)
                proxy.cut()
                await asyncio.sleep(0.3)
            await send_input(agent, pid, stdin=b"last\n")
            events += await rest_of(call)
    assert gathered(events)["stdout"].decode().splitlines() == [*(f"line{number}" for number in range(300)), "last"]
    assert events[-1].end.exit_code == 0


async def test_output_that_execd_has_not_kept_is_said_to_be_lost(sandbox: Sandbox) -> None:
    """More than its mebibyte comes while nobody is attached."""
    script = "until [ -e go ]; do sleep 0.02; done; head -c 3000000 /dev/zero; touch done; exec sleep 600"
    async with AsyncExitStack() as closing:
        with CuttingProxy(("127.0.0.1", sandbox.execd.port)) as proxy:
            sandbox.port = int(proxy.address.rpartition(":")[2])
            agent = await closing.enter_async_context(sandbox.gateway(new=True))
            call = agent.start(script)
            pid = (await call.read()).event.start.pid
        (sandbox.home / "go").touch()
        while not (sandbox.home / "done").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        sandbox.port = None
        with pytest.raises(grpc.aio.AioRpcError, match="lost at a cut") as lost:
            await rest_of(call)
        assert lost.value.code() is grpc.StatusCode.DATA_LOSS
        # It runs on, and can be followed from here.
        assert [process.pid for process in await listed(agent)] == [pid]
        await send_signal(agent, pid)


async def test_next_gateway_takes_up_what_runs(sandbox: Sandbox) -> None:
    """Its commands, their tags, inputs, terminals and time limits; and who the sandbox is."""
    async with sandbox.gateway(new=True) as agent:
        await agent.init("isandbox", envs={"FROM_CREATE": "given"})
        process = process_pb2.ProcessConfig(
            cmd="/bin/sh",
            args=["-c", "while read line; do echo got $line; done"],
            envs={"A": "1"},
            cwd=str(sandbox.home),
        )
        call = agent.process.Start(
            process_pb2.StartRequest(process=process, tag="kept", stdin=True), metadata=agent.metadata()
        )
        await call.read()
        limit = process_pb2.ProcessConfig(cmd="/bin/sleep", args=["600"])
        limited_call = agent.process.Start(
            process_pb2.StartRequest(process=limit, stdin=False), metadata=limited(agent, 3)
        )
        await limited_call.read()
        ended = agent.start("until [ -e go ]; do sleep 0.02; done; touch ended")
        await ended.read()
        for each in (call, limited_call, ended):
            each.cancel()
        before = await listed(agent)
        assert len(before) == 3
    (sandbox.home / "go").touch()
    while not (sandbox.home / "ended").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    async with sandbox.gateway(new=False) as agent:
        after = await listed(agent)
        assert after == before[:2]
        assert (await agent.run('echo "$FROM_CREATE $E2B_SANDBOX_ID"')).text() == "given isandbox"
        kept = agent.process.Connect(
            process_pb2.ConnectRequest(process=process_pb2.ProcessSelector(tag="kept")), metadata=agent.metadata()
        )
        await kept.read()
        await send_input(agent, before[0].pid, stdin=b"this\n")
        assert (await kept.read()).event.data.stdout == b"got this\n"

        async def only_one() -> bool:
            return [process.pid for process in await listed(agent)] == [before[0].pid]

        # The limit counts from when it began.
        await until(only_one)
        await send_signal(agent, before[0].pid)
        assert (await rest_of(kept))[-1].end.status == "signal: killed"


async def test_execd_that_is_away_is_unavailable_and_its_commands_are_gone(agent: Agent, sandbox: Sandbox) -> None:
    call = agent.start("echo $$; exec sleep 600")
    await call.read()
    orphan = int((await call.read()).event.data.stdout)
    sandbox.execd.stop()
    os.kill(orphan, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as away:
        await agent.run("true")
    assert away.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as away:
        await agent.read("file")
    assert away.value.code() is grpc.StatusCode.UNAVAILABLE
    sandbox.execd.start()
    end = (await rest_of(call))[-1].end
    assert (end.exited, end.status) == (False, "exit status unknown")
    assert (await agent.run("echo back")).text() == "back"


# Files.


async def test_content_goes_both_ways_and_a_mode_stays(agent: Agent, sandbox: Sandbox) -> None:
    content = os.urandom(5_000_001)
    written = (await agent.write("new/sub/data", content)).entry
    path = sandbox.home / "new/sub/data"
    assert path.read_bytes() == content
    assert (written.path, written.size, written.mode, written.owner) == (str(path), len(content), 0o644, "root")
    path.chmod(0o711)
    os.chown(path, 1, 2)
    inode = path.stat().st_ino
    await agent.write("new/sub/data", b"short")
    about = path.stat()
    assert (about.st_mode & 0o777, about.st_uid, about.st_gid, about.st_ino) == (0o711, 1, 2, inode)
    assert await agent.read("new/sub/data") == b"short"
    await agent.write("empty", b"")
    assert await agent.read("empty") == b""


async def test_part_of_a_file_is_read(agent: Agent, sandbox: Sandbox) -> None:
    (sandbox.home / "digits").write_bytes(b"0123456789")
    for offset, length, expected in (
        (0, None, b"0123456789"),
        (3, 4, b"3456"),
        (8, 9, b"89"),
        (10, None, b""),
        (4, 0, b""),
    ):
        request = agent_pb2.ReadFileRequest(path="digits", offset=offset, length=length)
        parts = [part async for part in agent.agent.ReadFile(request, metadata=agent.metadata(), timeout=30)]
        assert parts[0].header.size == 10
        assert b"".join(part.data for part in parts[1:]) == expected


async def test_what_has_no_content_is_refused_and_never_waited_for(agent: Agent, sandbox: Sandbox) -> None:
    os.mkfifo(sandbox.home / "pipe")
    for path, words in ((".", "is a directory"), ("pipe", "not a regular file"), ("/dev/zero", "not a regular file")):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await agent.read(path)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="is a directory") as refused:
        await agent.write(".", b"x")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tree_is_made_listed_moved_and_removed(agent: Agent, sandbox: Sandbox) -> None:
    options: dict[str, Any] = {"metadata": agent.metadata(), "timeout": 30}
    await agent.filesystem.MakeDir(filesystem_pb2.MakeDirRequest(path="a/b c"), **options)
    with pytest.raises(grpc.aio.AioRpcError) as there:
        await agent.filesystem.MakeDir(filesystem_pb2.MakeDirRequest(path="a"), **options)
    assert there.value.code() is grpc.StatusCode.ALREADY_EXISTS
    for name in ("a/z", "a/b c/é 'x'", "a-0", "a/b"):
        await agent.write(name, name.encode())
    (sandbox.home / "a/link").symlink_to("z")
    (sandbox.home / "a/z").chmod(0o750)
    (sandbox.home / "dangling").symlink_to("nowhere")
    await agent.filesystem.Remove(filesystem_pb2.RemoveRequest(path="dangling"), **options)
    assert not (sandbox.home / "dangling").is_symlink()
    entries = (await agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(depth=9), **options)).entries
    names = [os.path.relpath(entry.path, sandbox.home) for entry in entries]
    assert names == ["a", "a/b", "a/b c", "a/b c/é 'x'", "a/link", "a/z", "a-0"]
    assert [entry.name for entry in entries][3] == "é 'x'"
    by_name = dict(zip(names, entries, strict=True))
    assert (by_name["a/z"].permissions, by_name["a/z"].mode) == ("-rwxr-x---", 0o750)
    assert (by_name["a/link"].is_symlink, by_name["a/link"].type) == (True, filesystem_pb2.FILE_TYPE_SYMLINK)
    assert by_name["a/z"].modified_time.ToNanoseconds() == (sandbox.home / "a/z").stat().st_mtime_ns
    (await_direct,) = (
        (await agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(path="a/b c"), **options)).entries,
    )
    assert [entry.name for entry in await_direct] == ["é 'x'"]
    moved = await agent.filesystem.Move(filesystem_pb2.MoveRequest(source="a/z", destination="far/off/z"), **options)
    assert moved.entry.path == str(sandbox.home / "far/off/z")
    await agent.filesystem.Move(filesystem_pb2.MoveRequest(source="a-0", destination="far/off/z"), **options)
    assert (sandbox.home / "far/off/z").read_bytes() == b"a-0"
    for path in ("a", "far/off/z", "a", "never was"):
        await agent.filesystem.Remove(filesystem_pb2.RemoveRequest(path=path), **options)
    assert sorted(os.listdir(sandbox.home)) == ["far"]
    for request, method in (
        (filesystem_pb2.StatRequest(path="a"), agent.filesystem.Stat),
        (filesystem_pb2.ListDirRequest(path="a"), agent.filesystem.ListDir),
        (filesystem_pb2.MoveRequest(source="a", destination="b"), agent.filesystem.Move),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await method(request, **options)
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_what_was_made_written_changed_and_removed(agent: Agent, sandbox: Sandbox) -> None:
    (sandbox.home / "tree/below").mkdir(parents=True)
    (sandbox.home / "tree/old").write_text("old")
    options: dict[str, Any] = {"metadata": agent.metadata(), "timeout": 60}
    request = filesystem_pb2.CreateWatcherRequest(path="tree", recursive=True, include_entry=True)
    watcher = (await agent.filesystem.CreateWatcher(request, **options)).watcher_id
    call = agent.filesystem.WatchDir(filesystem_pb2.WatchDirRequest(path="tree", recursive=True), **options)
    assert (await call.read()).HasField("start")
    (sandbox.home / "tree/below/new").write_text("content")
    (sandbox.home / "tree/old").chmod(0o600)

    async def events() -> list[tuple[str, int, int]]:
        found = await agent.filesystem.GetWatcherEvents(
            filesystem_pb2.GetWatcherEventsRequest(watcher_id=watcher), **options
        )
        return [(event.name, event.type, event.entry.size) for event in found.events]

    create, write, remove, chmod = (
        filesystem_pb2.EVENT_TYPE_CREATE,
        filesystem_pb2.EVENT_TYPE_WRITE,
        filesystem_pb2.EVENT_TYPE_REMOVE,
        filesystem_pb2.EVENT_TYPE_CHMOD,
    )
    assert await events() == [("below/new", create, 7), ("below/new", write, 7), ("old", chmod, 3)]
    (sandbox.home / "tree/old").write_text("longer")
    (sandbox.home / "tree/below/new").unlink()
    assert await events() == [("below/new", remove, 0), ("old", write, 6)]
    assert await events() == []
    await agent.filesystem.RemoveWatcher(filesystem_pb2.RemoveWatcherRequest(watcher_id=watcher), **options)
    (sandbox.home / "tree/end").touch()
    seen: set[tuple[str, int]] = set()
    while ("end", create) not in seen:
        event = (await call.read()).filesystem
        seen.add((event.name, event.type))
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await events()
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


# Ports.


async def test_port_answers_what_the_edge_asks_it(agent: Agent, sandbox: Sandbox) -> None:
    (sandbox.home / "page").write_text("from inside")
    call = agent.start("exec python3 -m http.server --bind 127.0.0.1 0 2>&1", envs={"PYTHONUNBUFFERED": "1"})
    pid = (await call.read()).event.start.pid
    seen = b""
    while (found := re.search(rb"port (\d+)", seen)) is None:
        seen += (await call.read()).event.data.stdout
    dial = agent.agent.Dial(metadata=agent.metadata())
    await dial.write(agent_pb2.DialRequest(open=agent_pb2.DialRequest.Open(port=int(found[1]))))
    assert (await dial.read()).HasField("opened")
    head = b"GET /page?x=1 HTTP/1.1\r\nHost: 8000-isandbox.example\r\nConnection: close\r\n\r\n"
    await dial.write(agent_pb2.DialRequest(data=head[:20]))
    await dial.write(agent_pb2.DialRequest(data=head[20:]))
    answer = b""
    while not (part := await dial.read()).HasField("end"):
        answer += part.data
    dial.cancel()
    assert answer.startswith(b"HTTP/1.0 200")
    assert answer.endswith(b"from inside")
    await send_signal(agent, pid)
    await rest_of(call)


@pytest.mark.parametrize(
    ("base", "target", "host"),
    [
        ("http://10.0.0.1:41000/proxy/8000", b"/proxy/8000/a?b=c", b"of-client"),
        ("https://box.example/v1/x/?token=t", b"/v1/x/a?b=c&token=t", b"box.example"),
    ],
)
def test_head_of_a_request_is_addressed_to_the_relay(base: str, target: bytes, host: bytes) -> None:
    head = b"GET /a?b=c HTTP/1.1\r\nHost: of-client\r\nx-Token: of-client\r\nOther: kept"
    line, *fields = addressed(head, Endpoint(base, {"X-Token": "ours"})).split(b"\r\n")
    assert line == b"GET %b HTTP/1.1" % target
    assert sorted(field.lower() for field in fields) == [b"host: " + host, b"other: kept", b"x-token: ours"]


async def test_port_that_is_execds_is_nobodys(agent: Agent) -> None:
    dial = agent.agent.Dial(metadata=agent.metadata())
    await dial.write(agent_pb2.DialRequest(open=agent_pb2.DialRequest.Open(port=44772)))
    with pytest.raises(grpc.aio.AioRpcError) as closed:
        await dial.read()
    assert closed.value.code() is grpc.StatusCode.UNAVAILABLE


# Hostile sandboxes.

NONSENSE = (
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"a": 1}',
    b"[1, 2]",
    b'[{"path": 3}]',
    b'{"session_id": "../x"}',
    b"\xff" * 100,
)


@pytest.mark.parametrize("status", [200, 302, 404, 418, 500, 503])
async def test_whatever_answers_in_execds_place_makes_an_error_and_no_fault(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Root of a sandbox can put anything there."""
    answers = iter(NONSENSE * 1000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = next(answers)
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async with sandbox.gateway(new=True) as agent:
        await agent.init("isandbox")
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            sandbox.port = server.sockets[0].getsockname()[1]
            sandbox.execd.stop()
            for _ in range(len(NONSENSE)):
                for attempt in _everything(agent):
                    error = await _error_of(attempt)
                    assert error is None or error.code() is not grpc.StatusCode.UNKNOWN
                    assert error is None or "reference" not in str(error.details())
    assert "unexpected error" not in caplog.text


async def _error_of(attempt: Callable[[], Awaitable[object]]) -> grpc.aio.AioRpcError | None:
    try:
        async with asyncio.timeout(60):
            await attempt()
    except grpc.aio.AioRpcError as error:
        return error
    return None


def _everything(agent: Agent) -> tuple[Callable[[], Awaitable[object]], ...]:
    options: dict[str, Any] = {"metadata": agent.metadata(), "timeout": 30}
    return (
        lambda: agent.run("true"),
        lambda: agent.read("file"),
        lambda: agent.write("file", b"x"),
        lambda: agent.filesystem.Stat(filesystem_pb2.StatRequest(path="x"), **options),
        lambda: agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(path="x"), **options),
        lambda: agent.filesystem.MakeDir(filesystem_pb2.MakeDirRequest(path="x"), **options),
        lambda: agent.filesystem.Move(filesystem_pb2.MoveRequest(source="x", destination="y"), **options),
        lambda: agent.filesystem.Remove(filesystem_pb2.RemoveRequest(path="x"), **options),
        lambda: agent.filesystem.CreateWatcher(filesystem_pb2.CreateWatcherRequest(path="x"), **options),
        lambda: agent.agent.Metrics(agent_pb2.MetricsRequest(), **options),
    )
