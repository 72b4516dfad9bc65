"""The OpenSandbox backend keeps the contract of every backend, which has the bundle mounted in each sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandgate_testing.backend_suite import run_backend_suite
from sandgate_testing.images import Images
from sandgate_testing.opensandbox import OpenSandboxServer

#: Seconds. Many times what it needs on a machine with nothing else to do.
pytestmark = pytest.mark.timeout(950)


def _config(server: OpenSandboxServer, image: str, **settings: object) -> str:
    values = {**server.settings, **settings}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(
        ["[backends.opensandbox]", *lines, "[backends.opensandbox.templates.base]", f'image = "{image}"\n']
    )


def test_backend_passes_the_suite(server: OpenSandboxServer, images: Images, tmp_path: Path) -> None:
    config = _config(server, images.debian(), agent_mount=True, gateway="suite")
    assert " passed" in run_backend_suite("opensandbox", config=config, folder=tmp_path)
