"""``sudo`` in a sandbox: behaviour.md U9. Who asks is a process of the sandbox, well-meaning or not."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from sandgate_agent import frames
from sandgate_agent.sudo import Options, Refused
from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.agent_process import Agent, an_agent, code_of, eventually, gone

PTY = process_pb2.PTY(size=process_pb2.PTY.Size(cols=91, rows=27))


@contextlib.asynccontextmanager
async def a_sudoer(identity: str) -> AsyncIterator[Agent]:
    """An agent with sudo; commands run as its unprivileged user unless said otherwise."""
    async with an_agent(identity, sudo=True) as agent:
        program = agent.folder / "sudo/bin/sudo"
        if "/usr/" not in sys.executable:
            # The interpreter of the tests may lie in somebody's home, which no sandbox has.
            program.write_text(program.read_text().replace(sys.executable, "/usr/bin/python3"))
        yield agent


@pytest.fixture(params=["switch", "nested"])
async def sudoer(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    async with a_sudoer(request.param) as agent:
        yield agent


@pytest.fixture
async def switching_sudoer() -> AsyncIterator[Agent]:
    async with a_sudoer("switch") as agent:
        yield agent


async def test_user_becomes_root_without_a_password(sudoer: Agent) -> None:
    """U9, with the line of the SDK's own test suite."""
    assert (await sudoer.sh("id -u")).text == "65534\n"
    result = await sudoer.run(
        "/bin/bash",
        "-l",
        "-c",
        f'PATH={sudoer.folder}/sudo/bin:$PATH; sudo echo "$FOO"; sudo id -u',
        envs={"FOO": "bar"},
    )
    assert (result.text, result.stderr, result.exit_code) == ("bar\n0\n", b"", 0)


async def test_command_is_found_first_on_the_path(sudoer: Agent) -> None:
    """P12: the folder of the program comes first, the rest is as the agent has it."""
    assert (await sudoer.sh("echo $PATH; command -v sudo")).text == (
        f"{sudoer.folder}/sudo/bin:{os.environ['PATH']}\n{sudoer.folder}/sudo/bin/sudo\n"
    )


async def test_exit_status_output_and_input_pass(sudoer: Agent) -> None:
    result = await sudoer.sh("printf abc | sudo sh -c 'cat; echo err >&2; exit 7'")
    assert (result.text, result.stderr, result.exit_code) == ("abc", b"err\n", 7)
    assert (await sudoer.sh("sudo sh -c 'kill -9 $$'; echo $?")).text == "137\n"
    assert (await sudoer.run("sudo", "sh", "-c", "kill -15 $$")).end.status == "signal: terminated"  # type: ignore[union-attr]


async def test_words_that_are_not_utf_8_arrive_as_they_are(sudoer: Agent) -> None:
    result = await sudoer.sh("sudo printf '%s|' \"$(printf '\\377\\376')\" 'a  b' '$HOME' '' '漢' | od -An -c")
    assert (
        await sudoer.sh("printf '%s|' \"$(printf '\\377\\376')\" 'a  b' '$HOME' '' '漢' | od -An -c")
    ).text == result.text


async def test_working_directory_is_the_callers(sudoer: Agent) -> None:
    assert (await sudoer.sh("mkdir -p 'my dir' && cd 'my dir' && sudo pwd")).text == f"{sudoer.home}/my dir\n"


async def test_variables_are_those_of_the_target(sudoer: Agent) -> None:
    script = "export LANG=C.UTF-8 SECRET=1 KEPT=2; sudo --preserve-env=KEPT ADDED=3 env"
    lines = set((await sudoer.sh(script)).text.splitlines())
    assert {"HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8", "KEPT=2", "ADDED=3"} <= lines
    assert {f"SUDO_USER={sudoer.user}", "SUDO_UID=65534"} <= lines
    assert "SECRET=1" not in lines
    everything = (await sudoer.sh("SECRET=1 sudo -E env")).text.splitlines()
    assert "SECRET=1" in everything
    assert "USER=root" in everything


async def test_other_users_and_login_shells(sudoer: Agent) -> None:
    assert (
        await sudoer.sh("sudo -u daemon id -un; sudo --user=daemon id -un; sudo -u '#1' id -un", user="root")
    ).text == ("daemon\n" * 3)
    login = await sudoer.sh("cd /; sudo -i 'echo' 'a b' '$HOME' ; sudo -s pwd; sudo -iu root pwd")
    assert login.text == "a b /root\n/\n/root\n"


async def test_what_needs_no_command(sudoer: Agent) -> None:
    """-n, -k, -v and others that are about passwords succeed: there is none."""
    result = await sudoer.sh(
        "sudo -v && sudo -k && sudo -n true && sudo -nSk -p x -- true && sudo -l >/dev/null && echo fine"
    )
    assert result.text == "fine\n"


async def test_what_is_not_offered_says_so(sudoer: Agent) -> None:
    for line, text in {
        "-g daemon true": "option -g is not offered",
        "-u nobody-such true": "unknown user nobody-such",
        "--chroot=/x true": "option --chroot=/x is not offered",
        "-u": "option -u needs a value",
    }.items():
        result = await sudoer.sh(f"sudo {line}")
        assert (result.exit_code, text in result.stderr.decode()) == (1, True), (line, result.stderr)
    assert (await sudoer.sh("sudo no-such-command")).exit_code == 127


async def test_signals_are_passed_on(sudoer: Agent) -> None:
    script = "sudo sh -c 'trap \"echo got; exit 5\" TERM; echo up; while :; do sleep 0.05; done' & p=$!; read x; kill $p; wait $p; echo $?"
    async with sudoer.running("/bin/sh", "-c", script, stdin=True) as running:
        await running.read_until(b"up\n")
        await running.send(b"\n")
        await running.read_until(b"got\n5\n")


async def test_killed_sudo_takes_its_command_along(sudoer: Agent) -> None:
    async with sudoer.running(
        "/bin/sh", "-c", "sudo sh -c 'echo $$; exec sleep 600' & read x; kill -9 $!", stdin=True
    ) as running:
        pid = int(await running.read_until(b"\n"))
        await running.send(b"\n")
        await eventually(lambda: gone(pid))


async def test_killed_command_takes_what_it_did_as_root_along(sudoer: Agent) -> None:
    """B03: a daemon that root started for the command is of its family."""
    script = "sudo sh -c \"(setsid sh -c 'echo \\$\\$; exec sleep 600' &)\"; sleep 601"
    async with sudoer.running("/bin/sh", "-c", script) as running:
        pid = int(await running.read_until(b"\n"))
        await running.signal(9)
        await running.rest()
        await eventually(lambda: gone(pid))


async def test_terminal_of_its_own(sudoer: Agent) -> None:
    """Size, echo, keys that send signals, and the caller's settings afterwards."""
    async with sudoer.running("/bin/bash", "--norc", "-i", pty=PTY, envs={"TERM": "xterm", "PS1": "$"}) as running:
        await running.send(b"sudo bash --norc -c 'stty size; tty; id -u; read x; echo got:$x; sleep 600'\n", pty=True)
        seen = await running.read_until(b"\r\n0\r\n")
        assert b"27 91" in seen
        assert b"/dev/pts/" in seen
        await running.send(b"word\n", pty=True)
        await running.read_until(b"got:word")
        await running.send(b"\x03", pty=True)
        # What is typed before the command has ended is the command's.
        await running.read_until(b"$")
        await running.send(b"echo status $?; stty -a | grep -o ' icanon'\n", pty=True)
        assert b" icanon" in await running.read_until(b"status 130\r\n icanon")
        size = process_pb2.PTY(size=process_pb2.PTY.Size(cols=133, rows=40))
        await running.send(b"sudo bash --norc -c 'echo up; read x; stty size'\n", pty=True)
        await running.read_until(b"up\r\n")
        await sudoer.processes.Update(
            process_pb2.UpdateRequest(process=running.selector, pty=size), metadata=sudoer.metadata()
        )
        await running.send(b"\n", pty=True)
        await running.read_until(b"40 133")


async def test_much_passes_through_a_terminal(sudoer: Agent) -> None:
    async with sudoer.running("/bin/sh", "-c", "stty -opost; sudo seq 200000; echo over", pty=PTY) as running:
        result = await running.rest()
        assert result.pty.replace(b"\r", b"").endswith(b"\n200000\nover\n")
        assert result.pty.replace(b"\r", b"") == b"".join(b"%d\n" % n for n in range(1, 200001)) + b"over\n"


async def test_ended_sessions_leave_nothing(sudoer: Agent) -> None:
    await sudoer.sh("sudo true")
    before = sudoer.descriptors()
    await asyncio.gather(*(sudoer.sh("sudo true; sudo sh -c 'exit 1'") for _ in range(15)))
    await eventually(lambda: sudoer.descriptors() <= before)


def ask(agent: Agent, data: bytes, fds: list[int] | None = None) -> bytes:
    """Bytes to the agent's socket as any process may send them; the answer until the agent closes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(15)
        sock.connect(f"{agent.folder}/sudo/sudo.sock")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                answer += part
        return answer


@contextlib.contextmanager
def null_device() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


GOOD = {"user": "root", "argv": ["true"], "env": {}, "cwd": "/"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        b"\0\0\0\2\0[]",
        b"\0\0\0\2\0{}",
        b'\0\0\0\5\0{"a":',
        b"\0\1\x86\xa0\0" + b"[" * 100_000,
        b"\xff\xff\xff\xff\0" + b"x" * 1000,
        frames.encode(GOOD),
        frames.encode({**GOOD, "argv": []}),
        frames.encode({**GOOD, "argv": "true"}),
        frames.encode({**GOOD, "argv": [1]}),
        frames.encode({**GOOD, "argv": ["a\0b"]}),
        frames.encode({**GOOD, "argv": ["\ud800"]}),
        frames.encode({**GOOD, "env": {"A=B": "1"}}),
        frames.encode({**GOOD, "env": []}),
        frames.encode({**GOOD, "cwd": None}),
        frames.encode({**GOOD, "cwd": "/no/such"}),
        frames.encode({**GOOD, "user": "no such user"}),
        frames.encode({**GOOD, "user": {"a": 1}}),
        frames.encode(GOOD, 3),
        frames.encode(GOOD, 200),
    ],
)
async def test_nonsense_is_refused_and_harms_nobody(switching_sudoer: Agent, data: bytes) -> None:
    agent = switching_sudoer
    before = agent.descriptors()
    assert b"exit" not in await asyncio.to_thread(ask, agent, data)
    with null_device() as null:
        for count in (1, 3, 7):
            await asyncio.to_thread(ask, agent, data, [null] * count)
    assert (await agent.sh("sudo echo ok")).text == "ok\n"
    await eventually(lambda: agent.descriptors() <= before + 2)


async def test_many_descriptors_are_not_collected(switching_sudoer: Agent) -> None:
    """A byte at a time, each with descriptors: the agent must not run out of its own."""
    agent = switching_sudoer
    before = agent.descriptors()
    with socket.socket(socket.AF_UNIX) as sock, null_device() as null:
        sock.connect(f"{agent.folder}/sudo/sudo.sock")
        data = frames.encode(GOOD, 3)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(60):
                part = data[number : number + 1] or b"x"
                sock.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 3))])
                await asyncio.sleep(0.002)
        assert agent.descriptors() < before + 12


async def test_those_who_only_connect_do_not_keep_others_out_for_ever(switching_sudoer: Agent) -> None:
    """As many as there are places, all silent; the agent takes calls meanwhile, and the places back."""
    agent = switching_sudoer
    idle = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for sock in idle:
            sock.connect(f"{agent.folder}/sudo/sudo.sock")
        assert (await agent.sh("echo ok")).text == "ok\n"
        assert (await agent.sh("sudo echo ok")).text == "ok\n"
    finally:
        for sock in idle:
            sock.close()


async def test_identity_without_accounts_has_no_sudo() -> None:
    with pytest.raises(AssertionError, match="sudo"):
        async with an_agent("same", sudo=True):
            pass


async def test_stopping_the_agent_ends_what_runs_as_root(sudoer: Agent) -> None:
    async with sudoer.running("/bin/sh", "-c", "sudo sh -c 'echo $$; exec sleep 600'") as running:
        pid = int(await running.read_until(b"\n"))
        sudoer.process.terminate()  # type: ignore[union-attr]
        async with code_of(grpc.StatusCode.UNAVAILABLE):
            await running.rest()
        await asyncio.to_thread(sudoer.process.wait, 5)  # type: ignore[union-attr]
        await eventually(lambda: gone(pid))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-u me id", {"user": "me", "command": ["id"]}),
        ("-ume id", {"user": "me", "command": ["id"]}),
        ("-nEu me id -u", {"user": "me", "preserve": True, "command": ["id", "-u"]}),
        ("-Hi", {"set_home": True, "login": True}),
        ("-- -x", {"command": ["-x"]}),
        ("A=1 B=x=y env C=3", {"assignments": {"A": "1", "B": "x=y"}, "command": ["env", "C=3"]}),
        ("--preserve-env=A,B --user=me x", {"preserved": {"A", "B"}, "user": "me", "command": ["x"]}),
        ("-", {"command": ["-"]}),
    ],
)
def test_options_are_read_as_sudo_reads_them(line: str, expected: dict[str, object]) -> None:
    options = Options.parse(shlex.split(line))
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize("line", ["-x", "-nx", "--no-such", "-g x id", "--login=1", "-u"])
def test_unknown_options_are_refused(line: str) -> None:
    with pytest.raises(Refused):
        Options.parse(shlex.split(line))
