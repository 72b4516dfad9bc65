"""One bundle for the tests that do not harm it, and agents that run from it in containers."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from sandgate_bundle import Bundle, make_portable
from sandgate_testing.contained_agent import ContainedAgent


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_portable(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def contained(bundle: Bundle) -> Callable[..., AbstractAsyncContextManager[ContainedAgent]]:
    """An agent in the container of an image: ``contained(image, *options of docker run)``."""

    @contextlib.asynccontextmanager
    async def run(image: str, *options: str) -> AsyncIterator[ContainedAgent]:
        folder = Path(tempfile.mkdtemp(prefix="sgb-"))
        folder.chmod(0o755)
        agent = ContainedAgent(folder, bundle=bundle, image=image, options=options)
        try:
            await agent.start()
            yield agent
        finally:
            await agent.close()
            log = agent.log_text()
            shutil.rmtree(folder, ignore_errors=True)
        assert "Traceback" not in log, log

    return run
