"""Sandboxes outlive the processes of the gateway, and nothing outlives the gateway that is not meant to.

Every command here waits for a file before it goes on, so that what happens in between is not a matter of time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from e2b import CommandExitException, CommandHandle, Sandbox

from sandgate_testing.gateway import Gateway, wait_until
from sandgate_testing.leftovers import processes_of

MakeGateway = Callable[..., Gateway]

WAITING = 'echo "before"; until [ -e go-on ]; do sleep 0.05; done; echo "after"; exit 7'


@pytest.fixture
def running(make_gateway: MakeGateway) -> Gateway:
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    return gateway


def start_waiting(sandbox: Sandbox) -> CommandHandle:
    """A command that has begun and said so; its stream stays open."""
    handle = sandbox.commands.run(WAITING, background=True, timeout=0)
    assert next(iter(handle)) == ("before\n", None, None)
    return handle


def read_the_rest(gateway: Gateway, sandbox: Sandbox, pid: int) -> CommandExitException:
    """Attaches to the command as a client does that knows no more than two numbers, and lets it go on."""
    again = Sandbox.connect(sandbox.sandbox_id, **gateway.sdk_options)
    assert pid in [process.pid for process in again.commands.list()]
    attached = again.commands.connect(pid, timeout=60)
    again.files.write("go-on", "")
    with pytest.raises(CommandExitException) as ended:
        attached.wait()
    return ended.value


def test_command_outlives_a_killed_core(running: Gateway) -> None:
    sandbox = Sandbox.create(metadata={"kept": "yes"}, envs={"A": "1"}, **running.sdk_options)
    handle = start_waiting(sandbox)
    running.wait_for_new_core(running.kill_core())
    ended = read_the_rest(running, sandbox, handle.pid)
    assert (ended.exit_code, ended.stdout) == (7, "after\n")
    info = sandbox.get_info()
    assert (info.metadata, info.state.value) == ({"kept": "yes"}, "running")
    assert sandbox.commands.run("echo $A").stdout == "1\n"
    assert sandbox.kill() is True


def test_open_stream_does_not_notice_a_killed_core(running: Gateway, pytestconfig: pytest.Config) -> None:
    """The core is not on the way of a command's output, only of the question where its sandbox is."""
    if pytestconfig.getoption("--backend") == "opensandbox":
        pytest.skip("the tunnels to these agents are the core's")
    sandbox = Sandbox.create(**running.sdk_options)
    handle = start_waiting(sandbox)
    running.wait_for_new_core(running.kill_core())
    sandbox.files.write("go-on", "")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (7, "before\nafter\n")


def test_command_outlives_a_stopped_gateway(running: Gateway) -> None:
    sandbox = Sandbox.create(**running.sdk_options)
    handle = start_waiting(sandbox)
    running.stop()
    running.start()
    ended = read_the_rest(running, sandbox, handle.pid)
    assert (ended.exit_code, ended.stdout) == (7, "after\n")
    # The token is a function of the id: the client of before needs no new one (S9).
    assert sandbox.commands.run("echo same token").stdout == "same token\n"


def test_command_outlives_a_killed_gateway(running: Gateway) -> None:
    sandbox = Sandbox.create(**running.sdk_options)
    handle = start_waiting(sandbox)
    core = running.child("sandgate_core")
    running.stop(hard=True)
    # The children of a front that is gone must go too, or the next start would find port and store taken.
    wait_until(lambda: core not in processes_of(running.state_dir))
    running.start()
    ended = read_the_rest(running, sandbox, handle.pid)
    assert (ended.exit_code, ended.stdout) == (7, "after\n")


def test_killed_edge_is_replaced(running: Gateway) -> None:
    edge = running.child("sandgate_edge")
    assert edge is not None
    sandbox = Sandbox.create(**running.sdk_options)
    os.kill(edge, signal.SIGKILL)
    wait_until(lambda: running.child("sandgate_edge") not in {None, edge})
    assert sandbox.commands.run("echo served").stdout == "served\n"


def test_kept_sandbox_is_all_that_a_stopped_gateway_leaves(running: Gateway) -> None:
    kept = Sandbox.create(**running.sdk_options)
    killed = Sandbox.create(**running.sdk_options)
    assert killed.kill() is True
    running.stop()
    boxes = running.boxes()
    assert boxes.keys() == {kept.sandbox_id}
    assert boxes[kept.sandbox_id].processes()
    left = processes_of(running.state_dir).values()
    assert not [line for line in left if "sandgate_core" in line or "sandgate_edge" in line or "serve" in line]


def test_gateway_that_kills_on_exit_leaves_nothing(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(on_exit="kill")
    gateway.start()
    sandboxes = [Sandbox.create(**gateway.sdk_options) for _ in range(2)]
    for sandbox in sandboxes:
        # What tries hardest to stay: a session of its own, deaf to signals.
        sandbox.commands.run("trap '' TERM HUP INT; setsid sleep 1000 >/dev/null 2>&1 &", timeout=20)
        start_waiting(sandbox)
    gateway.stop()
    assert gateway.remains() == []


def test_killed_sandbox_leaves_nothing(running: Gateway) -> None:
    """C34 and B40: when kill has answered, it is over."""
    sandbox = Sandbox.create(**running.sdk_options)
    box = running.boxes()[sandbox.sandbox_id]
    sandbox.commands.run("setsid sleep 1000 >/dev/null 2>&1 &")
    start_waiting(sandbox)
    assert box.processes()
    assert sandbox.kill() is True
    assert box.processes() == {}
    assert not box.exists()
