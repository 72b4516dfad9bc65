"""``sandgate serve`` as a whole: what it prints, what it keeps running, and that nothing of it is left.

Sandboxes are not needed here (the journeys make them): the process backend makes none ahead, so any machine will do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_testing.gateway import wait_until
from sandgate_testing.leftovers import processes_of

_PROGRAM = Path(sys.executable).parent / "sandgate"
_KEY = "e2b_" + "0123456789" * 4


class Serve:
    """One ``sandgate serve`` of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        (folder / "config.toml").write_text('[backends.process]\nisolation = "none"\nwarm = 0\n')
        self.process: subprocess.Popen[str] | None = None
        self.environment: dict[str, str] = {}

    def start(self, *options: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDGATE_", "E2B_"))}
        command = [_PROGRAM, "serve", "--port", "0", "--config", self.folder / "config.toml"]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--state-dir", self.state_dir, *options],
                env={**kept, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self.process

    def ready(self, *options: str) -> list[str]:
        """Start it; its three lines."""
        process = self.start(*options)
        lines = [process.stdout.readline() for _ in range(3)]
        assert all(lines), self.log()
        return lines

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def children(self, module: str) -> list[int]:
        return [pid for pid, command in processes_of(self.state_dir).items() if module in command]

    def health(self, url: str) -> int:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [_PROGRAM, *arguments, "--state-dir", self.state_dir]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def serve(tmp_path) -> Iterator[Serve]:
    serve = Serve(tmp_path)
    yield serve
    if serve.process is not None:
        if serve.process.poll() is None:
            serve.process.send_signal(signal.SIGTERM)
            serve.process.wait(60)
        serve.process.stdout.close()
    wait_until(lambda: not processes_of(serve.state_dir))
    # A killed front could not take it away; pytest's folders are too deep for it to lie in the state directory.
    shutil.rmtree(os.path.realpath(serve.state_dir / "run"), ignore_errors=True)


@pytest.fixture
def stand_in(serve):
    """Puts a program in the place of a child, to show what the front does with one that misbehaves."""

    def put(module: str, source: str) -> None:
        (package := serve.folder / "modules" / module).mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(textwrap.dedent(source))
        serve.environment["PYTHONPATH"] = str(package.parent)

    return put


def test_it_prints_three_exports_and_answers(serve):
    lines = serve.ready()
    url = re.fullmatch(r"export E2B_API_URL=(http://127\.0\.0\.1:\d+)\n", lines[0])[1]
    assert lines[1] == f"export E2B_SANDBOX_URL={url}\n"
    key = re.fullmatch(r"export E2B_API_KEY=(e2b_[0-9a-f]{40})\n", lines[2])[1]
    assert serve.health(url) == 200
    assert serve.stop() == 0
    assert serve.process.stdout.read() == ""
    assert key not in serve.log()


def test_a_stopped_gateway_leaves_no_process_and_no_socket(serve):
    serve.ready()
    run_dir = os.path.realpath(serve.state_dir / "run")
    assert serve.children("sandgate_core")
    assert serve.stop() == 0
    assert processes_of(serve.state_dir) == {}
    assert not Path(run_dir).exists()
    assert not (serve.state_dir / "run").is_symlink()
    assert sorted(path.name for path in serve.state_dir.glob("*.new")) == []


def test_ctrl_c_stops_it_as_sigterm_does(serve):
    serve.ready()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(60) == 0
    assert processes_of(serve.state_dir) == {}


def test_files_of_the_state_directory_are_private(serve):
    serve.ready()
    for path in serve.state_dir.iterdir():
        assert path.lstat().st_mode & 0o077 == 0 or path.is_symlink() or path.name == "backends", path


def test_a_killed_front_takes_its_children_with_it(serve):
    serve.ready()
    assert serve.children("sandgate_edge")
    serve.process.kill()
    serve.process.wait()
    wait_until(lambda: not processes_of(serve.state_dir), patience=30)


def test_it_starts_again_at_once_after_its_front_was_killed(serve):
    """The old core may still be ending; the new one waits for it."""
    serve.ready()
    serve.process.kill()
    serve.process.wait()
    serve.process.stdout.close()
    lines = serve.ready()
    assert lines[2].startswith("# E2B_API_KEY: ")


@pytest.mark.parametrize("module", ["sandgate_core", "sandgate_edge"])
def test_a_killed_child_is_started_again(serve, module):
    url = serve.ready()[0].strip().partition("=")[2]
    (before,) = serve.children(module)
    other = "sandgate_edge" if module == "sandgate_core" else "sandgate_core"
    (kept,) = serve.children(other)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: serve.children(module) not in ([], [before]))
    wait_until(lambda: serve.run("keys", "list").returncode == 0)
    assert serve.health(url) == 200
    assert serve.children(other) == [kept]
    assert "killed by SIGKILL" in serve.log()


def test_several_workers_share_the_port(serve):
    url = serve.ready("--workers", "3")[0].strip().partition("=")[2]
    assert len(serve.children("sandgate_edge")) == 3
    assert {serve.health(url) for _ in range(10)} == {200}


def test_a_key_of_the_environment_is_not_printed_and_works(serve):
    serve.environment["SANDGATE_API_KEY"] = _KEY
    assert serve.ready()[2] == "export E2B_API_KEY=$SANDGATE_API_KEY\n"
    keys = json.loads(serve.run("keys", "list", "--json").stdout)
    assert [key["prefix"] for key in keys] == [_KEY[: len(keys[0]["prefix"])]]
    assert _KEY not in serve.log()


def test_the_first_key_is_shown_once(serve):
    assert serve.ready()[2].startswith("export E2B_API_KEY=e2b_")
    serve.stop()
    serve.process.stdout.close()
    assert serve.ready()[2].startswith("# E2B_API_KEY: ")


def test_a_restarted_core_does_not_bring_a_revoked_key_back(serve):
    serve.environment["SANDGATE_API_KEY"] = _KEY
    serve.ready()
    (key,) = json.loads(serve.run("keys", "list", "--json").stdout)
    assert serve.run("keys", "revoke", key["id"]).returncode == 0
    (core,) = serve.children("sandgate_core")
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: serve.children("sandgate_core") not in ([], [core]))
    wait_until(lambda: serve.run("keys", "list").returncode == 0)
    assert json.loads(serve.run("keys", "list", "--json").stdout) == []


def test_keys_are_made_listed_and_revoked(serve):
    serve.ready()
    refused = serve.run("keys", "create", "--name", "[red] ci", "--owner", "team")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no team 'team'" in refused.stderr
    assert "--create-team" in refused.stderr
    made = serve.run("keys", "create", "--name", "[red] ci", "--owner", "team", "--create-team")
    assert re.fullmatch(r"e2b_[0-9a-f]{40}\n", made.stdout)
    listed = serve.run("keys", "list").stdout
    assert "team" in listed
    assert "[red] ci" in listed
    assert made.stdout.strip() not in listed
    key_id = next(line.split()[0] for line in listed.splitlines() if "team" in line)
    assert serve.run("keys", "revoke", key_id).returncode == 0
    assert "team" not in serve.run("keys", "list").stdout
    again = serve.run("keys", "revoke", key_id)
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1


def test_sandbox_commands_answer_in_one_line(serve):
    serve.ready()
    assert serve.run("sandbox", "list").stdout == ""
    assert json.loads(serve.run("sandbox", "list", "--json").stdout) == []
    missing = serve.run("sandbox", "info", "i" + "a" * 20)
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    malformed = serve.run("sandbox", "kill", "../x", "i" + "b" * 20)
    assert malformed.stderr.count("\n") == 1
    assert "Invalid sandbox ID" in malformed.stderr
    assert "i" + "b" * 20 in malformed.stderr


def test_a_second_gateway_on_the_same_state_is_told_of_the_first(serve):
    serve.ready()
    second = serve.run("serve", "--port", "0")
    assert second.returncode == 1
    assert f"in use by the gateway with process id {serve.process.pid}:" in second.stderr
    assert second.stderr.count("\n") == 1


def test_gateway_that_is_refused_at_its_first_start_leaves_nothing(serve):
    for options in (("--backend", "nosuch"), ("--database", "oracle://x"), ("--metrics-listen", "192.0.2.1:1")):
        process = serve.start(*options)
        assert process.wait(60) == 1
        process.stdout.close()
        assert not serve.state_dir.exists()


def test_first_start_that_is_cut_off_keeps_what_the_next_one_has_to_find(serve):
    process = serve.start()
    wait_until(lambda: serve.children("sandgate_core"))
    os.kill(serve.children("sandgate_core")[0], signal.SIGKILL)
    assert process.wait(60) == 1
    process.stdout.close()
    assert (serve.state_dir / "seed").exists()


def test_the_state_of_a_newer_version_is_refused(serve):
    serve.ready()
    serve.stop()
    serve.process.stdout.close()
    with sqlite3.connect(serve.state_dir / "sandgate.db") as database:
        database.execute("update alembic_version set version_num = 'from_the_future'")
    database.close()
    refused = serve.run("serve", "--port", "0", "--config", str(serve.folder / "config.toml"), "--log-level", "error")
    assert refused.returncode == 1
    said = [line for line in refused.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1
    assert said[0].startswith("sandgate: ")
    assert "newer" in said[0]


def test_a_child_that_keeps_dying_stops_the_gateway(serve, stand_in):
    stand_in("sandgate_edge", "import sys\nsys.stdin.readline()\nprint('{\"ready\": true}', flush=True)\nsys.exit(7)\n")
    serve.ready()
    assert serve.process.wait(60) == 1
    assert "sandgate: edge ended 5 times in a row" in serve.log()
    assert "exit status 7" in serve.log()
    assert processes_of(serve.state_dir) == {}


def test_a_child_that_cannot_start_stops_the_gateway_with_its_own_line(serve, stand_in):
    stand_in("sandgate_edge", 'print(\'{"ready": false, "error": "no wings"}\')\nraise SystemExit(1)\n')
    assert serve.start().wait(60) == 1
    assert serve.log().splitlines()[-1] == "sandgate: no wings"
    assert processes_of(serve.state_dir) == {}


def test_a_second_signal_hurries(serve, stand_in):
    stand_in(
        "sandgate_edge",
        "import sys, time\nsys.stdin.readline()\nprint('{\"ready\": true}', flush=True)\ntime.sleep(600)\n",
    )
    serve.ready()
    serve.process.send_signal(signal.SIGTERM)
    # The core is only told once the edge has gone: while it runs, the first signal is being waited upon.
    with pytest.raises(subprocess.TimeoutExpired):
        serve.process.wait(1)
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(12) == 0
    assert processes_of(serve.state_dir) == {}


def test_signals_that_go_on_until_the_end_do_not_make_it_a_failure(serve):
    """The last of them come when the front has nothing left to do but to tidy up."""
    serve.ready()
    status = None
    while status is None:
        serve.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = serve.process.wait(0.005)
    assert status == 0, serve.log()
    assert processes_of(serve.state_dir) == {}


def test_a_signal_during_the_start_stops_it(serve, stand_in):
    stand_in("sandgate_edge", "import sys\nsys.stdin.read()\n")
    serve.start()
    wait_until(lambda: serve.children("sandgate_edge"))
    assert serve.stop() == 0
    assert processes_of(serve.state_dir) == {}


def test_exports_that_nobody_reads_are_no_error(serve):
    serve.start().stdout.close()
    wait_until(lambda: serve.run("keys", "list").returncode == 0)
    assert serve.stop() == 0
    assert "Exception ignored" not in serve.log()


def test_sandboxes_that_could_not_be_ended_are_said(serve, stand_in):
    stand_in(
        "sandgate_core",
        "import sys, time\nsys.stdin.readline()\nprint('{\"ready\": true}', flush=True)\ntime.sleep(600)\n",
    )
    serve.ready("--on-exit", "kill")
    serve.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        serve.process.wait(1)
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(30) == 1
    assert serve.log().splitlines()[-1].startswith("sandgate: the core could not end all sandboxes")


def test_a_lost_terminal_does_not_stop_it(serve):
    serve.ready()
    serve.process.stdout.close()
    assert serve.run("keys", "list").returncode == 0


def test_doctor_finds_the_running_gateway(serve):
    port = serve.ready()[0].strip().rpartition(":")[2]
    shown = serve.run("doctor", "--port", port, "--config", str(serve.folder / "config.toml"))
    assert f"(process id {serve.process.pid})" in shown.stdout
