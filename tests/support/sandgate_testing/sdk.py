"""The official SDKs, each in an environment of its own: two Python versions of one package cannot share one.

An environment is made once below ``.cache/sdk`` under a file lock, by the ordinary package clients and by package name,
and used again by later runs. Its stamp holds what it was made with, so that another interpreter makes it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLIENTS", "PackageUnavailable", "SdkClient", "command_of", "installed", "pip_environment"]

_REPOSITORY = Path(__file__).resolve().parents[3]
_CACHE = _REPOSITORY / ".cache" / "sdk"
#: Seconds for one installation; a slow network is not a failure.
_PATIENCE = 400


class PackageUnavailable(Exception):
    """The package client failed; the text is its last words."""


@dataclass(frozen=True, kw_only=True)
class SdkClient:
    """One released SDK and the way to speak to it."""

    name: str
    #: ``pip`` or ``npm``.
    source: str
    version: str
    #: Which of ``tests/journeys/clients`` uses it.
    script: str
    #: Where it creates sandboxes; the versions differ.
    create_route: str

    @property
    def environment(self) -> Path:
        return _CACHE / f"{self.source}-e2b-{self.version}"


CLIENTS: Mapping[str, SdkClient] = {
    client.name: client
    for client in (
        SdkClient(
            name="python-2.34.0", source="pip", version="2.34.0", script="journey_sync.py", create_route="/sandboxes"
        ),
        SdkClient(
            name="python-2.63.0", source="pip", version="2.63.0", script="journey_sync.py", create_route="/v2/sandboxes"
        ),
        SdkClient(
            name="python-2.63.0-async",
            source="pip",
            version="2.63.0",
            script="journey_async.py",
            create_route="/v2/sandboxes",
        ),
        SdkClient(
            name="javascript-2.51.0", source="npm", version="2.51.0", script="journey.mjs", create_route="/v2/sandboxes"
        ),
    )
}


def installed(client: SdkClient) -> Path:
    """The environment of ``client``, made if it is not there. Raises PackageUnavailable."""
    return _made(client.environment, client.source, f"e2b{'==' if client.source == 'pip' else '@'}{client.version}")


def pip_environment(package: str, version: str) -> Path:
    """The same for another program from PyPI that wants dependencies of its own."""
    return _made(_CACHE / f"pip-{package}-{version}", "pip", f"{package}=={version}")


def _made(folder: Path, source: str, package: str) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / "made-with"
    recipe = f"{source} {sys.version if source == 'pip' else shutil.which('node')}"
    with _locked(folder.with_suffix(folder.suffix + ".lock")):
        if not stamp.is_file() or stamp.read_text() != recipe:
            # Half made by a run that was stopped, or made for another interpreter.
            shutil.rmtree(folder, ignore_errors=True)
            _INSTALLERS[source](folder, package)
            stamp.write_text(recipe)
    return folder


def command_of(client: SdkClient, script: Path) -> list[str]:
    """How to run a script with the SDK of ``client``."""
    if client.source == "pip":
        return [str(client.environment / "bin" / "python"), str(script)]
    return [shutil.which("node") or "node", str(script)]


def _pip(folder: Path, package: str) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", package])


def _npm(folder: Path, package: str) -> None:
    folder.mkdir()
    options = ["--no-audit", "--no-fund", "--no-save", "--no-package-lock", "--ignore-scripts"]
    _run([shutil.which("npm") or "npm", "install", *options, "--prefix", str(folder), package])


_INSTALLERS = {"pip": _pip, "npm": _npm}


def _run(command: list[str]) -> None:
    # Without the virtual environment and the path additions of the suite: the new environment is to be its own.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise PackageUnavailable(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
