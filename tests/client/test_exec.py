"""``sandgate sandbox create, exec, attach, ps, kill-process``: a command in a sandbox as if it ran here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandgate import Sandbox
from sandgate_testing.gateway import Gateway, wait_until

_PROGRAM = Path(sys.executable).parent / "sandgate"
_PATIENCE = 60


class Line:
    """The command line of one gateway, and one sandbox of it."""

    def __init__(self, gateway: Gateway) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDGATE_", "E2B_"))}
        self.environment = {**kept, "SANDGATE_STATE_DIR": str(gateway.state_dir)}
        self.started: list[subprocess.Popen[bytes]] = []
        self.id = self.run("create").stdout.strip().decode()

    def command(self, *arguments: str) -> list[str]:
        return [str(_PROGRAM), "sandbox", *arguments]

    def run(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = self.command(*arguments)
        return subprocess.run(
            command, env=self.environment, input=given, capture_output=True, timeout=_PATIENCE, check=False
        )

    def popen(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """What a test that failed has left."""
        for process in self.started:
            process.kill()
            process.wait()
            for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
                with contextlib.suppress(OSError):
                    stream.close()

    def in_sandbox(self, *words: str, options: tuple[str, ...] = (), given: bytes = b""):
        return self.run("exec", *options, self.id, "--", *words, given=given)

    def processes(self) -> list[dict]:
        return json.loads(self.run("ps", self.id, "--json").stdout)


@pytest.fixture
def line(gateway: Gateway) -> Iterator[Line]:
    line = Line(gateway)
    yield line
    line.close()
    assert line.run("kill", line.id).returncode == 0


def test_streams_and_status_are_the_commands(line):
    result = line.in_sandbox("sh", "-c", "printf 'a\\0\\377'; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.returncode) == (b"a\0\xff", b"err\n", 7)


def test_words_reach_the_program_as_they_are(line):
    result = line.in_sandbox("printf", "%s|", "a b", "$HOME", "*", "--help", "-n", "é")
    assert result.stdout.decode() == "a b|$HOME|*|--help|-n|é|"


def test_options_are_kept(line):
    options = ("--env", "X=a=b\n", "--env", "Y=", "--cwd", "/tmp", "--user", "root")
    result = line.in_sandbox("sh", "-c", 'printf "%s,%s," "$X" "$Y"; pwd; id -un', options=options)
    assert result.stdout == b"a=b\n,,/tmp\nroot\n"


def test_input_is_piped_whole(line):
    data = os.urandom(3_000_000)
    assert line.in_sandbox("cat", given=data).stdout == data


def test_a_program_that_stops_reading_stops_nothing_else(line):
    result = line.in_sandbox("head", "-c", "3", given=b"abc" * 1_000_000)
    assert (result.stdout, result.returncode) == (b"abc", 0)


def test_input_can_be_left_alone(line):
    reader, writer = os.pipe()
    try:
        os.write(writer, b"kept")
        process = line.popen("exec", "--no-stdin", line.id, "--", "cat", stdin=reader)
        assert process.communicate(timeout=_PATIENCE)[0] == b""
        assert os.read(reader, 10) == b"kept"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_no_trouble(line, closed):
    command = f"{_PROGRAM} sandbox exec {line.id} -- sh -c 'cat; echo out; echo err >&2; exit 4' {closed}"
    shell = ["sh", "-c", command]
    result = subprocess.run(
        shell, env=line.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
    )
    assert result.returncode == 4
    assert b"Traceback" not in result.stderr


def test_output_arrives_while_the_command_runs(line):
    process = line.popen("exec", line.id, "--", "sh", "-c", "echo now; exec cat", stdin=subprocess.PIPE)
    assert process.stdout.readline() == b"now\n"
    assert process.communicate(b"later", timeout=_PATIENCE)[0] == b"later"
    assert process.returncode == 0


def test_a_reader_that_leaves_ends_the_command(line):
    process = line.popen("exec", line.id, "--", "sh", "-c", "while :; do echo y; done")
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(_PATIENCE) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    wait_until(lambda: line.processes() == [])


def test_output_that_cannot_be_written_ends_the_command_with_one_line(line):
    command = line.command("exec", line.id, "--", "sh", "-c", "echo out; exec sleep 600")
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            command,
            env=line.environment,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=_PATIENCE,
            check=False,
        )
    assert result.returncode == 125
    assert result.stderr == b"sandgate: the output could not be written: No space left on device\n"
    wait_until(lambda: line.processes() == [])


def test_the_time_limit_has_a_status_of_its_own(line):
    result = line.in_sandbox("sleep", "60", options=("--timeout", "0.5"))
    assert result.returncode == 124
    assert b"time limit" in result.stderr


def test_death_by_a_signal_is_128_and_the_signal(line):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1):
        assert line.in_sandbox("sh", "-c", f"kill -{number.value} $$").returncode == 128 + number


def test_what_is_not_there_has_the_statuses_of_a_shell(line):
    assert line.in_sandbox("nonesuch").returncode == 127


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("exec", "inonesuch", "--", "true"), "inonesuch"),
        (("exec", "--cwd", "/nope", "ID", "--", "true"), "/nope"),
        (("exec", "--user", "nobody-such", "ID", "--", "true"), "nobody-such"),
        (("attach", "ID", "4194000"), "4194000"),
    ],
)
def test_our_own_failures_are_status_125_and_one_line(line, arguments, expected):
    result = line.run(*(line.id if argument == "ID" else argument for argument in arguments))
    assert result.returncode == 125
    assert result.stderr.decode().startswith("sandgate: ")
    assert result.stderr.count(b"\n") == 1
    assert expected in result.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("exec", "ID"),
        ("exec", "--env", "X", "ID", "--", "true"),
        ("exec", "--tty", "ID", "--", "true"),
        ("exec", "--tty", "--background", "ID", "--", "true"),
        ("exec", "--timeout", "-1", "ID", "--", "true"),
        ("attach", "ID", "0"),
        ("kill-process", "ID"),
        ("create", "--timeout", "0"),
        ("create", "--metadata", "x"),
    ],
)
def test_mistakes_in_the_call_are_status_2(line, arguments):
    result = line.run(*(line.id if argument == "ID" else argument for argument in arguments))
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1, result.stderr


def test_without_a_gateway_one_line_says_so(line, gateway, tmp_path):
    line.environment["SANDGATE_STATE_DIR"] = str(tmp_path)
    result = line.in_sandbox("true")
    assert result.returncode == 125
    assert b"no gateway is running" in result.stderr
    assert line.run("ps", line.id).returncode == 1
    line.environment["SANDGATE_STATE_DIR"] = str(gateway.state_dir)


def test_the_first_interrupt_asks_and_the_second_kills(line):
    script = "trap 'echo asked' TERM; echo on; while :; do sleep 0.05; done"
    process = line.popen("exec", line.id, "--", "sh", "-c", script)
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"asked\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=_PATIENCE)
    assert process.returncode == 128 + signal.SIGKILL
    assert line.processes() == []


def test_an_interrupted_command_ends(line):
    process = line.popen("exec", line.id, "--", "sh", "-c", "echo on; exec sleep 60")
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=_PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM


def test_an_interrupt_while_the_program_takes_no_input_still_works(line):
    process = line.popen("exec", line.id, "--", "sh", "-c", "echo on; exec sleep 60", stdin=subprocess.PIPE)
    assert process.stdout.readline() == b"on\n"
    os.set_blocking(process.stdin.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while os.write(process.stdin.fileno(), bytes(65536)):
            pass
    process.send_signal(signal.SIGINT)
    assert process.wait(_PATIENCE) == 128 + signal.SIGTERM


def test_a_background_command_is_listed_attached_to_and_killed(line):
    started = line.in_sandbox("sh", "-c", "read x; echo $x; exec sleep 60", options=("--background", "--tag", "svc"))
    pid = int(started.stdout)
    (process,) = line.processes()
    assert (process["pid"], process["tag"], process["cmd"]) == (pid, "svc", "sh")
    assert "envs" not in process
    table = line.run("ps", line.id).stdout.decode().splitlines()
    assert table[0].split() == ["PID", "KIND", "TAG", "COMMAND"]
    assert table[1].split()[0] == str(pid)
    both = line.run("kill-process", line.id, str(pid), "4194000")
    assert both.returncode == 1
    assert b"4194000" in both.stderr
    assert line.processes() == []


def test_attach_follows_to_the_end(line):
    script = "echo before; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo after; exit 5"
    pid = line.in_sandbox("sh", "-c", script, options=("--background",)).stdout.strip().decode()
    wait_until(lambda: line.processes() != [])
    process = line.popen("attach", "--replay", line.id, pid)
    assert process.stdout.readline() == b"before\n"
    line.in_sandbox("touch", "/tmp/go")
    assert process.communicate(timeout=_PATIENCE)[0] == b"after\n"
    assert process.returncode == 5


def test_attach_leaves_the_process_running_when_interrupted(line):
    pid = line.in_sandbox("sh", "-c", "echo on; exec sleep 60", options=("--background",)).stdout.strip().decode()
    process = line.popen("attach", "--replay", line.id, pid)
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=_PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert [entry["pid"] for entry in line.processes()] == [int(pid)]


class Terminal:
    """A program on a terminal of ours, as a person has it."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, environment)
        self.shown = b""

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def expect(self, text: bytes) -> None:
        end = time.monotonic() + _PATIENCE
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.fd], [], [], 1)[0]:
                self.shown += self._read()

    def settings(self) -> list:
        return termios.tcgetattr(self.fd)

    def status(self) -> int:
        while data := self._read():
            self.shown += data
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return status

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 65536)
        except OSError:
            return b""


@pytest.fixture
def on_terminal(line) -> Callable[..., Terminal]:
    return lambda *arguments: Terminal(line.command(*arguments), line.environment)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_terminal_is_the_users_own(line, on_terminal):
    terminal = on_terminal("exec", "--tty", line.id, "--", "bash", "--norc", "-i")
    terminal.resize(31, 97)
    terminal.type(b"stty size\n")
    terminal.expect(b"31 97")
    terminal.resize(40, 120)
    terminal.type(b"stty size; echo [$TERM]\n")
    terminal.expect(b"40 120")
    terminal.type(b"sleep 60\n")
    terminal.expect(b"sleep 60\r\n")
    time.sleep(0.3)
    terminal.type(b"\x03")
    terminal.type(b"echo status=$?\n")
    terminal.expect(b"status=130")
    terminal.type(b"exit 6\n")
    assert terminal.status() == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_terminal_can_be_attached_to_and_left(line, on_terminal, gateway):
    with contextlib.closing(Sandbox(line.id, state_dir=gateway.state_dir)) as box:
        shell = box.pty.create(timeout=0)
        shell.disconnect()
        terminal = on_terminal("attach", line.id, str(shell.pid))
        terminal.expect(b"leaves it")
        terminal.type(b"echo got-$((40+2))\n")
        terminal.expect(b"got-42")
        terminal.type(b"\x1d")
        assert terminal.status() == 0
        assert [process.pid for process in box.commands.list()] == [shell.pid]
