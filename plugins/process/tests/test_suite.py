"""The process backend keeps the contract of every backend, in both isolations."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandgate_testing.backend_suite import run_backend_suite


@pytest.mark.timeout(950)
def test_backend_passes_the_suite(isolation: str, tmp_path: Path) -> None:
    config = f'[backends.process]\nisolation = "{isolation}"\nwarm = 0\n'
    assert " passed" in run_backend_suite("process", config=config, folder=tmp_path)


@pytest.mark.timeout(950)
def test_backend_passes_the_suite_with_sandboxes_made_ahead(isolation: str, tmp_path: Path) -> None:
    config = f'[backends.process]\nisolation = "{isolation}"\nwarm = 2\n'
    run_backend_suite("process", config=config, folder=tmp_path, select="lifecycle or restart")
