"""The examples of docs/client.md are run as they stand, against a real gateway."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway

_TEXT = (Path(__file__).resolve().parents[3] / "docs/client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)
(SHELL,) = re.findall(r"```sh\n(.*?)```", _TEXT, re.DOTALL)
#: What each prints.
SHOWN = ["Linux\n\n3 half done\n\n", "1\n2\n3\n0\n", "True\n['1', '2', '3']\n['numbers.txt']\n"]


def environment(gateway: Gateway) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDGATE_", "E2B_"))}
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": programs, "SANDGATE_STATE_DIR": str(gateway.state_dir)}


@pytest.mark.parametrize(("example", "shown"), list(zip(EXAMPLES, SHOWN, strict=True)), ids=["first", "async", "more"])
def test_an_example_runs(gateway: Gateway, example: str, shown: str) -> None:
    command = [sys.executable, "-W", "error", "-c", example]
    result = subprocess.run(command, env=environment(gateway), capture_output=True, text=True, timeout=100, check=False)
    assert (result.stdout, result.stderr) == (shown, "")


def test_the_command_lines_run(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("1\n2\n")
    # Nobody sits at a terminal here.
    script = "\n".join(line for line in SHELL.splitlines() if "--tty" not in line)
    result = subprocess.run(
        ["sh", "-eu", "-c", script],
        cwd=tmp_path,
        env=environment(gateway),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "home.tar").stat().st_size > 0
