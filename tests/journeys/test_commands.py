"""Commands on the whole road: traps B01 to B23 that are about processes, `sudo`, and the rules that a client sees."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    CommandHandle,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    TimeoutException,
)

from sandgate_testing.gateway import Answer, Gateway, wait_until
from sandgate_testing.raw_http import envelope

#: Leaves group, session and parent, as daemons do, and holds no pipe.
DAEMON = "(setsid sleep {seconds} >/dev/null 2>&1 &)"


@pytest.fixture(scope="module")
def sandbox(gateway: Gateway) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(timeout=1800, **gateway.sdk_options)
    yield sandbox
    sandbox.kill()


@dataclass(frozen=True)
class Wire:
    """The process service of one sandbox, called by hand."""

    gateway: Gateway
    headers: dict[str, str]

    def call(self, method: str, body: bytes, headers: dict[str, str]) -> Answer:
        return self.gateway.call("POST", f"/process.Process/{method}", body, headers={**self.headers, **headers})


@pytest.fixture(scope="module")
def wire(gateway: Gateway, sandbox: Sandbox) -> Wire:
    info = gateway.rest("POST", f"/sandboxes/{sandbox.sandbox_id}/connect", {"timeout": 1800}).json()
    return Wire(
        gateway,
        {
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": info["envdAccessToken"],
        },
    )


def frames_of(body: bytes) -> list[dict[str, Any]]:
    """The payloads of a stream in JSON."""
    found = []
    while body:
        length = int.from_bytes(body[1:5], "big")
        found.append(json.loads(body[5 : 5 + length]))
        body = body[5 + length :]
    return found


def ended(call: Callable[[], Any]) -> CommandExitException:
    with pytest.raises(CommandExitException) as caught:
        call()
    return caught.value


def runs(sandbox: Sandbox, command: str) -> bool:
    """Whether a process with this command line lives in the sandbox."""
    return sandbox.commands.run(f"pgrep -fx '{command}' || true").stdout != ""


def background(sandbox: Sandbox, command: str, **options: Any) -> CommandHandle:
    return sandbox.commands.run(command, background=True, **options)


# U9


@pytest.fixture
def sudoing(sandbox: Sandbox, isolation: str) -> Sandbox:
    if isolation == "none":
        pytest.skip("without isolation all accounts are one user")
    return sandbox


def test_user_becomes_root_by_sudo(sudoing: Sandbox) -> None:
    """U9: the line of the official SDK's test suite, and what it is good for."""
    assert sudoing.commands.run('sudo echo "$FOO"', envs={"FOO": "bar"}).stdout == "bar\n"
    assert sudoing.commands.run("id -u; sudo id -u; sudo -n -u user id -u").stdout == "1000\n0\n1000\n"
    sudoing.commands.run("sudo sh -c 'umask 077; echo secret >/root/of-root'")
    assert ended(lambda: sudoing.commands.run("cat /root/of-root")).exit_code == 1
    assert sudoing.commands.run("sudo cat /root/of-root").stdout == "secret\n"
    assert ended(lambda: sudoing.commands.run("sudo sh -c 'exit 9'")).exit_code == 9


def test_root_may_use_sudo_and_accounts_are_made_by_it(sudoing: Sandbox) -> None:
    """U5, U9."""
    assert sudoing.commands.run("sudo id -un", user="root").stdout == "root\n"
    sudoing.commands.run("sudo sh -c 'echo worker:x:1234:1234::/tmp:/bin/sh >>/etc/passwd'")
    assert sudoing.commands.run("id -u", user="worker").stdout == "1234\n"
    assert sudoing.commands.run("sudo id -un", user="worker").stdout == "root\n"


# B01, B03


def test_background_child_holds_the_call_no_longer_than_its_limit(sandbox: Sandbox) -> None:
    """B01, O8, T2, T3."""
    assert sandbox.commands.run("sleep 20 >/dev/null 2>&1 &", timeout=15).exit_code == 0
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 300 &", timeout=1)
    assert time.monotonic() - began < 60
    assert sandbox.commands.run("echo ok").stdout == "ok\n"


def test_limit_frees_what_the_command_left_in_the_background(sandbox: Sandbox) -> None:
    """B03: the list is empty, the port is free, and a daemon is gone too."""
    server = "python3 -m http.server 8124 --bind 127.0.0.1"
    handle = background(sandbox, f"{DAEMON.format(seconds=711)}; {server} & wait", timeout=3)
    with pytest.raises(TimeoutException):
        handle.wait()
    # The SDK times the stream itself, and may be a moment ahead.
    wait_until(lambda: sandbox.commands.list() == [])
    assert not runs(sandbox, server)
    assert not runs(sandbox, "sleep 711")


def test_kill_frees_what_the_command_left_in_the_background(sandbox: Sandbox) -> None:
    """B03, X9."""
    handle = background(sandbox, f"{DAEMON.format(seconds=712)}; echo up; sleep 713", timeout=0)
    next(iter(handle))
    assert handle.kill() is True
    assert ended(handle.wait).exit_code == -1
    assert not runs(sandbox, "sleep 712")
    assert ended(lambda: sandbox.commands.run(f"kill -0 {handle.pid}")).exit_code == 1
    assert handle.kill() is False


def test_background_of_a_command_that_ended_lives_on(sandbox: Sandbox) -> None:
    """B03, X7."""
    sandbox.commands.run(DAEMON.format(seconds=714))
    sandbox.commands.run("nohup sleep 715 >/dev/null 2>&1 &")
    handle = background(sandbox, "sleep 716", timeout=0)
    handle.kill()
    assert runs(sandbox, "sleep 714")
    assert runs(sandbox, "sleep 715")
    sandbox.commands.run("pkill -fx 'sleep 71[45]'")


# B05


def test_death_is_never_told_as_success(sandbox: Sandbox) -> None:
    """B05, O12, O13."""
    killed = ended(lambda: sandbox.commands.run("kill -9 $$"))
    assert killed.exit_code == -1
    assert "killed" in str(killed.error)
    assert ended(lambda: sandbox.commands.run("bash -c 'kill -9 $$'; exit $?")).exit_code == 137
    assert sandbox.commands.run("true").exit_code == 0


@pytest.mark.parametrize("part", ["sandgate_edge", "agent"])
def test_cut_stream_raises(make_gateway: Callable[..., Gateway], part: str) -> None:
    """B05, B16: the edge or the agent dies in the middle of a command; that of the core: test_endurance.py."""
    gateway = make_gateway()
    gateway.start()
    sandbox = Sandbox.create(**gateway.sdk_options)
    handle = background(sandbox, "echo a; sleep 300; echo b", timeout=0)
    assert next(iter(handle)) == ("a\n", None, None)
    if part == "agent":
        for pid in gateway.boxes()[sandbox.sandbox_id].processes():
            # The first of a namespace takes the others along.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        edge = gateway.child(part)
        assert edge is not None
        os.kill(edge, signal.SIGKILL)
    with pytest.raises(Exception) as caught:
        handle.wait()
    assert not isinstance(caught.value, (CommandExitException, AssertionError)), repr(caught.value)


# B08


async def test_cancelled_starts_leave_nothing_behind(gateway: Gateway) -> None:
    """B08: 300 starts, each left at a random moment; what runs afterwards is what the list shows."""
    sandbox = await AsyncSandbox.create(timeout=600, **gateway.sdk_options)
    box = gateway.boxes()[sandbox.sandbox_id]
    await sandbox.commands.run("true")
    before = {pid: _resources(pid) for pid in box.processes()}

    async def start_and_leave(number: int) -> None:
        task = asyncio.ensure_future(sandbox.commands.run("sleep 720", background=True, timeout=0))
        await asyncio.sleep(number * 7 % 31 / 1000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for batch in range(0, 300, 50):
        await asyncio.gather(*(start_and_leave(number) for number in range(batch, batch + 50)))
    assert (await sandbox.commands.run("echo ok")).stdout == "ok\n"
    listed = {process.pid for process in await sandbox.commands.list()}
    running = {int(pid) for pid in (await sandbox.commands.run("pgrep -fx 'sleep 720' || true")).stdout.split()}
    assert listed == running
    for pid in listed:
        await sandbox.commands.kill(pid)
    assert await sandbox.commands.list() == []
    await asyncio.to_thread(wait_until, lambda: all(_no_more(pid, then) for pid, then in before.items()))
    assert await sandbox.kill() is True


def _resources(pid: int) -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def _no_more(pid: int, then: tuple[int, int]) -> bool:
    descriptors, threads = _resources(pid)
    # The pools of gRPC and of file work grow to their size once.
    return descriptors <= then[0] + 4 and threads <= then[1] + 40


# B09, B11


def test_bytes_of_output_are_the_programs_own(sandbox: Sandbox) -> None:
    """B09, O2, O6."""
    sandbox.files.write(
        "/tmp/u.py", "import os,time\nos.write(1,b'\\xf0\\x9f');time.sleep(.3);os.write(1,b'\\x98\\x80')"
    )
    assert sandbox.commands.run("python3 /tmp/u.py").stdout == "\U0001f600"
    assert len(sandbox.commands.run("head -c 300000 /dev/urandom").stdout) > 0


def test_much_output_of_both_streams_is_complete(sandbox: Sandbox) -> None:
    """B11, O17: a full stderr does not hold stdout up."""
    sandbox.files.write(
        "/tmp/o.py",
        "import sys\nfor i in range(6000):\n sys.stdout.write('o'*999+chr(10)); sys.stderr.write('e'*332+chr(10))",
    )
    result = sandbox.commands.run("python3 /tmp/o.py", timeout=120)
    assert result.stdout == ("o" * 999 + "\n") * 6000
    assert result.stderr == ("e" * 332 + "\n") * 6000


# B14


def test_unlimited_command_is_found_again_and_a_limited_attachment_ends_alone(sandbox: Sandbox) -> None:
    """B14, T6."""
    handle = background(sandbox, "while true; do date +%s; sleep 0.2; done", timeout=0)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid, timeout=2)
    lines: list[str] = []
    with pytest.raises(TimeoutException):
        again.wait(on_stdout=lines.append)
    assert lines
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.kill(handle.pid) is True
    assert ended(lambda: sandbox.commands.connect(handle.pid).wait()).exit_code == -1
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(4_000_000)


# B16


def test_calls_end_when_their_sandbox_is_killed(gateway: Gateway) -> None:
    """B16: a command, a terminal, an attachment; each raises, and soon."""
    sandbox = Sandbox.create(**gateway.sdk_options)
    first = background(sandbox, "sleep 730", timeout=0)
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    attached = sandbox.commands.connect(first.pid, timeout=0)
    outcomes: list[BaseException | None] = []

    def wait_for(handle: CommandHandle) -> None:
        try:
            handle.wait()
        except BaseException as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    threads = [threading.Thread(target=wait_for, args=(handle,)) for handle in (first, terminal, attached)]
    for thread in threads:
        thread.start()
    assert sandbox.kill() is True
    for thread in threads:
        thread.join(timeout=60)
    assert len(outcomes) == 3
    assert all(isinstance(error, Exception) for error in outcomes), outcomes


# Wire, users and variables


def test_user_is_the_default_and_may_be_named(sandbox: Sandbox) -> None:
    """U2, U7, U8: older SDKs name `user` themselves, newer ones name nobody."""
    assert sandbox.commands.run("id -un").stdout == "user\n"
    assert sandbox.commands.run("id -un", user="user").stdout == "user\n"
    assert sandbox.commands.run("id -un", user="root").stdout == "root\n"


def test_profile_may_change_the_environment(sandbox: Sandbox) -> None:
    """P2: commands are read by a login shell."""
    sandbox.commands.run("echo 'export OF_PROFILE=yes' >>~/.profile")
    assert sandbox.commands.run("echo $OF_PROFILE").stdout == "yes\n"


def test_variables_of_create_hold_for_every_command(gateway: Gateway) -> None:
    """P15, P17, P18."""
    sandbox = Sandbox.create(envs={"GLOBAL": "g", "BOTH": "g"}, **gateway.sdk_options)
    assert sandbox.commands.run("echo $GLOBAL $BOTH $E2B_SANDBOX", envs={"BOTH": "r"}).stdout == "g r true\n"
    assert sandbox.commands.run("echo $GLOBAL $BOTH").stdout == "g g\n"
    assert sandbox.commands.run("echo $E2B_SANDBOX_ID").stdout == f"{sandbox.sandbox_id}\n"
    sandbox.kill()


def test_headers_of_the_sdks_are_read_and_nothing_is_compressed(wire: Wire) -> None:
    """W9, W11, O14: encodings are offered, and not used; keepalives come at the asked interval; the limit is kept."""
    offers = {"Accept-Encoding": "zstd, gzip, br", "Connect-Accept-Encoding": "identity"}
    listed = wire.call("List", b"{}", {**offers, "Content-Type": "application/json"})
    assert (listed.status, "content-encoding" in listed.headers) == (200, False)
    silent = envelope({"process": {"cmd": "sleep", "args": ["600"]}, "stdin": False})
    limits = {"Keepalive-Ping-Interval": "1", "Connect-Timeout-Ms": "2500"}
    stream = wire.call("Start", silent, {**offers, **limits, "Content-Type": "application/connect+json"})
    assert not {"content-encoding", "connect-content-encoding"} & stream.headers.keys()
    frames = frames_of(stream.body)
    assert frames.count({"event": {"keepalive": {}}}) == 2
    assert frames[-1]["error"]["code"] == "deadline_exceeded"
    nobody = base64.b64encode(b"no-such-user:").decode()
    refused = wire.call("List", b"{}", {"Content-Type": "application/json", "X-Access-Token": "wrong"})
    assert refused.status == 401
    unknown = wire.call(
        "Start", silent, {"Content-Type": "application/connect+json", "Authorization": f"Basic {nobody}"}
    )
    assert frames_of(unknown.body)[-1]["error"]["code"] == "unauthenticated"


def test_first_failure_decides(wire: Wire) -> None:
    """P27: the user, then the time limit, then the working directory; the SDKs see one of them."""
    ghost = {"Authorization": "Basic " + base64.b64encode(b"ghost:").decode()}
    unreadable = {"Connect-Timeout-Ms": "soon"}
    body = envelope({"process": {"cmd": "true", "cwd": "~x"}})
    for headers, code in (
        ({**ghost, **unreadable}, "unauthenticated"),
        (unreadable, "invalid_argument"),
        ({}, "invalid_argument"),
    ):
        refused = wire.call("Start", body, {**headers, "Content-Type": "application/connect+json"})
        error = frames_of(refused.body)[-1]["error"]
        assert error["code"] == code
        assert ("timeout" in error["message"]) == (headers == unreadable)


def test_unknown_name_is_refused_on_every_route_that_carries_one(wire: Wire) -> None:
    """U3."""
    ghost = {"Authorization": "Basic " + base64.b64encode(b"ghost:").decode()}
    refused = wire.call("List", b"{}", {**ghost, "Content-Type": "application/json"})
    assert (refused.status, b"ghost" in refused.body) == (401, True)


# B17, B19, B21, B23


def test_path_of_the_call_is_honoured(sandbox: Sandbox) -> None:
    """B17, P14: login shells leave PATH as it is, and print nothing of their own."""
    for user in ("user", "root"):
        path = sandbox.commands.run("echo $PATH", user=user).stdout
        assert path.count("\n") == 1
        assert "/usr/bin" in path.strip().split(":")
    assert sandbox.commands.run("echo $PATH", envs={"PATH": "/opt/z:/usr/bin:/bin"}).stdout == "/opt/z:/usr/bin:/bin\n"


def test_working_directories_are_taken_or_refused(sandbox: Sandbox) -> None:
    """B19, P22-P26."""
    sandbox.files.make_dir("sub")
    assert sandbox.commands.run("pwd", cwd="~").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd", cwd="sub").stdout == "/home/user/sub\n"
    assert sandbox.commands.run("pwd", cwd="~", user="root").stdout == "/root\n"
    for cwd in ("/no/such", "/etc/passwd"):
        with pytest.raises(InvalidArgumentException, match=cwd):
            sandbox.commands.run("pwd", cwd=cwd)
    sandbox.commands.run("mkdir -p /tmp/closed && chmod 700 /tmp/closed", user="root")
    with pytest.raises(InvalidArgumentException, match="/tmp/closed"):
        sandbox.commands.run("pwd", cwd="/tmp/closed")


def test_terminal_speaks_utf_8(sandbox: Sandbox) -> None:
    """B21, P20."""
    seen = bytearray()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.send_stdin(terminal.pid, "locale; printf '─漢😀\\n'; exit\n".encode())
    terminal.wait(on_pty=seen.extend)
    assert "LC_ALL=C.UTF-8" in seen.decode(errors="replace")
    assert "\r\n─漢😀\r\n" in seen.decode()
    assert sandbox.commands.run("python3 -c 'print(chr(28450))'").stdout == "漢\n"


def test_terminal_ends_with_its_shell(sandbox: Sandbox, gateway: Gateway) -> None:
    """B23: although a child has it open; and no error stands in the log."""
    mark = gateway.log_size()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.send_stdin(terminal.pid, b"(sleep 740 &); exit 7\n")
    assert ended(terminal.wait).exit_code == 7
    assert [entry for entry in gateway.requests_since(mark) if entry["status"] >= 500] == []
    sandbox.commands.run("pkill -fx 'sleep 740'")


def test_keys_of_a_terminal_interrupt_and_end(sandbox: Sandbox) -> None:
    """Ctrl-C stops the program and not the shell; ctrl-D ends the shell."""
    seen = bytearray()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    waiting = threading.Thread(target=terminal.wait, kwargs={"on_pty": seen.extend})
    waiting.start()
    sandbox.pty.send_stdin(terminal.pid, b"echo be''gun; sleep 750\n")
    wait_until(lambda: b"begun" in seen)
    wait_until(lambda: runs(sandbox, "sleep 750"))
    sandbox.pty.send_stdin(terminal.pid, b"\x03")
    wait_until(lambda: not runs(sandbox, "sleep 750"))
    sandbox.pty.send_stdin(terminal.pid, b"true; echo st''atus $?\n")
    wait_until(lambda: b"status 0" in seen)
    sandbox.pty.send_stdin(terminal.pid, b"\x04")
    waiting.join(timeout=60)
    assert not waiting.is_alive()


# Stress


async def test_a_thousand_short_commands_fifty_at_a_time(gateway: Gateway, isolation: str) -> None:
    """P11: each with its own output and status; no zombie is left."""
    sandbox = await AsyncSandbox.create(timeout=900, **gateway.sdk_options)
    gate = asyncio.Semaphore(50)

    async def one(number: int) -> tuple[str, int]:
        async with gate:
            try:
                result = await sandbox.commands.run(f"echo {number}; exit {number % 3}", timeout=300)
            except CommandExitException as error:
                return error.stdout, error.exit_code
            return result.stdout, result.exit_code

    results = await asyncio.gather(*(one(number) for number in range(1000)))
    assert results == [(f"{number}\n", number % 3) for number in range(1000)]
    assert await sandbox.commands.list() == []
    if isolation != "none":
        assert (await sandbox.commands.run("ps -e -o stat= | grep -c '^Z' || true")).stdout == "0\n"
    await sandbox.kill()


async def test_many_silent_commands_hold_nobody_up(gateway: Gateway) -> None:
    """200 at once on one sandbox, each with its stream open; by two clients, as one opens no more connections than that."""
    sandbox = await AsyncSandbox.create(timeout=900, **gateway.sdk_options)
    again = await asyncio.to_thread(Sandbox.connect, sandbox.sandbox_id, **gateway.sdk_options)
    handles = [await sandbox.commands.run("sleep 760", background=True, timeout=0) for _ in range(120)]
    others = [await asyncio.to_thread(background, again, "sleep 761", timeout=0) for _ in range(80)]
    assert len(await sandbox.commands.list()) == 200
    assert (await sandbox.commands.run("echo ok")).stdout == "ok\n"
    await sandbox.kill()
    outcomes = await asyncio.gather(
        *(handle.wait() for handle in handles),
        *(asyncio.to_thread(handle.wait) for handle in others),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, Exception) for outcome in outcomes)


def test_large_command_lines_and_variables(sandbox: Sandbox) -> None:
    """P21: nothing is expanded, cut or quoted; what the kernel does not take is said to be too long."""
    values = {"A": "line\nline", "B": "'\"$HOME`id`\\", "C": "x" * 100_000, "D": "漢"}
    script = "import os,json; print(json.dumps({name: os.environ[name] for name in 'ABCD'}))"
    sandbox.files.write("/tmp/env.py", script)
    assert json.loads(sandbox.commands.run("python3 /tmp/env.py", envs=values).stdout) == values
    assert sandbox.commands.run(f"printf %s {'y' * 100_000} | wc -c").stdout.strip() == "100000"
    for options in ({"cmd": "true " + "y" * (1 << 20)}, {"cmd": "true", "envs": {"A": "x" * (4 << 20)}}):
        with pytest.raises(InvalidArgumentException, match="too long"):
            sandbox.commands.run(**options)
    many = {f"V{number}": "x" * 1000 for number in range(1000)}
    assert sandbox.commands.run("env | grep -c '^V[0-9]*=x'", envs=many).stdout == "1000\n"


def test_program_that_never_reads_holds_up_its_own_writer_only(sandbox: Sandbox) -> None:
    """A15, A23."""
    deaf = background(sandbox, "sleep 770", stdin=True, timeout=0)
    failures: list[BaseException] = []

    def write() -> None:
        try:
            sandbox.commands.send_stdin(deaf.pid, "x" * 1_000_000, request_timeout=60)
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert sandbox.commands.run("cat", background=True, stdin=True, timeout=0).kill() is True
    assert sandbox.commands.run("echo ok").stdout == "ok\n"
    assert writer.is_alive()
    deaf.kill()
    writer.join(timeout=60)
    assert not writer.is_alive()
    assert len(failures) == 1


# Extension fields in Connect JSON


def test_extension_fields_pass_in_json(wire: Wire) -> None:
    """X11, behaviour.md 15.2: replay by number, for a client that speaks Connect with JSON."""

    def events(method: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        reply = wire.call(method, envelope(message), {"Content-Type": "application/connect+json"})
        return [frame["event"] for frame in frames_of(reply.body) if "event" in frame]

    script = "for i in 1 2 3; do echo $i; sleep 0.2; done"
    begin = {"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False, "killTree": True, "termGrace": "5s"}
    first = events("Start", begin)
    assert first[0]["start"]["seq"] == "1"
    assert [event["data"]["seq"] for event in first if "data" in event] == ["1", "2", "3"]
    again = events("Connect", {"process": {"pid": first[0]["start"]["pid"]}, "fromSeq": "2"})
    assert again[0]["start"]["seq"] == "2"
    assert [base64.b64decode(event["data"]["stdout"]) for event in again if "data" in event] == [b"2\n", b"3\n"]
    assert again[0]["start"]["incarnation"] == first[0]["start"]["incarnation"]
