"""``sandgate demo``: a gateway on a free port and a fresh state directory, a script against it, and nothing left after.

The script is :mod:`sandgate.demo_script`, in a process of its own with nothing but the three variables that any program
needs. The gateway is ``sandgate serve`` as everybody starts it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path

import click

from sandgate.config import PREFIX
from sandgate.doctor import backend_checks
from sandgate_errors import FailedPrecondition, Unavailable

__all__ = ["run"]

_EXPORT = re.compile(r"export (E2B_[A-Z_]+)=(\S+)")
#: The front bounds its own stop; this only guards against a fault in that.
_STOP_WITHIN = 180.0
_HURRIED_STOP_WITHIN = 30.0


def run() -> None:
    """From the gateway's start to its end. Raises Unavailable when a part of it failed."""
    if util.find_spec("e2b") is None:
        raise FailedPrecondition(f"the demo needs the E2B SDK: {Path(sys.executable)} -m pip install e2b")
    isolation = _isolation()
    with tempfile.TemporaryDirectory(prefix="sandgate-demo-") as folder, _gateway(Path(folder), isolation) as exports:
        click.echo(f"A gateway runs at {exports['E2B_API_URL']} (isolation: {isolation}).")
        status = _script(exports)
    if status != 0:
        raise Unavailable(f"the demo's script failed with exit status {status}; the gateway has stopped")
    click.echo("\nThe gateway has stopped and left nothing behind.")


def _isolation() -> str:
    """What the machine can do. The demo alone may fall back, and says so; ``serve`` never does by itself."""
    broken = [check.how for check in backend_checks("process", {"isolation": "bubblewrap"}) if check.state == "broken"]
    if not broken:
        return "bubblewrap"
    click.echo(f"No isolation on this machine: {broken[0]}. This demo runs once without (--isolation none).", err=True)
    return "none"


@contextlib.contextmanager
def _gateway(folder: Path, isolation: str) -> Iterator[dict[str, str]]:
    """Start a gateway; what it says to export. It has stopped at the end."""
    command = [sys.executable, "-P", "-m", "sandgate", "serve", "--host", "127.0.0.1", "--port", "0"]
    command += ["--state-dir", str(folder / "state"), "--isolation", isolation, "--on-exit", "kill"]
    command += ["--log-level", "warning"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=_without_settings(),
        # Ctrl-C is for the script first; the gateway stops when it has ended.
        start_new_session=True,
    )
    try:
        yield _exports(process)
    finally:
        _stop(process)


def _exports(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    found: dict[str, str] = {}
    while "E2B_API_KEY" not in found:
        line = process.stdout.readline()
        if not line:
            # Its reason stands on standard error already.
            raise Unavailable("the gateway did not start")
        found.update(_EXPORT.findall(line))
    return found


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(_STOP_WITHIN)
    except KeyboardInterrupt:
        # A second signal hurries it; its folder must not go while it still works there.
        process.send_signal(signal.SIGTERM)
        process.wait(_HURRIED_STOP_WITHIN)
        raise
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
    if status != 0 and sys.exc_info()[0] is None:
        raise Unavailable(f"the gateway did not stop cleanly (status {status})")


def _script(exports: Mapping[str, str]) -> int:
    environment = {**_without_settings(), **exports}
    for name in ("NO_PROXY", "no_proxy"):
        # The gateway is on this machine, whatever the way to the internet is.
        environment[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    # "-P": the script's own folder holds modules whose names are common.
    return subprocess.run([sys.executable, "-P", "-m", "sandgate.demo_script"], env=environment, check=False).returncode


def _without_settings() -> dict[str, str]:
    """The environment without settings of another gateway."""
    return {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "E2B_"))}
