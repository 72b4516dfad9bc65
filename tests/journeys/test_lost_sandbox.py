"""A sandbox that dies by itself is told as gone, and is not shown as running until its deadline."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from e2b import Sandbox, SandboxNotFoundException, TimeoutException

from sandgate_testing.gateway import Gateway, wait_until


def test_sandbox_whose_processes_died_is_gone_for_every_call(gateway: Gateway) -> None:
    sandbox = Sandbox.create(**gateway.sdk_options)
    box = gateway.boxes()[sandbox.sandbox_id]
    for pid in box.processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended with its parent
    wait_until(lambda: not box.processes())
    with pytest.raises(TimeoutException):
        sandbox.commands.run("echo served by nobody")
    assert sandbox.is_running() is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    assert not box.exists()


def test_agent_that_answers_late_is_waited_for(gateway: Gateway) -> None:
    """C3 on a machine under load: slow is not gone, even for the first connection to an agent."""
    sandbox = Sandbox.create(**gateway.sdk_options)
    stopped = list(gateway.boxes()[sandbox.sandbox_id].processes())
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    later = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in stopped])
    later.start()
    try:
        assert sandbox.files.exists("/tmp") is True
    finally:
        later.join()
        sandbox.kill()
