"""``python -m sandgate_core`` as the front sees it: settings line, ready line, order to stop, one line on failure."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_core.locking import state_lock
from sandgate_errors import FailedPrecondition

PLUGIN = """
import asyncio, os, pathlib
from sandgate_errors import FailedPrecondition
from sandgate_plugin_api import Backend, Resources, Template, hookimpl

class Plain(Backend):
    name = "plain"
    def __init__(self, context): self.settings = context.settings
    async def open(self):
        print("a stray print", flush=True)
        if "fault" in self.settings: raise FailedPrecondition(self.settings["fault"])
        if "slow" in self.settings: await asyncio.sleep(3600)
    async def close(self): pass
    async def templates(self): return []
    def reserve(self, request): return {}
    async def create(self, request, handle): raise NotImplementedError
    async def locate(self, handle): return None
    async def survey(self): return []
    async def destroy(self, handle): pass

@hookimpl
def sandgate_register_backends(registrar): registrar.add(Plain)
"""
TOKEN = "the-internal-token-of-this-test"
KEY = "e2b_" + "ab" * 20
SEED = "5e" * 32


@pytest.fixture
def plugins(tmp_path):
    """A folder with an installed plugin, for PYTHONPATH."""
    (tmp_path / "plain_plugin.py").write_text(PLUGIN)
    info = tmp_path / "plain-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sandgate.plugins]\nplain = plain_plugin\n")
    return tmp_path


@pytest.fixture
async def start(folder, plugins):
    """Starts a core with settings changed as told; ends all that were started."""
    processes = []

    async def start(*, line: bytes | None = None, stdin=asyncio.subprocess.PIPE, **changes):
        settings = {
            "state_dir": str(folder / "state"),
            "runtime_dir": str(folder / "run"),
            "default_backend": "plain",
            "backends": {"plain": {}},
            "internal_token": TOKEN,
            "seed": SEED,
            "first_key": KEY,
            "first_key_given": True,
            "envd_version": "0.6.13",
            "log_level": "debug",
            **changes,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sandgate_core",
            stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(plugins), "GRPC_VERBOSITY": "none"},
        )  # fmt: skip
        processes.append(process)
        if process.stdin is not None:
            process.stdin.write((json.dumps(settings).encode() if line is None else line) + b"\n")
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process) -> dict:
    async with asyncio.timeout(60):
        return json.loads(await process.stdout.readline())


async def said(process, text: bytes) -> None:
    async with asyncio.timeout(60):
        while line := await process.stderr.readline():
            if text in line:
                return
    raise AssertionError(f"ended without saying {text!r}, status {await process.wait()}")


async def ended(process) -> tuple[int, str, str]:
    """Status, the rest of standard output, standard error."""
    async with asyncio.timeout(60):
        # Not `communicate`, which closes standard input since Python 3.12: the order to stop.
        out, err = await asyncio.gather(process.stdout.read(), process.stderr.read())
        return await process.wait(), out.decode(), err.decode()


async def test_serves_from_the_ready_line_on_and_ends_with_standard_input(start, folder):
    process = await start()
    assert await ready(process) == {"ready": True, "first_key_created": True}
    path = folder / "run" / "core.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        stub = sandboxes_pb2_grpc.SandboxServiceStub(channel)
        await stub.List(sandboxes_pb2.ListRequest(), metadata=[("api-key", KEY), ("request-id", "r-77")])
    process.stdin.close()
    status, out, err = await ended(process)
    assert status == 0, err
    assert out == ""
    assert not path.exists()
    lines = [json.loads(line) for line in err.splitlines() if line != "a stray print"]
    (call,) = [line for line in lines if line["event"] == "call"]
    assert (call["method"], call["outcome"], call["request_id"]) == (
        "/sandgate_api.core.v1.SandboxService/List",
        "OK",
        "r-77",
    )
    for secret in (TOKEN, KEY, SEED):
        assert secret not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_is_the_order_to_stop(start, number):
    process = await start()
    await ready(process)
    process.send_signal(number)
    status, _, err = await ended(process)
    assert status == 0, err


@pytest.mark.parametrize("order", ["end of input", "signal"])
async def test_order_to_stop_during_a_slow_start_is_obeyed(start, order):
    process = await start(backends={"plain": {"slow": True}})
    await said(process, b"stray print")
    if order == "signal":
        process.terminate()
    else:
        process.stdin.close()
    status, out, err = await ended(process)
    assert (status, out) == (0, ""), err


async def test_killed_core_can_be_started_again_at_once(start):
    process = await start()
    await ready(process)
    process.kill()
    await process.wait()
    again = await start()
    assert await ready(again) == {"ready": True, "first_key_created": False}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"default_backend": "nowhere"}, "no backend 'nowhere'; installed: "),
        ({"backends": {"plain": {"fault": "mend\nthis"}}}, "backend 'plain': mend this"),
        ({"listen": ["nonsense://x"]}, "cannot listen on nonsense://x"),
        ({"state_dir": "/proc/nowhere"}, "/proc/nowhere"),
        ({"runtime_dir": "DEEP"}, "too long for sockets"),
    ],
)
async def test_failure_to_start_is_one_line_for_the_operator(start, folder, changes, text):
    if changes.get("runtime_dir") == "DEEP":
        changes = {"runtime_dir": str(folder / ("x" * 120))}
    status, out, err = await ended(await start(**changes))
    assert status == 1
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert answer["ready"] is False
    assert text in answer["error"]
    assert "\n" not in answer["error"]
    for secret in (TOKEN, SEED, "secret"):
        assert secret not in out + err


async def test_broken_settings_line_is_an_error_line(start):
    status, out, _ = await ended(await start(line=b'{"seed": "'))
    assert status == 1
    assert json.loads(out)["ready"] is False


async def test_without_standard_input_it_does_not_start(start):
    status, out, _ = await ended(await start(stdin=asyncio.subprocess.DEVNULL))
    assert status == 1
    assert json.loads(out)["ready"] is False


async def test_taken_port_is_an_error_line(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, _ = await ended(await start(listen=[f"127.0.0.1:{port}"]))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in json.loads(out)["error"]


class TestLock:
    async def test_second_core_on_a_state_directory_is_refused_by_name_of_the_first(self, folder):
        async with state_lock(folder):
            with pytest.raises(FailedPrecondition, match=rf"another core uses .* \(pid {os.getpid()}\)"):
                async with state_lock(folder, patience=0.1):
                    pass

    async def test_waits_for_a_predecessor_that_is_still_ending(self, folder):
        async def predecessor():
            async with state_lock(folder):
                held.set()
                await asyncio.sleep(0.2)

        held = asyncio.Event()
        ending = asyncio.create_task(predecessor())
        await held.wait()
        async with state_lock(folder, patience=20):
            assert ending.done()
