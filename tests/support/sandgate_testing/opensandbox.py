"""A real OpenSandbox server from PyPI on this machine's engine, for the tests of the backend and of gateways on it.

Nothing of it is ours but the stand-in for execd, whose image cannot be had without a registry. It may be killed and started
again on the same port and store.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandgate_testing.containers import Containers
from sandgate_testing.engine import docker, engine_environment
from sandgate_testing.reserved_ports import ReservedPort
from sandgate_testing.sdk import pip_environment

__all__ = ["OnServer", "OpenSandboxServer", "ServerFailed"]

_VERSION = "1.1.1"
_KEY = "test-key-of-the-lifecycle-server"
#: Seconds; many times what a loaded machine needs.
_PATIENCE = 90.0
#: Below the ports that the kernel gives out; two or three for each sandbox.
_FIRST_PORT, _LAST_PORT, _PORTS = 20_000, 32_000, 200


class ServerFailed(Exception):
    """It did not start or stop as it must; the text ends with the end of its log."""


class OpenSandboxServer:
    """One server, on a folder of its own."""

    def __init__(self, *, execd_image: str, binds: tuple[str, ...] = (), extra: str = "") -> None:
        """``binds`` are mounted into every sandbox; ``extra`` is more of the configuration."""
        self._program = pip_environment("opensandbox-server", _VERSION) / "bin" / "opensandbox-server"
        self._folder = Path(tempfile.mkdtemp(prefix="osb-"))
        self._port = ReservedPort()
        self._process: subprocess.Popen[bytes] | None = None
        self._config = self._folder / "config.toml"
        self._guard, self.ports = _ports_of_its_own()
        self._config.write_text(
            f"""
[server]
host = "127.0.0.1"
port = {self._port.number}
api_key = "{_KEY}"
max_sandbox_timeout_seconds = 86400
[runtime]
type = "docker"
execd_image = "{execd_image}"
[docker]
network_mode = "bridge"
port_range_min = {self.ports.start}
port_range_max = {self.ports.stop - 1}
publish_host = "127.0.0.1"
sandbox_binds = {json.dumps(binds)}
[store]
type = "sqlite"
path = "{self._folder}/store.db"
[ingress]
mode = "direct"
{extra}
"""
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.number}"

    @property
    def settings(self) -> dict[str, object]:
        """Of ``[backends.opensandbox]``."""
        return {"server": self.url, "api_key": _KEY}

    def start(self) -> None:
        """Returns once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), "--config", str(self._config)],
                # It keeps more in the home of its user.
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder), "NO_PROXY": "*", **engine_environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise ServerFailed(f"the OpenSandbox server does not start\n{self.log()[-3000:]}")
            time.sleep(0.1)

    def stop(self, *, hard: bool = False) -> None:
        """SIGTERM (``hard``: SIGKILL) and wait. Sandboxes stay as they are."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def stand_still(self) -> None:
        """It takes connections and answers nothing, until :meth:`go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def discard(self) -> None:
        """Ends it and removes all that it has made and still knows."""
        with contextlib.suppress(ServerFailed, OSError):
            if self._process is None:
                self.start()
            for sandbox in self.sandboxes():
                self.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
            for snapshot in self.call("GET", "/v1/snapshots?pageSize=200")["items"]:
                self.call("DELETE", f"/v1/snapshots/{snapshot['id']}")
        self.stop()
        self._guard.close()
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def sandboxes(self) -> list[dict[str, Any]]:
        """Its own: it lists those of every server on the engine, of which only the ports tell."""
        found: list[dict[str, Any]] = self.call("GET", "/v1/sandboxes?pageSize=200")["items"]
        form = '{{.Label "opensandbox.io/id"}} {{.Label "opensandbox.io/http-port"}}'
        listed = docker("ps", "-a", "--filter", "label=opensandbox.io/id", "--format", form).stdout.splitlines()
        ports = dict(line.split(maxsplit=1) for line in listed if line.count(" ") == 1 and not line.endswith(" "))
        return [each for each in found if int(ports.get(each["id"], 0)) in self.ports]

    def snapshots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/v1/snapshots?pageSize=200")["items"]
        return found

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """One request with the server's key; its answer, whatever the status."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port.number, timeout=60)
        try:
            headers = {"OPEN-SANDBOX-API-KEY": _KEY, "Content-Type": "application/json"}
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            text = connection.getresponse().read()
            return json.loads(text) if text else {}
        finally:
            connection.close()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _answers(self) -> bool:
        try:
            return self.call("GET", "/health") is not None
        except (OSError, http.client.HTTPException, ValueError):
            return False


@dataclass(frozen=True, kw_only=True)
class OnServer(Containers):
    """Gateways under test that make their sandboxes on a server, which has the bundle mounted in each."""

    server: OpenSandboxServer

    def prepare(self, state_dir: Path) -> None:
        target = state_dir / "backends/opensandbox" / self.bundle.name
        if not target.exists():
            state_dir.mkdir(mode=0o700, exist_ok=True)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copytree(self.bundle, target, copy_function=os.link)

    def options(self, folder: Path) -> list[str]:
        values = {**self.server.settings, "agent_mount": True}
        lines = ["[backends.opensandbox]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        lines += self.settings
        lines += ["[backends.opensandbox.templates.base]", f'image = "{self.image}"']
        config = folder / "config.toml"
        config.write_text("\n".join(lines) + "\n")
        return ["--backend", "opensandbox", "--config", str(config)]


def _ports_of_its_own() -> tuple[socket.socket, range]:
    """What a server gives out, and what keeps others from giving out the same: the port before them, held open."""
    ranges = range(_FIRST_PORT, _LAST_PORT, _PORTS)
    for number in range(len(ranges)):
        first = ranges[(os.getpid() + number) % len(ranges)]
        try:
            guard = socket.create_server(("127.0.0.1", first))
        except OSError:
            continue
        return guard, range(first + 1, first + _PORTS)
    raise ServerFailed("no range of ports is free")
