"""The first lines of code that a user copies from the README are run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sandgate_testing.gateway import Gateway
from sandgate_testing.requirements import lacking, need
from sandgate_testing.sdk import CLIENTS, PackageUnavailable, command_of, installed

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def snippet(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found


def run(command: list[str], folder: Path, gateway: Gateway) -> str:
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"], **gateway.sdk_environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(shown: str) -> None:
    greeting, content = filter(None, shown.splitlines())
    assert greeting.startswith("hello from ")
    assert content == "kept in the sandbox"


def test_python_of_the_readme_runs(gateway: Gateway, tmp_path: Path) -> None:
    expected(run([sys.executable, "-c", snippet("python")], tmp_path, gateway))


def test_javascript_of_the_readme_runs(gateway: Gateway, tmp_path: Path) -> None:
    need("node")
    client = CLIENTS["javascript-2.51.0"]
    try:
        installed(client)
    except PackageUnavailable as error:
        lacking("packages", str(error))
    (script := tmp_path / "first.mjs").write_text(snippet("js"))
    (tmp_path / "node_modules").symlink_to(client.environment / "node_modules")
    expected(run(command_of(client, script), tmp_path, gateway))
