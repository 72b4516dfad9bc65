"""Starting programs: behaviour.md section 3."""

from __future__ import annotations

import asyncio
import os
import stat

import grpc
import pytest

from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.agent_process import Agent, an_agent, code_of

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_output_exit_code_and_pid_are_the_programs_own(any_agent: Agent) -> None:
    """P1, P5, P32, O10."""
    result = await any_agent.sh("echo $$; echo oops >&2; exit 3")
    assert result.text == f"{result.pid}\n"
    assert result.stderr == b"oops\n"
    assert result.end is not None
    assert (result.end.exit_code, result.end.exited) == (3, True)
    assert result.end.status == result.end.error == "exit status 3"


async def test_success_has_no_error_field(agent: Agent) -> None:
    """O11."""
    result = await agent.run("true")
    assert result.end is not None
    assert result.end.status == "exit status 0"
    assert not result.end.HasField("error")


async def test_arguments_arrive_unchanged(agent: Agent) -> None:
    """P1, P21: nothing is expanded or split."""
    args = ["a b", "$HOME", "", "new\nline", "ü─😀", "'\"\\"]
    result = await agent.run("printf", "%s|", *args)
    assert result.text == "".join(f"{arg}|" for arg in args)


async def test_environment_is_built_from_nothing_in_order(any_agent: Agent) -> None:
    """P12-P17."""
    await any_agent.init(envs={"GLOBAL": "g", "BOTH": "g", "HOME": "/of-global", "E2B_SANDBOX_ID": "forged"})
    result = await any_agent.run("/usr/bin/env", envs={"BOTH": "r\n$X=1", "LOGNAME": "mine"})
    lines = result.text.split("\n")
    assert {"GLOBAL=g", "BOTH=r", "$X=1", "HOME=/of-global", "LOGNAME=mine"} <= set(lines)
    assert {f"USER={any_agent.user}", "E2B_SANDBOX=true", "E2B_SANDBOX_ID=itest", "E2B_TEMPLATE_ID=base"} <= set(lines)
    assert f"PATH={os.environ['PATH']}" in lines
    assert "SECRET_OF_THE_AGENT=1" not in lines
    names = {line.split("=")[0] for line in lines if "=" in line}
    assert names == {
        *("PATH", "HOME", "USER", "LOGNAME", "GLOBAL", "BOTH", "$X"),
        *("E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID"),
    }
    assert "BOTH=g" in (await any_agent.run("/usr/bin/env")).text.split("\n")


async def test_request_variable_wins_over_the_sandboxes_own(agent: Agent) -> None:
    """P16."""
    assert (await agent.sh("echo $E2B_SANDBOX_ID", envs={"E2B_SANDBOX_ID": "x"})).text == "x\n"


async def test_command_is_looked_up_along_the_composed_path(agent: Agent) -> None:
    """P3."""
    program = agent.home / "hello-of-test"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    assert (await agent.run("hello-of-test", envs={"PATH": f"/nowhere:{agent.home}"})).text == "found\n"


@pytest.mark.parametrize("pty", [False, True])
async def test_missing_command_is_a_process_that_ends_with_127(agent: Agent, pty: bool) -> None:
    """P4."""
    options = {"pty": process_pb2.PTY(size=process_pb2.PTY.Size(cols=80, rows=24))} if pty else {}
    for cmd in ("no-such-command", "/no/such/command"):
        result = await agent.run(cmd, **options)
        assert result.pid > 0
        assert result.exit_code == 127
        assert cmd.encode() in result.stderr + result.pty


async def test_command_that_cannot_be_executed_ends_with_126(agent: Agent) -> None:
    """P4."""
    (agent.home / "plain").write_text("not a program")
    (agent.home / "binary").write_bytes(b"\0\1\2")
    (agent.home / "binary").chmod(0o755)
    for cmd in ("./plain", "./binary", "/tmp"):
        result = await agent.run(cmd, cwd=str(agent.home))
        assert result.exit_code == 126, cmd
        assert result.stderr.startswith(cmd.encode())


async def test_too_many_arguments_are_the_callers_fault(agent: Agent) -> None:
    async with code_of(INVALID, "too long"):
        await agent.run("true", *("x" * 100_000 for _ in range(40)))
    assert (await agent.run("echo", "ok")).text == "ok\n"


@pytest.mark.parametrize(
    ("cmd", "args", "envs"),
    [
        ("", [], {}),
        ("a\0b", [], {}),
        ("echo", ["a\0b"], {}),
        ("echo", [], {"A=B": "1"}),
        ("echo", [], {"": "1"}),
        ("echo", [], {"A\0": "1"}),
        ("echo", [], {"A": "\0"}),
    ],
)
async def test_what_no_program_can_be_given_is_refused(
    agent: Agent, cmd: str, args: list[str], envs: dict[str, str]
) -> None:
    async with code_of(INVALID):
        await agent.run(cmd, *args, envs=envs)


async def test_working_directory_rules(agent: Agent) -> None:
    """P22-P24."""
    (agent.home / "sub").mkdir()
    home = str(agent.home)
    for cwd, expected in {None: home, "": home, "~": home, "sub": f"{home}/sub", "~/sub/..": home, "/": "/"}.items():
        assert (await agent.run("pwd", cwd=cwd)).text == f"{expected}\n", cwd
    await agent.init(default_workdir="/usr")
    assert (await agent.run("pwd")).text == "/usr\n"
    assert (await agent.run("pwd", cwd="sub")).text == f"{home}/sub\n"


@pytest.mark.parametrize(
    ("cwd", "text"),
    [
        ("/no/such", "cwd '/no/such' does not exist"),
        ("no/such", "/no/such' does not exist"),
        ("/etc/passwd", "cwd '/etc/passwd' is not a directory"),
        ("~root", "~root"),
        ("a\0b", "NUL"),
        ("x" * 5000, "too long"),
        ("y" * 256, "too long"),
    ],
)
async def test_bad_working_directory_is_refused_and_nothing_started(agent: Agent, cwd: str, text: str) -> None:
    """P24-P26."""
    async with code_of(INVALID, text):
        await agent.run("touch", str(agent.home / "started"), cwd=cwd)
    assert not (agent.home / "started").exists()


@pytest.mark.parametrize("identity", ["switch", "nested"])
async def test_directory_the_user_may_not_enter_is_refused(identity: str) -> None:
    """P26: the permissions of the acting user hold, not the agent's."""
    async with an_agent(identity) as agent:
        closed = agent.folder / "closed"
        closed.mkdir(mode=0o000 if identity == "nested" else 0o700)
        async with code_of(INVALID, "may not be entered by user 'nobody'"):
            await agent.run("pwd", cwd=str(closed))


async def test_first_failure_decides(agent: Agent) -> None:
    """P27."""
    async with code_of(grpc.StatusCode.UNAUTHENTICATED):
        await agent.run("true", user="ghost", timeout_ms="x", cwd="~x")
    async with code_of(INVALID, "timeout"):
        await agent.run("true", timeout_ms="x", cwd="~x")


async def test_without_stdin_a_reader_gets_end_of_file(agent: Agent) -> None:
    """P28."""
    assert (await agent.run("cat", stdin=False)).exit_code == 0


async def test_program_has_no_descriptor_but_its_three(any_agent: Agent) -> None:
    """P10."""
    result = await any_agent.sh("ls /proc/self/fd | tr '\\n' ' '")
    # The fourth is the folder that ls reads.
    assert result.text == "0 1 2 3 "


async def test_programs_start_with_ordinary_signals_umask_and_priorities(any_agent: Agent) -> None:
    """P6."""
    result = await any_agent.sh(
        "grep -E 'SigBlk|SigIgn' /proc/self/status; umask; cat /proc/self/oom_score_adj; nice; ulimit -Sn"
    )
    lines = result.text.split("\n")
    # Signals 32 and 33 are the C library's own and ignored by its posix_spawn.
    assert [int(line.split()[1], 16) & ~0x180000000 for line in lines[:2]] == [0, 0]
    assert lines[2:6] == ["0022", "100", "0", "1024"]


async def test_programs_lead_their_own_group(agent: Agent) -> None:
    """15.2: the group is what signals go to."""
    result = await agent.sh("ps -o pgid= -p $$")
    assert int(result.text) == result.pid


async def test_many_commands_run_side_by_side(agent: Agent) -> None:
    """P11."""
    results = await asyncio.gather(*(agent.sh(f"sleep 0.2; echo {number}") for number in range(50)))
    assert [result.text for result in results] == [f"{number}\n" for number in range(50)]
    assert await agent.live() == []


async def test_unknown_user_is_named(any_agent: Agent) -> None:
    """U3."""
    async with code_of(grpc.StatusCode.UNAUTHENTICATED, "ghost"):
        await any_agent.run("id", user="ghost")
    async with code_of(grpc.StatusCode.UNAUTHENTICATED):
        await any_agent.run("id", user="a\0b")


@pytest.mark.parametrize("identity", ["switch", "nested"])
async def test_commands_run_with_the_ids_of_the_acting_user(identity: str) -> None:
    """U1, U6, U8."""
    async with an_agent(identity) as agent:
        assert (await agent.sh("id -u; id -g")).text == "65534\n65534\n"
        assert (await agent.sh("id -u; id -g", user="root")).text == "0\n0\n"
        assert (await agent.sh("cat /root/x; touch /root/x", user="nobody")).exit_code != 0 or identity == "nested"


async def test_programs_of_a_user_have_no_capabilities(any_agent: Agent) -> None:
    if any_agent.identity == "same":
        pytest.skip("every account is the agent's own user")
    result = await any_agent.sh("grep -E 'CapEff|CapPrm|CapInh|CapAmb' /proc/self/status")
    assert {line.split()[1] for line in result.text.splitlines()} == {"0" * 16}


async def test_account_made_by_an_earlier_command_works_at_once(switching: Agent) -> None:
    """U5. Looked up in the system's own files, so only a name that exists here can be asked for."""
    assert (await switching.run("id", "-un", user="daemon")).text == "daemon\n"


async def test_default_user_before_init_is_root() -> None:
    """U2."""
    async with an_agent("switch") as agent:
        await agent.init(default_user="root")
        assert (await agent.run("id", "-un")).text == "root\n"


async def test_default_user_that_does_not_exist_is_named(agent: Agent) -> None:
    """U4: then nobody acts, instead of somebody else."""
    await agent.init(default_user="ghost")
    async with code_of(grpc.StatusCode.UNAUTHENTICATED, "ghost"):
        await agent.run("true")


async def test_start_is_told_before_the_program_says_anything(agent: Agent) -> None:
    """T9, P32: clients give up on a start that does not come within their request timeout."""
    async with agent.running("sleep", "60") as running:
        assert running.pid > 0


async def test_files_with_the_sandboxes_variables_are_left_alone_without_permission(agent: Agent) -> None:
    """P19 holds only where the backend allows it."""
    assert not os.path.exists("/run/e2b/.E2B_SANDBOX_ID") or stat.S_ISREG(os.stat("/run/e2b/.E2B_SANDBOX_ID").st_mode)


async def test_more_processes_than_allowed_are_refused(agent: Agent) -> None:
    """K25, X16."""
    calls = [agent.start_call("sleep", "60") for _ in range(1024)]
    try:
        await asyncio.gather(*(call.read() for call in calls))
        async with code_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024"):
            await agent.run("true")
    finally:
        for call in calls:
            call.cancel()
