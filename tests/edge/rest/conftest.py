"""The edge on port 0 in front of a real core, whose one backend starts the real agent: what REST clients meet.

All of it lives in the loop of a test module, so one start serves its tests. The agent runs as the tests' own account in
a folder of the test run; how sandboxes are isolated is another part's test.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
import pytest_asyncio

from sandgate_core.server import run_core
from sandgate_core.settings import Settings as CoreSettings
from sandgate_edge.app import build
from sandgate_edge.server import Server
from sandgate_edge.settings import Settings as EdgeSettings
from sandgate_errors import Internal, ResourceExhausted
from sandgate_plugin_api import AgentAddress, Backend, Capability, Placement, Resources, Template

KEY = "e2b_" + "0" * 40
AGENT_PORT = "49983"


class AgentBackend(Backend):
    """Sandboxes that are an agent process and a home folder."""

    name = "local"
    capabilities = frozenset({Capability.PAUSE, Capability.PAUSE_FILESYSTEM, Capability.SNAPSHOT})
    #: Templates that cannot be made, and what the backend says to them.
    FAILING: ClassVar = {
        "broken": Internal("the sandbox could not be started"),
        "bug": ZeroDivisionError("a secret of the backend"),
        "full": ResourceExhausted("no room for another sandbox"),
    }

    def __init__(self, folder):
        self._folder = folder
        #: What a copy waits for, if anything.
        self.copying = None
        self._agents = {}
        self._placements = {}

    async def open(self):
        pass

    async def close(self):
        for sandbox_id in list(self._agents):
            await self.destroy({"id": sandbox_id})

    async def templates(self):
        resources = Resources(cpu_count=1, memory_mb=512, disk_size_mb=1024)
        return [Template(id=name, resources=resources) for name in ("base", *self.FAILING)]

    def reserve(self, request):
        return {"id": request.sandbox_id}

    async def create(self, request, handle):
        if request.template.id in self.FAILING:
            raise self.FAILING[request.template.id]
        home = self._folder / request.sandbox_id
        if request.snapshot is None:
            home.mkdir()
        else:
            shutil.copytree(self._folder / request.snapshot["snapshot_id"], home)
        return await self._start(request.sandbox_id)

    async def snapshot(self, handle, *, snapshot_id):
        if self.copying is not None:
            await self.copying.wait()
        shutil.copytree(self._folder / handle["id"], self._folder / snapshot_id)
        return {"snapshot_id": snapshot_id}

    async def delete_snapshot(self, snapshot):
        shutil.rmtree(self._folder / snapshot["snapshot_id"], ignore_errors=True)

    async def _start(self, sandbox_id):
        home = self._folder / sandbox_id
        target, token = f"unix:{home}.sock", secrets.token_hex(16)
        accounts = {"user": {"home": str(home)}}
        line = {"listen": target, "token": token, "identity": "same", "accounts": accounts, "system_files": False}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sandgate_agent"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._agents[sandbox_id] = process
        process.stdin.write(json.dumps(line).encode() + b"\n")
        ready = json.loads(await process.stdout.readline())
        assert ready["ready"], ready
        placement = Placement(handle={"id": sandbox_id}, agent=AgentAddress(target=target, token=token))
        self._placements[sandbox_id] = placement
        return placement

    async def pause(self, handle, *, memory):
        if memory:
            self._agents[handle["id"]].send_signal(signal.SIGSTOP)
        else:
            await self.destroy(handle)
        return handle

    async def resume(self, handle):
        process = self._agents.get(handle["id"])
        if process is None:
            return await self._start(handle["id"])
        process.send_signal(signal.SIGCONT)
        return self._placements[handle["id"]]

    async def locate(self, handle):
        return None

    async def survey(self):
        return []

    async def destroy(self, handle):
        process = self._agents.pop(handle["id"], None)
        if process is not None:
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            await process.wait()

    def stop_agent(self, sandbox_id):
        """The agent hangs."""
        self._agents[sandbox_id].send_signal(signal.SIGSTOP)

    def end_agent(self, sandbox_id):
        """The agent dies; the sandbox is still there to the core."""
        self._agents[sandbox_id].kill()


class Edge:
    """The edge's address, and clients of it."""

    def __init__(self, port, session, backend, folder, *, admin_token):
        self.port = port
        self.admin_token = admin_token
        self.session = session
        self.backend = backend
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder

    def home(self, box):
        return self._folder / box["sandboxID"]

    async def rest(self, method, path, body=None, *, key=KEY, headers=(), raw=None):
        """Status, JSON (None: no body) and headers of a control-plane call."""
        sent = {**({} if key is None else {"X-API-KEY": key}), **dict(headers)}
        data = json.dumps(body).encode() if raw is None and body is not None else raw
        # The path goes out as it is written: escapes are part of what is tested.
        url = aiohttp.client.URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=data, headers=sent) as answer:
            text = await answer.read()
            assert "Traceback" not in text.decode()
            return answer.status, json.loads(text) if text else None, answer.headers

    async def create(self, **members):
        status, box, _ = await self.rest("POST", "/v2/sandboxes", {"templateID": "base", **members})
        assert status == 201, box
        return box

    def files(self, method, box, *, path=None, query=None, headers=None, token=True, **options):
        """A call of ``/files`` to a sandbox, as a context manager."""
        sent = {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": AGENT_PORT, **(headers or {})}
        if token and "envdAccessToken" in box:
            sent.setdefault("X-Access-Token", box["envdAccessToken"])
        parameters = {**({} if path is None else {"path": path}), **(query or {})}
        return self.session.request(method, self.url + "/files", params=parameters, headers=sent, **options)

    async def read(self, box, path, **options):
        headers = {"Accept-Encoding": "identity", **options.pop("headers", {})}
        async with self.files("GET", box, path=path, headers=headers, **options) as answer:
            return answer.status, await answer.read(), answer.headers

    async def write(self, box, path, content, **options):
        headers = {"Content-Type": "application/octet-stream", **options.pop("headers", {})}
        async with self.files("POST", box, path=path, headers=headers, data=content, **options) as answer:
            return answer.status, await answer.json()

    @contextlib.asynccontextmanager
    async def raw(self, head, box=None):
        """A connection on which a request head has been sent; ``head`` is its lines."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [*head, "Host: localhost"]
        if box is not None:
            lines += [f"E2b-Sandbox-Id: {box['sandboxID']}", f"E2b-Sandbox-Port: {AGENT_PORT}"]
            lines.append(f"X-Access-Token: {box['envdAccessToken']}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def answer_of(reader):
    """Status and body of an answer on a raw connection, by its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return status, await reader.readexactly(int(lengths[0])) if lengths else b""


@pytest.fixture(scope="module")
def edge_settings():
    """What a test module wants to be otherwise than by default."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(edge_settings):
    # Short, because a socket's address has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="sg-rest-"))
    backend = AgentBackend(folder / "boxes")
    (folder / "boxes").mkdir()
    internal_token = secrets.token_hex(16)
    core = CoreSettings(
        state_dir=folder / "state",
        runtime_dir=folder,
        default_backend="local",
        internal_token=internal_token,
        seed=secrets.token_hex(32),
        first_key=KEY,
        first_key_given=True,
        on_exit="kill",
        envd_version="0.6.13",
    )
    (folder / "state").mkdir()
    try:
        async with run_core(core, {"local": backend}) as running:
            settings = EdgeSettings(
                core=running.targets[0], internal_token=internal_token, listen_fd=0, **edge_settings
            )
            server = Server(build(settings))
            sock = socket.create_server(("127.0.0.1", 0))
            await server.start(sock)
            try:
                # Content codings are under test: the client must not undo them.
                async with aiohttp.ClientSession(auto_decompress=False) as session:
                    yield Edge(sock.getsockname()[1], session, backend, folder / "boxes", admin_token=internal_token)
            finally:
                await server.close()
    finally:
        await backend.close()
        shutil.rmtree(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(edge):
    """A secured sandbox that the tests of a module share."""
    return await edge.create()


@pytest.fixture
def ended():
    """Whether a process of this machine has no file open below a folder any more; for leaks in the agent."""

    async def without_open_file(path):
        for _ in range(200):
            if not any(path == target for target in _open_files()):
                return True
            await asyncio.sleep(0.05)
        return False

    return without_open_file


def _open_files():
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        yield Path(os.readlink(fd))
