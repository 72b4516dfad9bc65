"""Pauses on a whole gateway, with the official SDK: storms, streams, clocks (traps B42, B44, B45; behaviour.md T11, C46, C47)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from e2b import CommandExitException, Sandbox, SandboxException
from e2b.sandbox.commands.command_handle import CommandResult

from sandgate_testing.gateway import Gateway, wait_until

#: Seconds; the storm of the trap lasts longer, the faults it is for show within the first hundred rounds.
STORM = 6.0


@pytest.fixture
def sandbox(gateway: Gateway) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300, **gateway.sdk_options)
    yield box
    box.kill()


def api(gateway: Gateway) -> dict[str, str]:
    return {name: value for name, value in gateway.sdk_options.items() if name != "sandbox_url"}


def in_background(call: Callable[[], CommandResult]) -> tuple[threading.Thread, list[object]]:
    """Runs ``call``; its result or its exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_storm_of_pauses_and_connects_ends_well(gateway: Gateway, sandbox: Sandbox) -> None:
    """B42: no answer but success and "already"; what was acknowledged last holds."""
    stop = time.monotonic() + STORM
    wrong: list[str] = []

    def client(number: int) -> None:
        shape = random.Random(number)
        while time.monotonic() < stop:
            try:
                if shape.random() < 0.5:
                    Sandbox.pause(sandbox.sandbox_id, **api(gateway))
                else:
                    Sandbox.connect(sandbox.sandbox_id, timeout=300, **api(gateway))
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    again = Sandbox.connect(sandbox.sandbox_id, timeout=300, **gateway.sdk_options)
    assert again.commands.run("echo ok").stdout == "ok\n"
    assert again.pause() is True
    time.sleep(1)
    assert again.get_info().state.value == "paused"
    assert again.pause() is False


def test_connect_right_after_a_pause_always_works(gateway: Gateway, sandbox: Sandbox) -> None:
    # C47
    worker = sandbox.commands.run("sleep 1000", background=True, timeout=0)
    for _ in range(30):
        assert sandbox.pause() is True
        sandbox.connect(timeout=300)
    assert worker.pid in [process.pid for process in sandbox.commands.list()]


def test_command_goes_on_over_a_pause_and_its_stream_with_it(sandbox: Sandbox) -> None:
    script = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done"
    thread, outcome = in_background(lambda: sandbox.commands.run(script, timeout=60))
    time.sleep(1)
    assert sandbox.pause() is True
    time.sleep(3)
    sandbox.connect(timeout=300)
    thread.join(60)
    (result,) = outcome
    assert isinstance(result, CommandResult), result
    assert result.stdout == "".join(f"{number}\n" for number in range(1, 7))


def test_time_limit_of_a_command_stands_still_over_a_pause(sandbox: Sandbox) -> None:
    """T11. The SDK times its own stream by the same limit, so the command is watched by what it writes."""
    script = "for i in 1 2 3 4 5 6; do echo $i >> lines; sleep 0.5; done"
    sandbox.commands.run(script, background=True, timeout=6)
    time.sleep(1)
    assert sandbox.pause() is True
    time.sleep(7)
    sandbox.connect(timeout=300)
    deadline = time.monotonic() + 30
    while (lines := sandbox.files.read("lines").split()) != ["1", "2", "3", "4", "5", "6"]:
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)


def test_pause_of_the_files_ends_a_running_command_with_a_clear_error(sandbox: Sandbox) -> None:
    thread, outcome = in_background(lambda: sandbox.commands.run("sleep 100", timeout=0))
    wait_until(sandbox.commands.list)
    assert sandbox.pause(keep_memory=False) is True
    thread.join(60)
    (error,) = outcome
    assert isinstance(error, SandboxException), error
    assert not isinstance(error, CommandExitException)


def test_clock_is_right_and_sleepers_wake_after_a_pause(sandbox: Sandbox) -> None:
    # B45, H8
    sleeper = sandbox.commands.run("sleep 2; echo awake", background=True, timeout=60)
    assert sandbox.pause() is True
    time.sleep(3)
    sandbox.connect(timeout=300)
    before = time.time()
    inside = float(sandbox.commands.run("date +%s.%N").stdout)
    assert before - 1 < inside < time.time() + 1
    assert sleeper.wait().stdout == "awake\n"


def test_server_inside_answers_after_a_pause(sandbox: Sandbox) -> None:
    """B45, from within: the port of before the pause and a new one."""
    serve = "python3 -m http.server {port} --bind 127.0.0.1"
    ask = "curl -sS -o /dev/null -m 5 --retry 20 --retry-delay 1 --retry-connrefused -w '%{{http_code}}' http://127.0.0.1:{port}/"
    sandbox.commands.run(serve.format(port=8125), background=True, timeout=0)
    assert sandbox.commands.run(ask.format(port=8125)).stdout == "200"
    assert sandbox.pause() is True
    sandbox.connect(timeout=300)
    sandbox.commands.run(serve.format(port=8126), background=True, timeout=0)
    assert sandbox.commands.run(ask.format(port=8125)).stdout == "200"
    assert sandbox.commands.run(ask.format(port=8126)).stdout == "200"


def test_boot_id_tells_whether_it_was_started_anew(sandbox: Sandbox, isolation: str) -> None:
    # C40
    if isolation != "bubblewrap":
        pytest.skip("the boot id is the machine's, and only a mount namespace of the gateway's own can cover it")
    read = "cat /proc/sys/kernel/random/boot_id"
    first = sandbox.commands.run(read).stdout
    assert first == sandbox.commands.run(read, user="root").stdout
    sandbox.pause()
    sandbox.connect(timeout=300)
    assert sandbox.commands.run(read).stdout == first
    sandbox.pause(keep_memory=False)
    sandbox.connect(timeout=300)
    assert sandbox.commands.run(read).stdout not in {first, ""}


def test_sandbox_paused_by_a_gateway_that_went_away_is_resumed_by_the_next(
    make_gateway: Callable[..., Gateway],
) -> None:
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    box = Sandbox.create(timeout=300, **gateway.sdk_options)
    worker = box.commands.run("sleep 1000", background=True, timeout=0)
    assert box.pause() is True
    gateway.stop()
    gateway.start()
    again = Sandbox.connect(box.sandbox_id, timeout=300, **gateway.sdk_options)
    assert worker.pid in [process.pid for process in again.commands.list()]
    again.kill()
    gateway.stop()
