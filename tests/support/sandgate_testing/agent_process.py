"""A real agent process and its stubs, as tests of the agent use it. Ends whatever it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import filesystem_pb2, filesystem_pb2_grpc, process_pb2, process_pb2_grpc

__all__ = [
    "Agent",
    "Output",
    "Running",
    "alive",
    "an_agent",
    "children_of",
    "code_of",
    "eventually",
    "follow",
    "gone",
    "name_of",
    "state_of",
]

TOKEN = "secret of this test"

#: How an agent is started for each identity, and whom it may act as.
PREFIXES: dict[str, tuple[str, ...]] = {"same": (), "switch": (), "nested": ("unshare", "--user", "--map-root-user")}
USERS = {"same": "user", "switch": "nobody", "nested": "nobody"}


@dataclass
class Output:
    """What a followed process said."""

    pid: int = 0
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    pty: bytearray = field(default_factory=bytearray)
    end: process_pb2.ProcessEvent.EndEvent | None = None
    keepalives: int = 0
    pieces: list[bytes] = field(default_factory=list)

    def add(self, event: process_pb2.ProcessEvent) -> None:
        assert self.end is None, "an event after the end event (O7)"
        kind = event.WhichOneof("event")
        assert kind == "start" or self.pid, "something before the start event (P32)"
        if kind == "start":
            self.pid = event.start.pid
        elif kind == "data":
            stream = str(event.data.WhichOneof("output"))
            data = getattr(event.data, stream)
            assert data, "an event with empty data (O4)"
            self.pieces.append(data)
            getattr(self, stream).extend(data)
        elif kind == "keepalive":
            self.keepalives += 1
        else:
            self.end = event.end

    @property
    def exit_code(self) -> int:
        assert self.end is not None, "no end event"
        return self.end.exit_code

    @property
    def text(self) -> str:
        return self.stdout.decode()


class Agent:
    """One running agent and its stubs."""

    def __init__(self, identity: str, folder: Path, *, prefix: Sequence[str] | None = None, sudo: bool = False) -> None:
        self.identity = identity
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(mode=0o755)
        self.user = USERS[identity]
        self.target = f"unix:{folder}/s"
        self._sudo = sudo
        self._prefix = PREFIXES[identity] if prefix is None else prefix
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        line = await asyncio.to_thread(self._start)
        assert json.loads(line) == {"ready": True}, line
        self._channel = grpc.aio.insecure_channel(self.target, options=[("grpc.max_receive_message_length", -1)])
        self.processes = process_pb2_grpc.ProcessStub(self._channel)
        self.files = filesystem_pb2_grpc.FilesystemStub(self._channel)
        self.agent = agent_pb2_grpc.AgentStub(self._channel)
        await self.init()

    def _start(self) -> bytes:
        """The line that the agent answers with; afterwards it must have let go of the pipe."""
        settings: dict[str, Any] = {"listen": self.target, "token": TOKEN, "identity": self.identity}
        if self._sudo:
            settings["sudo"] = f"{self.folder}/sudo"
        if self.identity == "same":
            settings["accounts"] = {"user": {"home": str(self.home)}, "other": {"home": str(self.home)}}
        else:
            os.chown(self.home, 65534 if self.identity == "switch" else 0, -1)
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "sandgate_agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PATH": os.environ["PATH"], "SECRET_OF_THE_AGENT": "1"},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.close()
        line = self.process.stdout.readline()
        assert self.process.stdout.read() == b"", "the agent keeps its starter's pipe"
        return line

    async def init(self, **fields: Any) -> None:
        known = {"sandbox_id": "itest", "template_id": "base", "default_user": self.user} | fields
        if self.identity != "same":
            known.setdefault("default_workdir", str(self.home))
        await self.agent.Init(agent_pb2.InitRequest(**known), metadata=self.metadata())

    @property
    def channel(self) -> grpc.aio.Channel:
        assert self._channel is not None
        return self._channel

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self.process is not None:
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, 5)
            finally:
                self.process.kill()
                self.process.wait()
                for pipe in (self.process.stdin, self.process.stdout):
                    if pipe is not None:
                        pipe.close()

    def log_text(self) -> str:
        return (self.folder / "log").read_text()

    def metadata(
        self,
        *,
        user: str | None = None,
        timeout_ms: int | str | None = None,
        keepalive: int | None = None,
        token: str = TOKEN,
    ) -> tuple[tuple[str, str | bytes], ...]:
        pairs: list[tuple[str, str | bytes]] = [("agent-token", token)]
        if user is not None:
            pairs.append(("acting-user-bin", user.encode()))
        if timeout_ms is not None:
            pairs.append(("timeout-ms", str(timeout_ms)))
        if keepalive is not None:
            pairs.append(("keepalive-interval", str(keepalive)))
        return tuple(pairs)

    def start_call(self, cmd: str, *args: str, **options: Any) -> Any:
        """A Start call that the test reads itself."""
        metadata = {key: options.pop(key) for key in ("user", "timeout_ms", "keepalive") if key in options}
        config = process_pb2.ProcessConfig(
            cmd=cmd, args=args, envs=options.pop("envs", {}), cwd=options.pop("cwd", None)
        )
        options.setdefault("stdin", False)
        request = process_pb2.StartRequest(process=config, **options)
        return self.processes.Start(request, metadata=self.metadata(**metadata))

    async def run(self, cmd: str, *args: str, **options: Any) -> Output:
        return await follow(self.start_call(cmd, *args, **options))

    async def sh(self, script: str, **options: Any) -> Output:
        return await self.run("/bin/sh", "-c", script, **options)

    @contextlib.asynccontextmanager
    async def running(self, cmd: str, *args: str, **options: Any) -> AsyncIterator[Running]:
        """A process that is followed by its Start stream, killed at the end."""
        call = self.start_call(cmd, *args, **options)
        first = await call.read()
        running = Running(self, first.event.start.pid, call)
        try:
            yield running
        finally:
            call.cancel()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await running.signal(9)

    async def live(self) -> list[process_pb2.ProcessInfo]:
        reply = await self.processes.List(process_pb2.ListRequest(), metadata=self.metadata())
        return list(reply.processes)

    async def read(self, path: str, **options: Any) -> bytes:
        user = options.pop("user", None)
        request = agent_pb2.ReadFileRequest(path=path, **options)
        parts = [part async for part in self.agent.ReadFile(request, metadata=self.metadata(user=user))]
        assert parts[0].HasField("header")
        return b"".join(part.data for part in parts[1:])

    async def write(self, path: str, *pieces: bytes, user: str | None = None, **header: Any) -> Any:
        async def requests() -> AsyncIterator[agent_pb2.WriteFileRequest]:
            yield agent_pb2.WriteFileRequest(header=agent_pb2.WriteFileRequest.Header(path=path, **header))
            for piece in pieces:
                yield agent_pb2.WriteFileRequest(data=piece)

        return (await self.agent.WriteFile(requests(), metadata=self.metadata(user=user))).entry

    async def stat(self, path: str, user: str | None = None) -> filesystem_pb2.EntryInfo:
        request = filesystem_pb2.StatRequest(path=path)
        return (await self.files.Stat(request, metadata=self.metadata(user=user))).entry

    async def listing(self, path: str, depth: int = 0) -> list[filesystem_pb2.EntryInfo]:
        request = filesystem_pb2.ListDirRequest(path=path, depth=depth)
        return list((await self.files.ListDir(request, metadata=self.metadata())).entries)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawners(self) -> list[int]:
        """The root spawner, then the account spawners."""
        root = children_of(self.pid)
        return [*root, *(pid for parent in root for pid in children_of(parent) if name_of(pid) == "sandgate-spawn")]


@dataclass
class Running:
    """A live process under test."""

    agent: Agent
    pid: int
    call: Any

    @property
    def selector(self) -> process_pb2.ProcessSelector:
        return process_pb2.ProcessSelector(pid=self.pid)

    async def read_until(self, wanted: bytes) -> bytes:
        seen = b""
        async with asyncio.timeout(20):
            while wanted not in seen:
                message: Any = await self.call.read()
                assert message is not grpc.aio.EOF, f"ended after {seen!r}"
                data = message.event.data
                seen += data.stdout + data.stderr + data.pty
        return seen

    async def rest(self) -> Output:
        output = Output(pid=self.pid)
        async with asyncio.timeout(30):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                output.add(message.event)
        return output

    async def send(self, data: bytes, *, pty: bool = False) -> None:
        given = process_pb2.ProcessInput(pty=data) if pty else process_pb2.ProcessInput(stdin=data)
        request = process_pb2.SendInputRequest(process=self.selector, input=given)
        await self.agent.processes.SendInput(request, metadata=self.agent.metadata())

    async def signal(self, number: int) -> None:
        request = process_pb2.SendSignalRequest(process=self.selector, signal=number)  # type: ignore[arg-type]
        await self.agent.processes.SendSignal(request, metadata=self.agent.metadata())

    async def close_stdin(self) -> None:
        request = process_pb2.CloseStdinRequest(process=self.selector)
        await self.agent.processes.CloseStdin(request, metadata=self.agent.metadata())

    async def connect(self, timeout_ms: int | None = None) -> Any:
        """A Connect call, attached: its start event is read."""
        request = process_pb2.ConnectRequest(process=self.selector)
        call = self.agent.processes.Connect(request, metadata=self.agent.metadata(timeout_ms=timeout_ms))
        first: Any = await call.read()
        assert first.event.start.pid == self.pid
        return call


async def follow(call: Any) -> Output:
    output = Output()
    async with asyncio.timeout(60):
        async for message in call:
            output.add(message.event)
    return output


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    """Ended; whether its parent has noticed does not matter."""
    try:
        return state_of(pid) == "Z"
    except FileNotFoundError:
        return True


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


async def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- what is waited for happens in other processes
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def code_of(code: grpc.StatusCode, match: str = "") -> AsyncIterator[None]:
    """The block fails with this status and a text that contains ``match``."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()
    assert match in (caught.value.details() or "")


def may_use(identity: str) -> None:
    if identity != "same" and os.geteuid() != 0:
        pytest.skip(f"the identity {identity} needs root here")


@contextlib.asynccontextmanager
async def an_agent(identity: str, **options: Any) -> AsyncIterator[Agent]:
    may_use(identity)
    # Not below pytest's own folder: the path of a socket is short, and other users must be able to enter.
    folder = Path(tempfile.mkdtemp(prefix="sga-"))
    folder.chmod(0o755)
    agent = Agent(identity, folder, **options)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()
        log = agent.log_text()
        shutil.rmtree(folder, ignore_errors=True)
    assert "Traceback" not in log, log
    assert TOKEN not in log
