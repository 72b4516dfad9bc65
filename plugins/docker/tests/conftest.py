"""Real containers with the real agent, on the engine of this machine."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_bundle import make_portable
from sandgate_plugin_api import BackendContext, Placement, SandboxRequest
from sandgate_plugin_docker import enter
from sandgate_plugin_docker.backend import DockerBackend
from sandgate_testing.engine import docker
from sandgate_testing.images import Images
from sandgate_testing.requirements import lacking, need


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    need("docker")
    with Images.of_this_run(functools.partial(lacking, "docker")) as images:
        yield images


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's bundle, made once for all tests: compiling it takes longer than most of them."""
    return make_portable(tmp_path_factory.mktemp("library"), entrance=Path(enter.__file__)).path.parent


@dataclass
class Gateway:
    """The folders of one gateway, and backends on them, one after the other as after restarts of the core."""

    folder: Path
    images: Images

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def runtime(self) -> Path:
        return self.folder / "run"

    @property
    def id(self) -> str:
        return json.loads((self.state / "gateway.json").read_text())["id"]

    def context(self, **settings: object) -> BackendContext:
        settings.setdefault("templates", {"base": {"image": self.images.debian()}})
        return BackendContext(state_dir=self.state, runtime_dir=self.runtime, settings={"pull": "never", **settings})

    @asynccontextmanager
    async def backend(self, **settings: object) -> AsyncIterator[DockerBackend]:
        backend = DockerBackend(self.context(**settings))
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()

    async def request(self, backend: DockerBackend, template: str = "base", **fields: object) -> SandboxRequest:
        # Unlike any other's on this engine: a box's packet filter rules go by it, and other workers have gateways, too.
        sandbox_id = f"i{secrets.token_hex(10)}"
        found = await backend.find_template(template)
        assert found is not None
        return SandboxRequest(**{"sandbox_id": sandbox_id, "template": found, **fields})

    async def create(self, backend: DockerBackend, template: str = "base", **fields: object) -> Placement:
        """As the core does it, Init included."""
        request = await self.request(backend, template, **fields)
        placement = await backend.create(request, backend.reserve(request))
        await init(placement, request)
        return placement

    def containers(self) -> list[str]:
        """Names on the engine."""
        return docker(
            "ps", "-a", "--filter", f"label=sandgate.gateway={self.id}", "--format", "{{.Names}}"
        ).stdout.split()


def rules() -> str:
    """The packet filter's, of this machine."""
    return subprocess.run(["iptables", "-w", "10", "-S"], capture_output=True, text=True, check=True).stdout


async def init(placement: Placement, request: SandboxRequest) -> None:
    template = request.template
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        await agent_pb2_grpc.AgentStub(channel).Init(
            agent_pb2.InitRequest(
                sandbox_id=request.sandbox_id,
                template_id=template.id,
                envs=template.envs,
                default_user=template.default_user or "user",
                default_workdir=template.workdir,
            ),
            metadata=(("agent-token", placement.agent.token),),
            timeout=10,
        )


@pytest.fixture
def folder(library: Path) -> Iterator[Path]:
    """The folders of a gateway; short, for socket addresses, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="sgd-"))
    for name in ("state", "run"):
        (path / name).mkdir(mode=0o700)
    shutil.copytree(library, path / "state" / library.name, copy_function=os.link, symlinks=True)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def gateway(folder: Path, images: Images) -> AsyncIterator[Gateway]:
    gateway = Gateway(folder, images)
    yield gateway
    async with gateway.backend() as backend:
        for survivor in await backend.survey():
            await backend.destroy(survivor.handle)
        assert not await backend.survey()
    assert not gateway.containers()
    assert not list(gateway.runtime.iterdir())
    assert gateway.id not in docker("network", "ls").stdout
    assert os.geteuid() != 0 or gateway.id not in rules()
    assert gateway.id not in docker("images", "-a").stdout


@pytest.fixture
async def backend(gateway: Gateway) -> AsyncIterator[DockerBackend]:
    async with gateway.backend() as backend:
        yield backend


Run = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def run() -> Run:
    """Run a command in a sandbox: (exit code, what it wrote)."""

    async def run(
        placement: Placement, command: str, user: str | None = None, *, shell: str = "/bin/bash", **envs: str
    ) -> tuple[int, str]:
        output, code = b"", None
        metadata = [("agent-token", placement.agent.token)]
        if user is not None:
            metadata.append(("acting-user-bin", user.encode()))
        args = ["-l", "-c", command] if shell == "/bin/bash" else ["-c", command]
        async with grpc.aio.insecure_channel(placement.agent.target) as channel:
            call = process_pb2_grpc.ProcessStub(channel).Start(
                process_pb2.StartRequest(
                    process=process_pb2.ProcessConfig(cmd=shell, args=args, envs=envs), stdin=False
                ),
                metadata=tuple(metadata),
                timeout=60,
            )
            async for response in call:
                output += response.event.data.stdout + response.event.data.stderr
                if response.event.HasField("end"):
                    code = response.event.end.exit_code
        assert code is not None
        return code, output.decode(errors="replace")

    return run
