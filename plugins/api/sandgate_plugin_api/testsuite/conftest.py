"""The deployment that the tests of the suite share, and what a test may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from sandgate_errors import SandgateError
from sandgate_plugin_api.backend import Backend
from sandgate_plugin_api.testsuite.box import Box, made
from sandgate_plugin_api.testsuite.deployment import Deployment, Options


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """A run that comes across these files and names no backend does not mean them."""
    return None if config.getoption("--backend", None) else True


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> Options:
    try:
        return Options.read(request.config.getoption("--backend"), request.config.getoption("--backend-config"))
    except pytest.UsageError as error:
        # Once, and not as the failure of every test.
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def shared_deployment(options: Options) -> Iterator[Deployment]:
    try:
        deployment = Deployment(options)
    except SandgateError as error:
        pytest.exit(f"--backend {options.backend}: {error.message}", returncode=pytest.ExitCode.USAGE_ERROR)
    yield deployment
    deployment.discard()


_remembered: set[int] = set()


@pytest_asyncio.fixture
async def deployment(shared_deployment: Deployment) -> AsyncIterator[Deployment]:
    """The deployment; after the test nothing may be left in it that was not there before the first sandbox."""
    if id(shared_deployment) not in _remembered:
        await _open_once(shared_deployment)
        # What is made once, by the first start and the first sandbox, is the deployment's.
        async with shared_deployment.backend() as backend, made(shared_deployment, backend):
            pass
        shared_deployment.remember()
        _remembered.add(id(shared_deployment))
    yield shared_deployment
    async with shared_deployment.backend() as backend:
        survivors = await backend.survey()
        # Else a test that failed would make all that follow fail.
        for survivor in survivors:
            await backend.destroy(survivor.handle)
    left = await shared_deployment.left_over()
    names = [survivor.sandbox_id for survivor in survivors]
    assert names == [], f"survey() still finds sandboxes that were destroyed or never came to be: {names}"
    assert left == [], f"left over, with no sandbox there and no backend open: {left}"


async def _open_once(deployment: Deployment) -> None:
    try:
        async with deployment.backend():
            pass
    except SandgateError as error:
        pytest.exit(
            f"--backend {deployment.options.backend}: open() refuses: {error.message}",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest_asyncio.fixture
async def backend(deployment: Deployment) -> AsyncIterator[Backend]:
    async with deployment.backend() as backend:
        yield backend


@pytest_asyncio.fixture
async def box(deployment: Deployment, backend: Backend) -> AsyncIterator[Box]:
    async with made(deployment, backend) as box:
        yield box
