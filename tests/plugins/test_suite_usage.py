"""The suite for backends says in one line what is wrong with how it was called, and not in each of its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = "sandgate_plugin_api.testsuite"


def said(folder: Path, *arguments: str, config: str | None = None) -> tuple[int, str]:
    if config is not None:
        (folder / "suite.toml").write_text(config)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--pyargs", SUITE, *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert [path.name for path in folder.iterdir() if path.name != "suite.toml"] == []
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "--backend-config suite.toml: [Errno 2]"),
        ("[testsuite", "--backend-config suite.toml: "),
        (
            "[testsuite]\ncreate_second = 3",
            "unknown key 'create_second' in [testsuite] (did you mean 'create_seconds'?)",
        ),
        ("[testsuite]\ncreate_seconds = '3'", "'create_seconds' in [testsuite] must be a number above 0"),
        ("[testsuite]\naddresses = 'x'", "'addresses' in [testsuite] must be a list of texts"),
        ("[backends.process]\nwram = 1", "--backend process: open() refuses: unknown key 'wram'"),
    ],
    ids=["no file", "no TOML", "unknown key", "wrong number", "wrong list", "unknown setting"],
)
def test_wrong_configuration_is_one_line(tmp_path: Path, config: str | None, words: str) -> None:
    status, text = said(tmp_path, "--backend", "process", "--backend-config", "suite.toml", config=config)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert words in text
    assert "ERROR test_" not in text


def test_unknown_backend_is_one_line(tmp_path: Path) -> None:
    status, text = said(tmp_path, "--backend", "procces")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "there is no backend 'procces' (did you mean 'process'?)" in text


def test_suite_without_a_backend_is_no_success(tmp_path: Path) -> None:
    status, text = said(tmp_path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "needs --backend NAME" in text
