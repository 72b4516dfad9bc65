"""The container engine that tests use, by its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

__all__ = ["docker", "engine_environment", "engine_socket", "remove_containers", "why_no_engine"]

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


def engine_socket() -> Path:
    """Where the engine of the tests listens, which need not be the usual place. Raises ValueError for one by network."""
    scheme, _, path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").partition("://")
    if scheme != "unix":
        raise ValueError(f"tests need an engine on this machine, and DOCKER_HOST says {scheme}://{path}")
    return Path(path)


def engine_environment() -> dict[str, str]:
    """What another client of the same engine needs in an environment that is otherwise its own."""
    return {"DOCKER_HOST": f"unix://{engine_socket()}"}


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
