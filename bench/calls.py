"""Latency of single calls through the official SDK, each in turns with the plain work it stands for.

In turns, and not one after the other: what else the machine does falls on both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from e2b import Sandbox

from bench import processor
from bench.report import Latency
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of

__all__ = ["creations", "listing", "single_calls", "with_many_alive"]

_Value = TypeVar("_Value")

_WARM_UP = 10
_CONTENT = "x" * 1024


def creations(gateway: Gateway, *, rounds: int) -> Latency:
    """Create, and kill outside of the measurement. The least an agent must do itself stands beside it."""
    times: list[float] = []
    baseline: list[float] = []
    for _ in range(rounds):
        sandbox, seconds = _timed(lambda: Sandbox.create(**gateway.sdk_options))
        times.append(seconds)
        sandbox.kill()
        baseline.append(_timed(lambda: subprocess.run([sys.executable, "-c", "import grpc.aio"], check=True))[1])
    return Latency(name="Sandbox.create", baseline_name="python -c 'import grpc.aio'", rounds=times, baseline=baseline)


def single_calls(gateway: Gateway, *, rounds: int) -> Iterator[Latency]:
    """The calls of everyday, on a sandbox that is there."""
    sandbox = Sandbox.create(timeout=3600, **gateway.sdk_options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "file").write_text(_CONTENT)
        sandbox.files.write("file", _CONTENT)
        yield _run_true(gateway, sandbox, folder, rounds)
        yield _in_turns(
            gateway,
            "files.exists",
            "os.stat",
            lambda: sandbox.files.exists("file"),
            lambda: os.stat(folder / "file"),
            rounds,
        )
        yield _in_turns(
            gateway,
            "files.get_info",
            "os.stat",
            lambda: sandbox.files.get_info("file"),
            lambda: os.stat(folder / "file"),
            rounds,
        )
        yield _in_turns(
            gateway,
            "files.list, 1 entry",
            "os.listdir",
            lambda: sandbox.files.list("."),
            lambda: os.listdir(folder),
            rounds,
        )
        yield _in_turns(
            gateway,
            "files.read, 1 KiB",
            "open and read",
            lambda: sandbox.files.read("file"),
            (folder / "file").read_text,
            rounds,
        )
        yield _in_turns(
            gateway,
            "files.write, 1 KiB",
            "open and write",
            lambda: sandbox.files.write("written", _CONTENT),
            lambda: (folder / "written").write_text(_CONTENT),
            rounds,
        )
    sandbox.kill()


def listing(gateway: Gateway, *, entries: int, rounds: int) -> Latency:
    """One directory of many entries, asked for by a client that does not parse the answer."""
    sandbox = gateway.create_sandbox(timeout=3600)
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
        "Content-Type": "application/json",
    }
    inside = Sandbox.connect(sandbox["sandboxID"], **gateway.sdk_options)
    inside.commands.run(f"mkdir many && cd many && seq -f file-%06g {entries} | xargs touch")

    def call() -> None:
        answer = gateway.call("POST", "/filesystem.Filesystem/ListDir", b'{"path":"many"}', headers=headers)
        if answer.body.count(b'"name"') != entries:
            raise RuntimeError(f"listing answered {answer.status}: {answer.body[:200]!r}")

    with tempfile.TemporaryDirectory() as name:
        for number in range(entries):
            (Path(name) / f"file-{number:06}").touch()
        row = _in_turns(
            gateway,
            f"list {entries} entries",
            "os.scandir and os.lstat",
            call,
            lambda: [os.lstat(entry.path) for entry in os.scandir(name)],
            rounds,
        )
    inside.kill()
    return row


def with_many_alive(gateway: Gateway, *, few: int, many: int, rounds: int) -> Latency:
    """The same call with many sandboxes alive, next to itself with few. Leaves ``many`` alive, for their memory."""
    sandboxes = [Sandbox.create(timeout=3600, **gateway.sdk_options) for _ in range(few)]
    baseline = [_timed(lambda: _true(sandboxes[0]))[1] for _ in range(_WARM_UP + rounds)][_WARM_UP:]
    sandboxes += [Sandbox.create(timeout=3600, **gateway.sdk_options) for _ in range(many - few)]
    times = [_timed(lambda: _true(sandboxes[0]))[1] for _ in range(_WARM_UP + rounds)][_WARM_UP:]
    return Latency(name=f"commands.run, {many} alive", baseline_name=f"{few} alive", rounds=times, baseline=baseline)


def _run_true(gateway: Gateway, sandbox: Sandbox, home: Path, rounds: int) -> Latency:
    """The same login shell on both sides: whose profile is long here would measure that profile."""
    plain = ["/bin/bash", "-l", "-c", "true"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return _in_turns(
        gateway,
        "commands.run('true')",
        "subprocess.run(bash -l -c true)",
        lambda: _true(sandbox),
        lambda: subprocess.run(plain, check=True, capture_output=True, env=environment),
        rounds,
    )


def _true(sandbox: Sandbox) -> None:
    sandbox.commands.run("true")


def _in_turns(
    gateway: Gateway,
    name: str,
    baseline_name: str,
    call: Callable[[], object],
    plain: Callable[[], object],
    rounds: int,
) -> Latency:
    for _ in range(_WARM_UP):
        call()
        plain()
    times: list[float] = []
    baseline: list[float] = []
    pids = list(processes_of(gateway.state_dir))
    before = processor.seconds(pids)
    for _ in range(rounds):
        times.append(_timed(call)[1])
        baseline.append(_timed(plain)[1])
    used = processor.seconds(pids) - before
    return Latency(name=name, baseline_name=baseline_name, rounds=times, baseline=baseline, processor=used)


def _timed(call: Callable[[], _Value]) -> tuple[_Value, float]:
    began = time.perf_counter()
    value = call()
    return value, time.perf_counter() - began
