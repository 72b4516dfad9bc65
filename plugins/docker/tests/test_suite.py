"""The Docker backend keeps the contract of every backend, on the engine of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandgate_testing.backend_suite import run_backend_suite
from sandgate_testing.engine import docker
from sandgate_testing.images import Images


def _config(images: Images, *lines: str) -> str:
    """With the address by which containers know the engine's host: nothing of a sandbox may come to it."""
    bridge = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}").stdout.strip()
    return "\n".join(
        (
            "[backends.docker]",
            'pull = "never"',
            *lines,
            "[backends.docker.templates.base]",
            f'image = "{images.debian()}"',
            "[testsuite]",
            f'addresses = ["{bridge}"]',
            "",
        )
    )


@pytest.mark.timeout(950)
def test_backend_passes_the_suite(images: Images, tmp_path: Path) -> None:
    assert " passed" in run_backend_suite("docker", config=_config(images), folder=tmp_path)


@pytest.mark.timeout(950)
def test_backend_passes_the_suite_with_sandboxes_made_ahead(images: Images, tmp_path: Path) -> None:
    run_backend_suite("docker", config=_config(images, "warm = 2"), folder=tmp_path, select="lifecycle or restart")


@pytest.mark.timeout(950)
@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="agents that are reached by a port have certificates of their own"
)
def test_backend_passes_the_suite_where_agents_are_reached_by_a_port(images: Images, tmp_path: Path) -> None:
    config = _config(images, 'agents = "port"')
    run_backend_suite("docker", config=config, folder=tmp_path, select="lifecycle or restart or agent")
