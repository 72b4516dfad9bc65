"""A gateway under test: the real ``sandgate serve`` in a process of its own, reached the way a user reaches it.

What it prints for the user's shell is what the tests read address and key from. It ends by SIGTERM, and then nothing of
it may be left; :meth:`Gateway.stop` says what is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from sandgate_testing.boxes import Box, ContainerBox, ProcessBox
from sandgate_testing.containers import Containers, containers_of, remains_on_engine, remove_from_engine
from sandgate_testing.leftovers import groups_of, processes_of, remains_of, sandboxes_of, thaw
from sandgate_testing.reserved_ports import ReservedPort

__all__ = ["Answer", "Gateway", "GatewayFailed", "SdkOptions", "wait_until"]

_Value = TypeVar("_Value")

#: Seconds to wait for a start or a stop before the gateway counts as hung; many times what a loaded machine needs.
_PATIENCE = 60.0
_EXPORT = re.compile(r"^export (\w+)=(\S+)$", re.MULTILINE)


class GatewayFailed(Exception):
    """The gateway did not start, stop or recover as it must; the text ends with the end of its log."""


class SdkOptions(TypedDict):
    """Arguments with which a call of the Python SDK finds a gateway."""

    api_url: str
    sandbox_url: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status, headers (lower case) and body of one call."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Gateway:
    """One ``sandgate serve`` on a state directory of its own, which may be stopped and started again."""

    def __init__(
        self,
        *,
        isolation: str = "bubblewrap",
        containers: Containers | None = None,
        on_exit: str = "kill",
        options: tuple[str, ...] = (),
        seed: str | None = None,
    ) -> None:
        """On the process backend with ``isolation``, or with ``containers`` on an engine. ``seed``: of several gateways."""
        # Short, because sockets of sandboxes live below it and an address has 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="sg-"))
        self.state_dir = self._folder / "state"
        self._isolation = isolation
        self._containers = containers
        self._on_exit = on_exit
        self._options = options
        self._seed = seed
        # Its clients find it there again after a restart.
        self._port = ReservedPort()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.api_key = ""

    def start(self) -> None:
        """Starts it and returns once it has printed its address; a second start keeps address and key."""
        if self._containers is not None:
            self._containers.prepare(self.state_dir)
        out = self._folder / "stdout"
        with out.open("wb") as stdout, (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(str(self._port.number)),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
            )
        exports = self._wait("print its address", lambda: self._exports(out))
        self.url = exports["E2B_API_URL"]
        self.api_key = exports.get("E2B_API_KEY", self.api_key)

    def stop(self, *, hard: bool = False) -> None:
        """SIGTERM (``hard``: SIGKILL) and wait. Raises GatewayFailed where it hangs or reports failure."""
        self._started().send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        self.wait_for_end(hard=hard)

    def wait_for_end(self, *, hard: bool = False) -> None:
        """Of one that has been told to stop already: a second signal would hurry it. Raises as :meth:`stop` does."""
        process = self._started()
        try:
            status = process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise GatewayFailed(f"did not stop within {_PATIENCE:g} s\n{self._log_tail()}") from None
        if not hard and status != 0:
            raise GatewayFailed(f"ended with status {status} after SIGTERM\n{self._log_tail()}")

    def remains(self) -> list[str]:
        """What is left of it and its sandboxes; see :mod:`sandgate_testing.leftovers`."""
        return [*remains_of(self.state_dir), *(remains_on_engine(self.state_dir) if self._containers else [])]

    def boxes(self) -> Mapping[str, Box]:
        """What exists, by sandbox; what belongs to none goes by a name of its own."""
        if self._containers is not None:
            return {owner: ContainerBox(name) for owner, name in containers_of(self.state_dir).items()}
        return {owner: ProcessBox(folder) for owner, folder in sandboxes_of(self.state_dir).items()}

    def discard(self) -> None:
        """Ends whatever still runs, by force, and removes the state directory. For the end of a test that failed."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._containers is not None:
            remove_from_engine(self.state_dir)
        groups = groups_of(self.state_dir)
        for group in groups:
            thaw(group)
        for _ in range(50):
            left = processes_of(self.state_dir)
            if not left:
                break
            for pid in left:
                _kill(pid)
            time.sleep(0.1)
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def sdk_environment(self) -> dict[str, str]:
        """The three variables with which an SDK finds this gateway."""
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.api_key}

    @property
    def sdk_options(self) -> SdkOptions:
        """The same as arguments of the Python SDK's calls."""
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": self.api_key}

    def child(self, module: str) -> int | None:
        """Pid of a child that runs ``python -m <module>``; the first if there are several."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _parent(folder) == self.pid and module in _command_line(folder):
                return int(folder.name)
        return None

    def kill_core(self) -> int:
        """SIGKILLs the core and returns the pid it had."""
        pid = self.child("sandgate_core")
        if pid is None:
            raise GatewayFailed(f"no core runs\n{self._log_tail()}")
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for_new_core(self, old: int) -> None:
        """Returns once a core other than ``old`` answers."""

        def answers() -> bool:
            return self.child("sandgate_core") not in {None, old} and self.rest("GET", "/v2/sandboxes").status == 200

        self._wait("start a new core", answers)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def log_size(self) -> int:
        """A mark for :meth:`requests_since`."""
        return (self._folder / "log").stat().st_size

    def requests_since(self, mark: int) -> list[dict[str, Any]]:
        """Log entries about requests, written after ``mark`` was taken."""
        lines = (self._folder / "log").read_bytes()[mark:].decode(errors="replace").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if "route" in entry and "method" in entry]

    def rest(self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None) -> Answer:
        """One control-plane call with the gateway's key; ``headers`` replaces that key too."""
        fields = {"X-API-Key": self.api_key} if headers is None else dict(headers)
        content = None if body is None else json.dumps(body).encode()
        return self.call(method, path, content, headers={"Content-Type": "application/json", **fields})

    def call(self, method: str, path: str, body: bytes | None = None, *, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=_PATIENCE)
        try:
            connection.request(method, path, body=body, headers=dict(headers))
            reply = connection.getresponse()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(status=reply.status, headers=names, body=reply.read())
        finally:
            connection.close()

    def create_sandbox(self, **fields: object) -> dict[str, Any]:
        """A sandbox without any SDK; the reply's body."""
        answer = self.rest("POST", "/v2/sandboxes", {"templateID": "base", **fields})
        if answer.status != 201:
            raise GatewayFailed(f"create answered {answer.status}: {answer.body!r}\n{self._log_tail()}")
        sandbox: dict[str, Any] = answer.json()
        return sandbox

    def _command(self, port: str) -> list[str]:
        program = Path(sys.executable).parent / "sandgate"
        where = ["--host", "127.0.0.1", "--port", port, "--state-dir", str(self.state_dir)]
        backend = ["--isolation", self._isolation]
        if self._containers is not None:
            backend = self._containers.options(self._folder)
        how = ["--on-exit", self._on_exit, "--log-format", "json"]
        return [str(program), "serve", *where, *backend, *how, *self._options]

    def _environment(self) -> dict[str, str]:
        # A developer's own settings would make it another gateway than the tests speak of.
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("SANDGATE_", "E2B_"))}
        return plain if self._seed is None else {**plain, "SANDGATE_SEED": self._seed}

    def _exports(self, out: Path) -> dict[str, str] | None:
        text = out.read_text()
        found = dict(_EXPORT.findall(text))
        wanted = {"E2B_API_URL", "E2B_SANDBOX_URL"} | ({"E2B_API_KEY"} if not self.api_key else set())
        return found if wanted <= found.keys() else None

    def _wait(self, what: str, probe: Callable[[], _Value | None]) -> _Value:
        def probe_while_alive() -> _Value | None:
            if (status := self._started().poll()) is not None:
                raise GatewayFailed(f"ended with status {status} before it could {what}\n{self._log_tail()}")
            return probe()

        try:
            return wait_until(probe_while_alive)
        except TimeoutError:
            raise GatewayFailed(f"did not {what} within {_PATIENCE:g} s\n{self._log_tail()}") from None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise GatewayFailed("was not started")
        return self._process

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])


def wait_until(probe: Callable[[], _Value | None], *, patience: float = _PATIENCE) -> _Value:
    """Asks until the answer is true, and returns it. Raises TimeoutError after ``patience`` seconds."""
    end = time.monotonic() + patience
    while True:
        if value := probe():
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"still {value!r} after {patience:g} s")
        time.sleep(0.02)


def _parent(folder: Path) -> int | None:
    try:
        # The command's name stands in parentheses and may hold anything, also spaces and parentheses.
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def _command_line(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
