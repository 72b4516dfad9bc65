"""The command line: one clear line for every mistake, the right exit status, never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(sys.executable).parent / "sandgate"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SANDGATE_")}
    return subprocess.run(
        [_PROGRAM, *arguments], env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def _line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error."""
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("sandgate: ")
    return result.stderr.rstrip()


def test_version_and_help():
    assert run("--version").stdout.startswith("sandgate 0.")
    shown = run("--help").stdout
    assert all(name in shown for name in ("serve", "doctor", "demo", "keys", "sandbox"))


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("serve", "--help")])
def test_help_and_version_load_nothing_heavy(arguments):
    program = f"import sys\nsys.argv = ['sandgate', *{arguments!r}]\nfrom sandgate.cli import main\ntry: main()\nexcept SystemExit: pass\nprint(sorted(sys.modules), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not any(f"'{name}'" in result.stderr for name in ("grpc", "pydantic", "aiohttp", "rich", "asyncio"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("frobnicate",), "No such command 'frobnicate'"),
        (("serve", "--prot", "1"), "No such option"),
        (("serve", "--port", "x"), "'x' is not a valid integer"),
        (("serve", "--port", "70000"), "--port: input should be less than or equal to 65535"),
        (("serve", "--on-exit", "explode"), "'keep', 'kill'"),
        (("serve", "--config", "/no/such.toml"), "configuration file /no/such.toml: No such file or directory"),
        (("serve", "--state-dir", "\n/x", "--workers", "0"), "--workers"),
        (("sandbox", "info"), "Missing argument 'ID'"),
        (("sandbox", "kill"), "Missing argument"),
        (("keys", "revoke"), "Missing argument"),
    ],
)
def test_mistakes_in_the_call_are_status_2(arguments, expected):
    result = run(*arguments)
    assert expected in _line(result)
    assert result.returncode == 2


def test_nothing_asked_shows_the_help_and_is_status_2():
    result = run()
    assert result.returncode == 2
    assert "Usage" in result.stderr


def test_an_unknown_variable_is_status_2():
    result = run("serve", SANDGATE_PROT="1")
    assert "unknown variable SANDGATE_PROT" in _line(result)
    assert result.returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [("keys", "list"), ("keys", "create"), ("sandbox", "list"), ("sandbox", "info", "x"), ("sandbox", "kill", "x")],
)
def test_without_a_gateway_one_line_says_so(arguments, tmp_path):
    result = run(*arguments, SANDGATE_STATE_DIR=str(tmp_path))
    assert f"no gateway is running on state directory {tmp_path}" in _line(result)
    assert result.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--state-dir", str(tmp_path / "s"))
    assert (
        _line(result)
        == f"sandgate: port {port} on 127.0.0.1 is in use (by another gateway?): choose another with --port"
    )
    assert result.returncode == 1


def test_a_file_in_place_of_the_state_directory_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result = run("serve", "--port", "0", "--state-dir", str(tmp_path / "file"))
    assert "not a directory" in _line(result)
    assert result.returncode == 1


def test_an_unknown_backend_is_one_line(tmp_path):
    result = run(
        "serve", "--port", "0", "--backend", "nowhere", "--log-level", "error", SANDGATE_STATE_DIR=str(tmp_path / "s")
    )
    assert "nowhere" in _line(result)
    assert result.returncode == 1


def test_a_fault_of_ours_is_one_line_too(tmp_path):
    (tmp_path / "sandgate_errors.py").touch()
    program = "from sandgate import cli\ncli.configuration = lambda *a, **k: 1 / 0\nimport sys\nsys.argv = ['sandgate', 'serve']\ncli.main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "unexpected ZeroDivisionError at" in _line(result)
    assert result.returncode == 1


def test_modules_in_the_working_directory_are_not_loaded(tmp_path):
    """`python -m` would prefer them to ours."""
    for name in ("sandgate_core", "sandgate_edge", "grpc", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')")
    result = subprocess.run(
        [_PROGRAM, "serve", "--port", "0", "--backend", "nowhere", "--state-dir", str(tmp_path / "s")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "hijacked" not in result.stderr
    assert "nowhere" in result.stderr


def test_ctrl_c_is_quiet(tmp_path):
    os.mkfifo(path := tmp_path / "config.toml")
    # A suite that runs in the background of a shell ignores the signal, and what it starts inherits that.
    command = ["env", "--default-signal=INT", _PROGRAM, "serve", "--config", path]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        # Opening our end waits for its: it reads its configuration now, and goes on reading while the end stays open.
        with path.open("wb"):
            process.send_signal(signal.SIGINT)
            _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert shown.strip() == ""
    assert process.returncode == 130
