"""One child process, by the protocol of docs/architecture.md: its settings line, its ready line, its end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import textwrap

import pytest

from sandgate.children import Child, Kind
from sandgate.logs import Log
from sandgate_errors import Unavailable

_READY = """
    import json, sys
    settings = json.loads(sys.stdin.readline())
    print(json.dumps({"ready": True, "settings": settings}), flush=True)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a module of a source text that children can be started from."""

    def make(source: str, *, ready_within: float = 30, **more: object) -> Kind:
        (tmp_path / "the_child.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Kind(name="test", module="the_child", ready_within=ready_within, **more)

    return make


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(output) -> Log:
    return Log(form="json", stream=output)


async def test_it_gets_its_settings_and_ends_at_the_end_of_its_input(program, log):
    kind = program(_READY + "    sys.stdin.read()\n")
    async with asyncio.TaskGroup() as tasks:
        child = await Child.start(kind, {"a": [1, "é"]}, log=log, tasks=tasks)
        assert child.ready == {"ready": True, "settings": {"a": [1, "é"]}}
        assert await child.stop(grace=30)
        assert child.manner_of_end == "exit status 0"


async def test_one_that_does_not_obey_is_killed(program, log):
    kind = program(_READY + "    import time\n    time.sleep(600)\n")
    async with asyncio.TaskGroup() as tasks:
        child = await Child.start(kind, {}, log=log, tasks=tasks)
        assert not await child.stop(grace=0.1)
        assert child.manner_of_end == "killed by SIGKILL"


async def test_hurry_shortens_the_time_that_is_left(program, log):
    kind = program(_READY + "    import time\n    time.sleep(600)\n")
    hurry = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        child = await Child.start(kind, {}, log=log, tasks=tasks)
        stopping = tasks.create_task(child.stop(grace=600, hurry=hurry, hurried_grace=0.1))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        hurry.set()
        assert not await stopping


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'print(\'{"ready": false, "error": "no bubblewrap: \\\\u001b install it"}\')',
            "no bubblewrap: \\x1b install it",
        ),
        ("print('{\"ready\": false}')", "test could not start"),
        ("print('hello')", "test did not say that it is ready but: hello"),
        ("print('[1]')", "did not say that it is ready but"),
        ("print('x' * 10**6)", "did not say that it is ready"),
        ("raise SystemExit(3)", "test ended before it was ready (exit status 3)"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os, time; os.close(0); time.sleep(0.2)", "ended before it was ready"),
        ("import time; time.sleep(600)", "was not ready within 1 s"),
    ],
)
async def test_one_that_does_not_come_up_is_one_line_and_leaves_nothing(program, log, source, expected):
    kind = program(source, ready_within=1 if "600" in source else 30)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(Unavailable) as caught:
            await Child.start(kind, {"big": "x" * 300_000}, log=log, tasks=tasks)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_cancelled_start_leaves_no_process(program, log, tmp_path):
    pid_file = tmp_path / "pid"
    source = (
        f"import os, sys, pathlib\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\nsys.stdin.read()\n"
    )
    kind = program(source)
    async with asyncio.TaskGroup() as tasks:
        start = tasks.create_task(Child.start(kind, {}, log=log, tasks=tasks))
        while not pid_file.exists() or not pid_file.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        start.cancel()
    pid = int(pid_file.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_it_says_reaches_the_log_whole(program, log, output):
    source = (
        _READY
        + """
    for n in range(2000):
        print(json.dumps({"event": "line", "n": n}), file=sys.stderr)
    print("last words", file=sys.stderr, end="", flush=True)
    print("stray", flush=True)
    """
    )
    async with asyncio.TaskGroup() as tasks:
        child = await Child.start(program(source), {}, log=log, tasks=tasks)
        await child.ended()
        await child.stop(grace=0)
    lines = output.getvalue().splitlines()
    assert {"last words", "stray"} <= set(lines)
    assert [json.loads(line)["n"] for line in lines if line.startswith("{")] == list(range(2000))


async def test_what_it_leaves_behind_does_not_hold_up_its_end(program, log):
    """A grandchild that inherited the pipes is not the gateway's to wait for."""
    source = _READY + "    import subprocess\n    subprocess.Popen(['sleep', '5'])\n"
    async with asyncio.timeout(4), asyncio.TaskGroup() as tasks:
        child = await Child.start(program(source), {}, log=log, tasks=tasks)
        await child.ended()
        await child.stop(grace=0)


async def test_secrets_of_the_environment_and_other_descriptors_stay_outside(program, log, monkeypatch):
    monkeypatch.setenv("SANDGATE_API_KEY", "e2b_secret")
    source = """
    import json, os, sys
    print(json.dumps({"ready": True, "env": dict(os.environ), "fds": os.listdir("/proc/self/fd"), "path": sys.path}))
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        async with asyncio.TaskGroup() as tasks:
            kind = program(source, pass_fds=(read,), state_dir="/the/state")
            child = await Child.start(kind, {}, log=log, tasks=tasks)
            await child.stop(grace=30)
    finally:
        os.close(read)
        os.close(write)
    environment = child.ready["env"]
    assert {name for name in environment if name.startswith("SANDGATE_")} == {"SANDGATE_STATE_DIR"}
    assert str(read) in child.ready["fds"]
    assert str(write) not in child.ready["fds"]
    # The working directory may hold anything, modules named like ours included.
    assert "" not in child.ready["path"]
    assert os.getcwd() not in child.ready["path"]
    assert sys.executable
