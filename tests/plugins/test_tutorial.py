"""``plugins/README.md``: every block of the tutorial is run as it stands, in its order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_plugin_api import hookspecs
from sandgate_testing.leftovers import remains_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "plugins/README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\S+)\n")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A virtual environment of the reader's, in which the gateway is installed; nothing comes from elsewhere."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    ours = sysconfig.get_path("purelib")
    (packages / "gateway.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for name, module in (("sandgate", "sandgate.cli"), ("pytest", "pytest")):
        call = "main" if name == "sandgate" else "console_main"
        (program := venv / "bin" / name).write_text(
            f"#!{venv}/bin/python\nimport sys\nfrom {module} import {call}\nsys.exit({call}())\n"
        )
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDGATE_", "E2B_", "PYTEST"))}
    return {
        **kept,
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # pip reads it as "use build isolation: no".
        "PIP_NO_BUILD_ISOLATION": "0",
    }


@pytest.fixture
def state_dir() -> Iterator[Path]:
    # Short, because sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        yield Path(folder) / "state"


@pytest.mark.timeout(600)
def test_tutorial_runs_as_it_stands(environment: dict[str, str], state_dir: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    served = 0
    for language, text in BLOCKS:
        if (named := FILE.match(text)) is not None:
            assert not Path(named[1]).is_absolute()
            (path := folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[named.end() :])
        elif language == "sh":
            run(text, folder, environment)
        elif language == "console":
            served += 1
            serve(text.removeprefix("$ ").split(), folder, environment, state_dir)
        else:
            pytest.fail(f"a block of {language} that is neither a file nor a command:\n{text}")
    assert served == 1


def run(commands: str, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"


def serve(command: list[str], folder: Path, environment: dict[str, str], state_dir: Path) -> None:
    """The gateway of the tutorial does what the text says of its rules."""
    options = ["--port", "0", "--state-dir", str(state_dir), "--on-exit", "kill"]
    program = str(Path(environment["PATH"].partition(":")[0]) / command[0])
    with subprocess.Popen(
        [program, *command[1:], *options], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as gateway:
        try:
            assert gateway.stdout is not None
            exports = dict(
                line.removeprefix("export ").strip().split("=", 1)
                for line in (gateway.stdout.readline() for _ in range(3))
            )
            url, key = exports["E2B_API_URL"], exports["E2B_API_KEY"]
            refused, reply = create(url, key, {})
            assert (refused, reply["message"]) == (400, "metadata.project must be one of mail, search")
            made, reply = create(url, key, {"project": "mail"})
            assert (made, reply["project"]) == (201, "mail")
        finally:
            gateway.terminate()
            gateway.wait(60)
    assert remains_of(state_dir) == []


def create(url: str, key: str, metadata: dict[str, str]) -> tuple[int, dict[str, str]]:
    body = json.dumps({"templateID": "base", "metadata": metadata}).encode()
    request = urllib.request.Request(f"{url}/v2/sandboxes", data=body, headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_every_policy_hook_is_in_the_table_and_in_a_test() -> None:
    hooks = {name for name in hookspecs.__all__ if name.startswith("sandgate_")} - {"sandgate_register_backends"}
    named = set(re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE))
    assert hooks <= {hook for cell in named for hook in re.findall(r"`(sandgate_\w+)`", cell)}
    implemented = set(re.findall(r"def (sandgate_\w+)\(", (Path(__file__).parent / "house.py").read_text()))
    assert hooks == implemented
