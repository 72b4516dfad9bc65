"""Real sandboxes of a real OpenSandbox server, with the real agent; only execd is a stand-in of ours."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandgate_bundle import MOUNT, Bundle, make_portable
from sandgate_plugin_api import BackendContext, Placement, SandboxRequest
from sandgate_plugin_opensandbox import enter
from sandgate_plugin_opensandbox.backend import OpenSandboxBackend
from sandgate_plugin_opensandbox.starting import pack
from sandgate_testing import placements
from sandgate_testing.images import Images
from sandgate_testing.opensandbox import OpenSandboxServer
from sandgate_testing.requirements import lacking, need
from sandgate_testing.sdk import PackageUnavailable


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all that need a server, as bundle and server take longer to make than most of them; the first may install
    it. Those without agents need no bundle, and are as many minutes of their own.
    """
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(550))
        if isinstance(item, pytest.Function) and {"images", "library"}.intersection(item.fixturenames):
            alone = item.path.name == "test_execd_only.py"
            item.add_marker(pytest.mark.xdist_group("opensandbox-without-agents" if alone else "opensandbox"))


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    need("docker")
    with Images.of_this_run(functools.partial(lacking, "docker")) as images:
        yield images


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The agent's bundle and its archive, made once for all tests."""
    folder = tmp_path_factory.mktemp("library")
    bundle = make_portable(folder, entrance=Path(enter.__file__))
    pack(bundle, folder)
    return bundle


StartServer = Callable[..., AbstractContextManager[OpenSandboxServer]]


@pytest.fixture(scope="session")
def start_server(images: Images) -> StartServer:
    """A server for a block; keyword arguments as of :class:`OpenSandboxServer`."""
    return functools.partial(_started, images)


@contextmanager
def _started(images: Images, **options: Any) -> Iterator[OpenSandboxServer]:
    """After the block nothing may be left on it."""
    need("packages")
    try:
        server = OpenSandboxServer(execd_image=images.execd(), **options)
    except PackageUnavailable as error:
        lacking("packages", str(error))
    try:
        server.start()
        yield server
        left = [*server.sandboxes(), *server.snapshots()]
    finally:
        server.discard()
    assert left == []


@pytest.fixture(scope="module")
def server(start_server: StartServer, library: Bundle) -> Iterator[OpenSandboxServer]:
    """One for each module, whose sandboxes have the bundle mounted; a test that ends it starts it again."""
    with start_server(binds=(f"{library.path}:{MOUNT}:ro",)) as server:
        yield server


@dataclass
class Gateway:
    """The folders of one gateway, and backends on them, one after the other as after restarts of the core."""

    folder: Path
    server: OpenSandboxServer
    image: str
    settings: dict[str, object] = field(default_factory=dict)
    count: int = 0

    @property
    def runtime(self) -> Path:
        return self.folder / "run"

    def context(self, **settings: object) -> BackendContext:
        return BackendContext(
            state_dir=self.folder / "state",
            runtime_dir=self.runtime,
            settings={
                **self.server.settings,
                "agent_mount": True,
                "templates": {"base": {"image": self.image, "cpu_count": 1, "memory_mb": 512}},
                **self.settings,
                **settings,
            },
        )

    @asynccontextmanager
    async def backend(self, **settings: object) -> AsyncIterator[OpenSandboxBackend]:
        backend = OpenSandboxBackend(self.context(**settings))
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()

    async def request(self, backend: OpenSandboxBackend, template: str = "base", **fields: object) -> SandboxRequest:
        self.count += 1
        found = await backend.find_template(template)
        assert found is not None
        sandbox_id = f"i{os.urandom(8).hex()}{self.count:04d}"
        return SandboxRequest(**{"sandbox_id": sandbox_id, "template": found, **fields})

    async def create(self, backend: OpenSandboxBackend, template: str = "base", **fields: object) -> Placement:
        """As the core does it, Init included."""
        request = await self.request(backend, template, **fields)
        placement = await backend.create(request, backend.reserve(request))
        await placements.init(placement, request)
        return placement


@pytest.fixture
def make_gateway(server: OpenSandboxServer, images: Images, library: Bundle) -> Iterator[Callable[..., Gateway]]:
    """Gateways on the server; settings as of the backend."""
    folders: list[Path] = []

    def make(**settings: object) -> Gateway:
        # Short, for socket addresses, which pytest's own folders are not.
        folders.append(path := Path(tempfile.mkdtemp(prefix="sgo-")))
        for name in ("state", "run"):
            (path / name).mkdir(mode=0o700)
        shutil.copytree(library.path.parent, path / "state" / library.name, copy_function=os.link, symlinks=True)
        archive = pack(library, library.path.parent.parent)
        os.link(archive, path / "state" / archive.name)
        return Gateway(path, server, images.debian(), settings)

    yield make
    for path in folders:
        left = [str(each) for each in (path / "run").iterdir()]
        shutil.rmtree(path)
        assert left == []


@pytest.fixture
async def gateway(make_gateway: Callable[..., Gateway]) -> AsyncIterator[Gateway]:
    gateway = make_gateway()
    yield gateway
    async with gateway.backend() as backend:
        for survivor in await backend.survey():
            await backend.destroy(survivor.handle)
        assert not await backend.survey()


@pytest.fixture
async def backend(gateway: Gateway) -> AsyncIterator[OpenSandboxBackend]:
    async with gateway.backend() as backend:
        yield backend


Run = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def run() -> Run:
    """Run a command in a sandbox: (exit code, what it wrote)."""
    return placements.run
