"""The container engine that tests use, by its command line."""

from __future__ import annotations

import shutil
import subprocess
from typing import IO

__all__ = ["docker", "remove_containers", "why_no_engine"]

#: Seconds for one command to the engine; guards against one that hangs.
_PATIENCE = 120.0


def docker(*words: str, data: IO[bytes] | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One call of the engine's command line. Raises CalledProcessError, with what it said."""
    done = subprocess.run(
        ["docker", *words],
        stdin=data or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
    )
    if check and done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, f"docker {words[0]}", done.stdout, done.stderr)
    return done


def why_no_engine() -> str | None:
    """None where one answers."""
    if shutil.which("docker") is None:
        return "docker is not installed: apt-get install docker.io"
    try:
        done = docker("version", "--format", "{{.Server.Version}}", check=False)
    except subprocess.TimeoutExpired:
        return f"the Docker engine does not answer within {_PATIENCE:g} s"
    return None if done.returncode == 0 else f"no Docker engine answers: {done.stderr.strip()}"


def remove_containers(*, label: str) -> None:
    """By force, with their volumes. For the end of a test that failed."""
    if found := docker("ps", "-aq", "--filter", f"label={label}").stdout.split():
        docker("rm", "-f", "-v", *found, check=False)
