"""What a test needs of its machine, and what happens where that is missing.

A machine without bubblewrap or Node still runs the rest: the test is skipped and says why. Where the whole must be
tested, ``SANDGATE_REQUIRE=bubblewrap,docker,node,packages,postgres`` names what must be there, and the same lack is a failure.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import NoReturn

import pytest

from sandgate_testing.engine import why_no_engine
from sandgate_testing.postgres import programs

__all__ = ["lacking", "need"]

_OLDEST_NODE = 18


def need(name: str) -> None:
    """Goes on where the machine has ``name``; else skips the test, or fails it when the environment demands it."""
    reason = _why_missing(name)
    if reason is not None:
        lacking(name, reason)


def lacking(name: str, reason: str) -> NoReturn:
    """Skips or fails for a lack that only showed on the way, for example a package that could not be installed."""
    if name in _demanded():
        pytest.fail(f"{name} is required here: {reason}", pytrace=False)
    pytest.skip(reason)


def _demanded() -> frozenset[str]:
    names = frozenset(filter(None, os.environ.get("SANDGATE_REQUIRE", "").split(",")))
    # A misspelt name would demand nothing, for ever and in silence.
    if unknown := names - _CHECKS.keys():
        pytest.fail(f"SANDGATE_REQUIRE names {', '.join(sorted(unknown))}; known: {', '.join(_CHECKS)}", pytrace=False)
    return names


@functools.cache
def _why_missing(name: str) -> str | None:
    return _CHECKS[name]()


def _bubblewrap() -> str | None:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed: apt-get install bubblewrap"
    unprivileged = ["--unshare-user"] if os.geteuid() else []
    probe = [bwrap, *unprivileged, "--unshare-pid", "--unshare-ipc", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=20)
    return None if done.returncode == 0 else f"bubblewrap may not make namespaces here: {done.stderr.strip()}"


def _caddy() -> str | None:
    return None if shutil.which("caddy") is not None else "Caddy is not installed: apt-get install caddy"


def _node() -> str | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return "node and npm are not installed"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    major = int(version.lstrip("v").split(".")[0])
    return None if major >= _OLDEST_NODE else f"node is {version.strip()}, the SDK needs {_OLDEST_NODE} or newer"


def _packages() -> str | None:
    """Nothing to look at beforehand: installing tells, through :func:`lacking`."""
    return None


def _postgres() -> str | None:
    return None if programs() is not None else "PostgreSQL is not installed: apt-get install postgresql"


_CHECKS: dict[str, Callable[[], str | None]] = {
    "bubblewrap": _bubblewrap,
    "caddy": _caddy,
    "docker": why_no_engine,
    "node": _node,
    "packages": _packages,
    "postgres": _postgres,
}
