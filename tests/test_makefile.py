"""`make` says in one line what a machine lacks, and the check of generated code can fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make looks at before it installs anything."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "plugins/process").mkdir(parents=True)
    shutil.copy(ROOT / "plugins/process/pyproject.toml", tmp_path / "plugins/process")
    return tmp_path


def make(clone: Path, *, interpreter: str) -> str:
    """What `make demo` says with an interpreter that answers as the script does."""
    python = clone / "python3"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    command = ["make", "demo", f"PYTHON={python}"]
    # The suite itself runs under make, whose own settings must not reach this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert not (clone / ".venv").exists()
    return done.stdout + done.stderr


def test_missing_venv_module_is_one_line_that_says_what_to_install(clone: Path) -> None:
    said = make(clone, interpreter='case "$2" in *venv*) exit 1;; esac; exit 0')
    assert said.strip().count("\n") == 0
    assert "apt-get install python3-venv" in said


def test_too_old_python_is_one_line_that_says_what_is_needed(clone: Path) -> None:
    said = make(clone, interpreter="exit 1")
    assert said.strip().count("\n") == 0
    assert "Python 3.11 or newer" in said


def test_generated_code_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    fresh = tmp_path / "gen"
    shutil.copytree(ROOT / "protos/gen", fresh)
    assert generate.differences(ROOT / "protos/gen", fresh) == []
    changed = fresh / "sandgate_api/core/v1/keys_pb2.py"
    changed.write_text(changed.read_text() + "# by hand\n")
    (fresh / "sandgate_api/stray.py").touch()
    assert generate.differences(ROOT / "protos/gen", fresh) == [
        "sandgate_api/core/v1/keys_pb2.py",
        "sandgate_api/stray.py",
    ]
