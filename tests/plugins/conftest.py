"""Plugins as they are installed: a module and its metadata in a folder of the import path, found by entry point.

Gateways started by a test find them the same way, by ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway

numbers = itertools.count()
HOUSE = (Path(__file__).parent / "house.py").read_text()


class Installer:
    """Installs distributions with one module and one entry point into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def __call__(self, distribution: str, code: str, *, entry: str, requires: str = "sandgate-plugin-api~=1.0") -> None:
        module = f"installed_plugin_{next(numbers)}"
        (self.folder / f"{module}.py").write_text(code)
        info = self.folder / f"{distribution.replace('-', '_')}-0.3.dist-info"
        info.mkdir()
        wanted = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.3\n{wanted}")
        (info / "entry_points.txt").write_text(f"[sandgate.plugins]\n{entry} = {module}\n")
        importlib.invalidate_caches()


@contextlib.contextmanager
def path_with(folder: Path) -> Iterator[None]:
    """What is installed there is found, by this process and by those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        yield


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Installer]:
    installer = Installer(tmp_path / "installed")
    with path_with(installer.folder):
        yield installer


class Gateways:
    """Starts gateways with a configuration file."""

    def __init__(self) -> None:
        self._made: list[Gateway] = []

    def __call__(self, config: Path, *options: str) -> Gateway:
        self._made.append(Gateway(isolation="none", options=("--config", str(config), *options)))
        self._made[-1].start()
        return self._made[-1]

    def discard(self) -> None:
        for gateway in self._made:
            gateway.discard()


@pytest.fixture
def plugged() -> Iterator[Gateways]:
    gateways = Gateways()
    yield gateways
    gateways.discard()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with the plugin of ``house.py``, shared by a module's tests."""
    folder = tmp_path_factory.mktemp("house")
    installer, gateways = Installer(folder / "installed"), Gateways()
    installer("dist-house", HOUSE, entry="house")
    (config := folder / "gateway.toml").write_text('[plugins.house]\ngreeting = "hello"\n')
    with path_with(installer.folder):
        try:
            gateway = gateways(config)
            yield gateway
            gateway.stop()
            assert gateway.remains() == []
        finally:
            gateways.discard()
