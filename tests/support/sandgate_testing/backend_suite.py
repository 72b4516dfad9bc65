"""The suite that every backend passes, run as an author of a plugin runs it: a pytest of its own, by the backend's name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run_backend_suite"]

#: Seconds. Many times what it needs on a machine with nothing else to do.
_LIMIT = 900


def run_backend_suite(
    name: str, *, config: str = "", folder: Path, environment: Mapping[str, str] | None = None, select: str = ""
) -> str:
    """What the suite printed, for a backend with the settings of ``config``. Raises AssertionError with its failures.

    ``folder``: somewhere outside the repository, whose own pytest settings a stranger does not have.
    """
    (file := folder / "suite.toml").write_text(config)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull),
        *("--pyargs", "sandgate_plugin_api.testsuite", "--backend", name, "--backend-config", str(file)),
        *(("-k", select) if select else ()),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"
    return done.stdout
