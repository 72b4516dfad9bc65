"""``sandgate plugin new``: what it writes is a backend that works, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandgate.cli import cli
from sandgate_errors import FailedPrecondition, InvalidArgument
from sandgate_testing.backend_suite import run_backend_suite

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "plugin"
    done = CliRunner().invoke(cli, ["plugin", "new", "my-box", "--dir", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"pip install -e '{folder}[test]'" in done.output
    return folder


@pytest.fixture(scope="module")
def environment(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the plugin is installed, beside this project, as pip installs it."""
    target = tmp_path_factory.mktemp("target")
    command = [*PIP, "--no-build-isolation", "--target", str(target), str(written)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return {"PYTHONPATH": str(target)}


@pytest.mark.timeout(950)
def test_new_plugin_passes_the_suite_as_it_was_written(environment: dict[str, str], tmp_path: Path) -> None:
    assert " passed" in run_backend_suite("my-box", folder=tmp_path, environment=environment)


def test_new_plugin_is_in_order(written: Path, environment: dict[str, str]) -> None:

    tool = Path(sys.executable).parent
    style = ["--isolated", "--line-length", "120"]
    for command in (
        [tool / "ruff", "check", *style, written],
        [tool / "ruff", "format", "--check", *style, written],
        [tool / "mypy", "--strict", "--config-file", "", *written.glob("sandgate_plugin_my_box/*.py")],
        [tool / "sandgate", "plugin", "check", "my-box"],
    ):
        done = subprocess.run(
            [str(part) for part in command],
            cwd=written,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["", "My", "a b", "../x", "-a", "a" * 40])
def test_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["plugin", "new", "--dir", str(tmp_path / "x"), "--", name])
    assert isinstance(done.exception, InvalidArgument)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["process", "rock"])
def test_name_of_an_installed_plugin_is_refused(name: str, tmp_path: Path) -> None:
    """pip would put the new one in its place, and a gateway would run without the isolation that it had."""
    done = CliRunner().invoke(cli, ["plugin", "new", name, "--dir", str(tmp_path / "x")])
    assert isinstance(done.exception, FailedPrecondition)
    assert f"taken by sandgate-plugin-{name}" in done.exception.message
    assert not (tmp_path / "x").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    done = CliRunner().invoke(cli, ["plugin", "new", "box", "--dir", str(tmp_path)])
    assert isinstance(done.exception, FailedPrecondition)
    assert (tmp_path / "mine").read_text() == "kept"
