"""Plugins as they are installed: a module and its metadata in a folder of the import path, found by entry point.

Gateways started by a test find them the same way, by ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway

numbers = itertools.count()


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
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway that all tests of a module share, with one plugin installed."""
    folder, gateways = tmp_path_factory.mktemp("shared"), Gateways()
    installer = Installer(folder / "installed")
    started: list[Gateway] = []

    def start(code: str, *, distribution: str, entry: str, config: str) -> Gateway:
        installer(distribution, code, entry=entry)
        (file := folder / "gateway.toml").write_text(config)
        started.append(gateways(file))
        return started[-1]

    with path_with(installer.folder):
        try:
            yield start
            for gateway in started:
                gateway.stop()
                assert gateway.remains() == []
        finally:
            gateways.discard()
