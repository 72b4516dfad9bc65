"""``sandgate doctor``: what this machine has, what is broken, and how to mend it.

Each check is one row. The backend's own rows come from its class (``Backend.diagnose``), which really tries; so this page
knows nothing of bubblewrap or Docker. A backend is found as the core finds it, by its entry point.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import click

import sandgate_tracing
from sandgate import listening, state
from sandgate.config import Configuration, Settings
from sandgate.logs import printable
from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api.loading import find_backends

__all__ = ["Check", "backend_checks", "examine"]

#: A gateway with less than this runs, and soon does not.
_LITTLE_DISK = 1024**3
#: What a database's URL may begin with, as the core takes it.
_POSTGRESQL = ("postgresql", "postgres", "postgresql+asyncpg")
_SQLITE = ("sqlite", "sqlite+aiosqlite")
_COLOURS = {"ok": "green", "broken": "red", "note": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row. ``note`` is worth knowing and stops nothing."""

    what: str
    state: Literal["ok", "broken", "note"]
    how: str


def examine(configuration: Configuration) -> bool:
    """Print every check; whether a gateway with this configuration can run."""
    checks = list(_checks(configuration.settings))
    width = max(len(check.what) for check in checks)
    for check in checks:
        mark = click.style(f"{check.state:<6}", fg=_COLOURS[check.state])
        click.echo(f"{mark}  {check.what:<{width}}  {printable(check.how)}")
    return all(check.state != "broken" for check in checks)


def _checks(settings: Settings) -> Iterator[Check]:
    yield _python()
    yield _system()
    yield _state_dir(settings.state_dir)
    yield _disk(settings.state_dir)
    yield _port(settings)
    if settings.database is not None:
        yield _database(settings.database)
        if settings.database.startswith("postgres"):
            yield _core_address(settings)
    yield _traces(settings)
    yield from backend_checks(settings.backend, settings.backends.get(settings.backend, {}))
    for name in sorted(settings.backends.keys() - {settings.backend}):
        yield from backend_checks(name, settings.backends[name])
    yield _sdk()


def _row(what: str, good: bool, how: str) -> Check:
    return Check(what=what, state="ok" if good else "broken", how=how)


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return _row("Python", good, platform.python_version() + ("" if good else ": needs 3.11 or newer"))


def _system() -> Check:
    good = sys.platform == "linux"
    how = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"
    return _row("system", good, how if good else f"{how}: a gateway needs Linux")


def _state_dir(folder: Path) -> Check:
    """Without making it: a check leaves no traces."""
    if not folder.exists():
        parent = next(parent for parent in folder.parents if parent.exists())
        good = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
        how = "will be made" if good else f"{parent} is not writable: choose another with --state-dir"
        return _row("state directory", good, f"{folder}: {how}")
    try:
        state.check_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FailedPrecondition as error:
        return _row("state directory", False, error.message)
    except OSError as error:
        return _row("state directory", False, f"{folder}: {error.strerror}: choose another with --state-dir")
    return _row("state directory", True, str(folder))


def _disk(folder: Path) -> Check:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 1024**3:.1f} GiB free at {existing}"
    return Check(what="disk", state="ok" if free >= _LITTLE_DISK else "note", how=text)


def _port(settings: Settings) -> Check:
    try:
        with contextlib.closing(listening.bind(settings.host, settings.port)):
            return _row("port", True, f"{settings.port} on {settings.host} is free")
    except FailedPrecondition as error:
        if (pid := state.holder(settings.state_dir)) is not None:
            return _row("port", True, f"{settings.port}: the gateway of this state directory runs (process id {pid})")
        return _row("port", False, error.message)


def _database(url: str) -> Check:
    # Only the scheme: the rest holds a password.
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in (*_POSTGRESQL, *_SQLITE):
        return _row("database", False, "no URL of a database that is supported: use postgresql:// or sqlite://")
    if scheme in _POSTGRESQL and util.find_spec("asyncpg") is None:
        return _row("database", False, f"{scheme} needs a driver: pip install 'sandgate[postgresql]'")
    return _row("database", True, scheme)


def _traces(settings: Settings) -> Check:
    if settings.traces == "none":
        return _row("traces", True, "off")
    try:
        sandgate_tracing.check()
    except FailedPrecondition as error:
        return _row("traces", False, error.message)
    return _row("traces", True, f"to {sandgate_tracing.endpoint()}")


def _core_address(settings: Settings) -> Check:
    """Whether other gateways on the database reach this one's core."""
    address = settings.core_address
    if address is None:
        how = "the core's own socket, for other gateways of this user on this machine; for others set --core-address"
        return Check(what="core address", state="note", how=how)
    port = address.rpartition(":")[2]
    listened = {target if target.startswith("unix:") else target.rpartition(":")[2] for target in settings.grpc_listen}
    if (address if address.startswith("unix:") else port) not in listened:
        return _row("core address", False, f"{address}: the core does not listen there, add --grpc-listen")
    return _row("core address", True, address)


def _sdk() -> Check:
    try:
        return _row("E2B SDK", True, f"e2b {metadata.version('e2b')}")
    except metadata.PackageNotFoundError:
        return Check(what="E2B SDK", state="note", how="not installed here; only the demo needs it: pip install e2b")


def backend_checks(name: str, settings: Mapping[str, object]) -> Sequence[Check]:
    """What the backend's own class finds on this machine."""
    what = f"backend {name}"
    try:
        rows = find_backends([name])[name].backend.diagnose(settings)
    except SandgateError as error:
        return [_row(what, False, error.message)]
    except Exception as error:
        # A third party's code: its fault is a finding, not the end of the page.
        return [_row(what, False, f"its check failed with {type(error).__name__}: {error}")]
    return [_row(f"{what}: {title}", good, how) for title, good, how in rows] or [_row(what, True, "installed")]
