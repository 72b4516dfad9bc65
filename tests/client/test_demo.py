"""``sandgate demo``: every step of a first-time user, with or without isolation, and nothing left after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandgate_testing.requirements import need

_PROGRAM = Path(sys.executable).parent / "sandgate"


def _demo(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDGATE_", "E2B_"))}
    # What it leaves would lie here; short, since sockets are below it.
    result = subprocess.run(
        [_PROGRAM, "demo"],
        env={**kept, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "Traceback" not in result.stderr
    assert os.listdir(folder) == []
    return result


def _check_steps(shown: str) -> None:
    assert "metadata {'purpose': 'demo'}" in shown
    assert "| hello, world, from work" in shown
    assert "CommandExitException: exit code 3, stderr 'no such luck\\n'" in shown
    assert "content 'written through the SDK\\n'" in shown
    assert "folder holds ['note.txt']" in shown
    assert "note.txt: 24 bytes" in shown
    assert "this one among them: True" in shown
    assert "killed: True" in shown
    assert "still running: False" in shown
    assert shown.endswith("The gateway has stopped and left nothing behind.\n")
    # Output that came at once, at the end, would bear one time.
    times = [line.split()[0] for line in shown.splitlines() if "| line" in line]
    assert len(times) == 3
    assert len(set(times)) == 3


def test_it_shows_every_step(tmp_path):
    need("bubblewrap")
    result = _demo(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "isolation: bubblewrap" in result.stdout
    _check_steps(result.stdout)


def test_without_bubblewrap_it_says_how_to_get_it_and_runs_without(tmp_path, tmp_path_factory):
    # All programs there are, but for one.
    programs = tmp_path_factory.mktemp("bin")
    for program in Path("/usr/bin").iterdir():
        if program.name != "bwrap":
            (programs / program.name).symlink_to(program)
    result = _demo(tmp_path, PATH=str(programs))
    assert result.returncode == 0, result.stderr
    assert "apt-get install bubblewrap" in result.stderr.splitlines()[0]
    assert "isolation: none" in result.stdout
    _check_steps(result.stdout)


def test_without_the_sdk_it_says_how_to_get_it(tmp_path):
    program = (
        "import sys\nfrom importlib import util\nreal = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'e2b' else real(name, *more)\n"
        "sys.argv = ['sandgate', 'demo']\nfrom sandgate.cli import main\nmain()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("sandgate: the demo needs the E2B SDK: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["sandgate.demo_script"])
def test_the_script_knows_nothing_of_sandgate(module):
    from importlib.util import find_spec

    source = Path(find_spec(module).origin).read_text()
    assert "import sandgate" not in source
    assert "from sandgate" not in source
