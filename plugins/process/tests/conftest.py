"""Real boxes with the real agent, once for every isolation that this machine allows."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sandgate_plugin_api import BackendContext, Placement, SandboxRequest
from sandgate_plugin_process import bundle
from sandgate_plugin_process.backend import ProcessBackend
from sandgate_plugin_process.freezing import Group
from sandgate_testing import placements

ISOLATIONS = ("bubblewrap", "none")


@cache
def why_no_bubblewrap() -> str | None:
    """None when bubblewrap works here. SANDGATE_REQUIRE=bubblewrap makes its absence a failure instead of a skip."""
    faults = [how for _, works, how in ProcessBackend.diagnose({"isolation": "bubblewrap"}) if not works]
    return faults[0] if faults else None


def need_bubblewrap() -> None:
    if (reason := why_no_bubblewrap()) is None:
        return
    if "bubblewrap" in os.environ.get("SANDGATE_REQUIRE", ""):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Gateway:
    """The folders of one gateway, and backends on them, one after the other as after restarts of the core."""

    folder: Path
    isolation: str
    count: int = 0

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def runtime(self) -> Path:
        return self.folder / "run"

    def context(self, **settings: object) -> BackendContext:
        return BackendContext(
            state_dir=self.state,
            runtime_dir=self.runtime,
            settings={"isolation": self.isolation, "warm": 0, **settings},
        )

    @asynccontextmanager
    async def backend(self, **settings: object) -> AsyncIterator[ProcessBackend]:
        backend = ProcessBackend(self.context(**settings))
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()

    async def request(self, backend: ProcessBackend, **fields: object) -> SandboxRequest:
        self.count += 1
        template = (await backend.templates())[0]
        return SandboxRequest(**{"sandbox_id": f"i{self.count:020d}", "template": template, **fields})

    async def create(self, backend: ProcessBackend, **fields: object) -> Placement:
        request = await self.request(backend, **fields)
        return await backend.create(request, backend.reserve(request))


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap":
        need_bubblewrap()
    return request.param


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's library folder, made once for all tests: compiling it takes longer than most of them."""
    return bundle.make(tmp_path_factory.mktemp("library"))


@pytest.fixture
def folder(library: Path) -> Iterator[Path]:
    """The folders of a gateway; short, for socket addresses, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="sg-"))
    for name in ("state", "run"):
        (path / name).mkdir(mode=0o700)
    shutil.copytree(library, path / "state" / library.name, copy_function=os.link)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Every control group that the test made or tried to make."""
    made: list[Group] = []
    make = Group.make

    def remembered(group: Group) -> None:
        made.append(group)
        make(group)

    monkeypatch.setattr(Group, "make", remembered)
    return made


@pytest.fixture
async def gateway(folder: Path, isolation: str, groups: list[Group]) -> AsyncIterator[Gateway]:
    gateway = Gateway(folder, isolation)
    yield gateway
    async with gateway.backend() as backend:
        for survivor in await backend.survey():
            await backend.destroy(survivor.handle)
        assert not await backend.survey()
    assert not list(gateway.runtime.iterdir())
    assert not [group.path for group in groups if group.path.exists()]


@pytest.fixture
async def backend(gateway: Gateway) -> AsyncIterator[ProcessBackend]:
    async with gateway.backend() as backend:
        yield backend


Run = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def run() -> Run:
    """Run a command in a sandbox: (exit code, what it wrote)."""

    async def run(placement: Placement, command: str, user: str = "user") -> tuple[int, str]:
        return await placements.run(placement, command, user)

    return run
