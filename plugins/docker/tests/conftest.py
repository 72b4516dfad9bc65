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

import pytest

from sandgate_bundle import make_portable
from sandgate_plugin_api import BackendContext, Placement, SandboxRequest
from sandgate_plugin_docker import enter
from sandgate_plugin_docker.backend import DockerBackend
from sandgate_testing import placements
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
        await placements.init(placement, request)
        return placement

    def containers(self) -> list[str]:
        """Names on the engine."""
        return docker(
            "ps", "-a", "--filter", f"label=sandgate.gateway={self.id}", "--format", "{{.Names}}"
        ).stdout.split()


def rules() -> str:
    """The packet filter's, of this machine."""
    return subprocess.run(["iptables", "-w", "10", "-S"], capture_output=True, text=True, check=True).stdout


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
    return placements.run
