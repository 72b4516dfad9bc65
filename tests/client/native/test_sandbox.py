"""Sandboxes, commands, terminals and files through the native client, in both its forms, on a real gateway."""

from __future__ import annotations

import asyncio
import io
import threading

import pytest

from sandgate import (
    AsyncSandbox,
    CommandExitException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Output,
    ProcessKind,
    Program,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxState,
    TimeoutException,
)
from sandgate_testing.either import done, every


async def test_a_sandbox_lives_and_ends(kind, gateway):
    async def listed():
        return [info.sandbox_id for info in await done(kind.list(metadata=metadata, state_dir=gateway.state_dir))]

    metadata = {"test": kind.__name__, "é": "=&"}
    box = await done(kind.create(state_dir=gateway.state_dir, timeout=100, metadata=metadata, envs={"A": "1\n2"}))
    try:
        info = await done(box.get_info())
        assert (info.sandbox_id, info.state, info.metadata) == (box.sandbox_id, SandboxState.RUNNING, metadata)
        assert 90 < (info.end_at - info.started_at).total_seconds() <= 100
        assert await listed() == [box.sandbox_id]
        assert (await done(box.commands.run('echo "$A"'))).stdout == "1\n2\n"
        await done(box.set_timeout(1000))
        later = await done(box.get_info())
        assert (later.end_at - info.started_at).total_seconds() > 900
        again = await done(kind.connect(box.sandbox_id, state_dir=gateway.state_dir, timeout=10))
        assert (await done(again.get_info())).end_at == later.end_at
        await done(again.close())
    finally:
        assert await done(box.kill()) is True
    assert await done(box.kill()) is False
    assert await listed() == []
    for call in (box.get_info, lambda: box.commands.run("true"), lambda: box.files.read("x")):
        with pytest.raises(NotFoundException, match=box.sandbox_id):
            await done(call())
    with pytest.raises(NotFoundException):
        await done(kind.connect(box.sandbox_id, state_dir=gateway.state_dir))
    await done(box.close())
    with pytest.raises(SandboxException, match="closed"):
        await done(box.get_info())


async def test_a_block_ends_the_sandbox(kind, gateway):
    box = await done(kind.create(state_dir=gateway.state_dir))

    async def fail_inside() -> None:
        if kind is Sandbox:
            with box:
                raise ZeroDivisionError
        async with box:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    gone = kind(box.sandbox_id, state_dir=gateway.state_dir)
    assert await done(gone.kill()) is False
    await done(gone.close())


async def test_a_key_sees_its_owners_sandboxes_only(kind, gateway, sandbox):
    mine = await done(kind.create(state_dir=gateway.state_dir, api_key=gateway.api_key))
    try:
        assert mine.sandbox_id in gateway.rest("GET", "/v2/sandboxes").body.decode()
    finally:
        await done(mine.kill())
        await done(mine.close())
    with pytest.raises(SandboxException, match="API key"):
        await done(kind.create(state_dir=gateway.state_dir, api_key="e2b_" + "0" * 40))


async def test_an_unknown_template_is_not_found(kind, gateway):
    with pytest.raises(NotFoundException, match="nonesuch"):
        await done(kind.create("nonesuch", state_dir=gateway.state_dir))


async def test_a_command_gives_its_output_and_status(sandbox):
    result = await done(sandbox.commands.run("echo out; echo err >&2"))
    assert (result.stdout, result.stderr, result.exit_code, result.truncated) == ("out\n", "err\n", 0, False)


async def test_a_failed_command_raises_with_its_output(sandbox):
    with pytest.raises(CommandExitException) as failed:
        await done(sandbox.commands.run("echo out; echo err >&2; exit 3"))
    error = failed.value
    assert (error.stdout, error.stderr, error.exit_code, error.error) == ("out\n", "err\n", 3, "exit status 3")


async def test_death_by_a_signal_is_told(sandbox):
    with pytest.raises(CommandExitException) as failed:
        await done(sandbox.commands.run("kill -KILL $$"))
    assert (failed.value.exit_code, failed.value.error) == (-1, "signal: killed")


async def test_environment_directory_and_user_are_as_asked(sandbox):
    value = "a\nb 'c' \"d\" $HOME é"
    result = await done(
        sandbox.commands.run('printf %s "$X"; pwd >&2; id -un >&2', envs={"X": value}, cwd="/tmp", user="root")
    )
    assert (result.stdout, result.stderr) == (value, "/tmp\nroot\n")


@pytest.mark.parametrize(
    "arguments", [{"cwd": "/nope"}, {"timeout": -1}, {"max_output_bytes": -1}, {"envs": {"a=b": "c"}}]
)
async def test_wrong_arguments_are_refused(sandbox, arguments):
    with pytest.raises(InvalidArgumentException):
        await done(sandbox.commands.run("true", **arguments))
    assert await done(sandbox.commands.list()) == []


async def test_callbacks_get_everything_in_order(sandbox):
    seen: list[tuple[str, str]] = []
    command = "for i in 1 2 3; do echo o$i; sleep 0.02; echo e$i >&2; sleep 0.02; done"
    result = await done(
        sandbox.commands.run(
            command, on_stdout=lambda text: seen.append(("o", text)), on_stderr=lambda text: seen.append(("e", text))
        )
    )
    assert seen == [(name, f"{name}{number}\n") for number in (1, 2, 3) for name in ("o", "e")]
    assert result.stdout == "o1\no2\no3\n"


async def test_a_callback_of_the_async_client_may_be_awaited(gateway):
    seen = []

    async def slowly(text: str) -> None:
        await asyncio.sleep(0.01)
        seen.append(text)

    async with await AsyncSandbox.create(state_dir=gateway.state_dir) as box:
        await box.commands.run("echo a; sleep 0.05; echo b", on_stdout=slowly)
    assert seen == ["a\n", "b\n"]


async def test_a_callback_that_fails_ends_the_call_and_not_the_command(sandbox):
    with pytest.raises(ZeroDivisionError):
        await done(sandbox.commands.run("echo a; exec sleep 30", on_stdout=lambda _: 1 / 0))
    (process,) = await done(sandbox.commands.list())
    assert await done(sandbox.commands.kill(process.pid)) is True


async def test_a_character_that_was_cut_in_two_is_one_for_callbacks(sandbox):
    """O2: 8191 bytes and the first of three of a character, the rest later."""
    seen: list[str] = []
    command = r"head -c 8191 /dev/zero | tr '\0' x; printf '\xe2'; sleep 0.2; printf '\x82\xac'"
    await done(sandbox.commands.run(command, on_stdout=seen.append))
    assert "".join(seen) == "x" * 8191 + "€"


async def test_the_time_limit_is_kept(sandbox):
    with pytest.raises(TimeoutException):
        await done(sandbox.commands.run("sleep 30", timeout=0.3))
    assert await done(sandbox.commands.list()) == []


async def test_no_time_limit_is_possible(sandbox):
    assert (await done(sandbox.commands.run("sleep 0.1; echo done", timeout=0))).stdout == "done\n"


async def test_kept_output_is_bounded_and_callbacks_get_all(sandbox):
    """X15."""
    counted = [0]

    def count(text: str) -> None:
        counted[0] += len(text)

    command = "seq 1 50000; echo kept >&2"
    whole = "".join(f"{number}\n" for number in range(1, 50001))
    result = await done(sandbox.commands.run(command, max_output_bytes=1000, on_stdout=count))
    assert (result.stdout, result.stderr, result.truncated) == (whole[-1000:], "kept\n", True)
    assert counted == [len(whole)]
    nothing = await done(sandbox.commands.run(command, max_output_bytes=0))
    assert (nothing.stdout, nothing.stderr, nothing.truncated) == ("", "", True)


async def test_much_output_is_complete(sandbox):
    """O17: beyond the 64 MiB that are kept unless asked otherwise."""
    command = "head -c 70000000 /dev/zero | tr '\\0' a; head -c 5000000 /dev/zero | tr '\\0' b >&2; printf end"
    counted = [0]
    result = await done(
        sandbox.commands.run(command, on_stdout=lambda text: counted.__setitem__(0, counted[0] + len(text)))
    )
    assert counted == [70_000_003]
    assert len(result.stdout) == 64 * 1024 * 1024
    assert result.stdout.endswith("aend")
    assert result.truncated
    assert result.stderr == "b" * 5_000_000


async def test_a_background_command_is_followed(sandbox):
    handle = await done(sandbox.commands.run("echo a; sleep 0.05; echo b >&2; exit 4", background=True))
    assert (handle.exit_code, handle.error) == (None, None)
    texts = await every(handle)
    assert [(text.stdout, text.stderr) for text in texts] == [("a\n", None), (None, "b\n")]
    assert (handle.stdout, handle.stderr, handle.exit_code, handle.reconnects) == ("a\n", "b\n", 4, 0)
    for _ in range(2):
        with pytest.raises(CommandExitException):
            await done(handle.wait())


async def test_output_that_is_no_text_comes_as_bytes(sandbox):
    handle = await done(sandbox.commands.run(r"printf 'a\0\xff'", background=True))
    assert await done(handle.read()) == Output(stdout=b"a\0\xff")
    assert await done(handle.read()) is None
    assert handle.stdout_bytes == b"a\0\xff"


async def test_input_reaches_the_command(sandbox):
    handle = await done(sandbox.commands.run("cat; exec sleep 0.5", background=True, stdin=True))
    await done(handle.send_stdin("one\n"))
    await done(sandbox.commands.send_stdin(handle.pid, b"\xff\n"))
    await done(handle.close_stdin())
    await done(sandbox.commands.close_stdin(handle.pid))
    await done(handle.wait())
    assert handle.stdout_bytes == b"one\n\xff\n"


async def test_input_is_empty_unless_asked_for(sandbox):
    assert (await done(sandbox.commands.run("cat"))).stdout == ""


async def test_a_large_input_arrives_whole(sandbox):
    data = bytes(range(256)) * 40_000
    handle = await done(sandbox.commands.run("wc -c", background=True, stdin=True))
    await done(handle.send_stdin(data))
    await done(handle.close_stdin())
    assert (await done(handle.wait())).stdout.split() == [str(len(data))]


async def test_processes_are_listed_and_killed(sandbox):
    handle = await done(sandbox.commands.run("sleep 30", background=True, tag="mark", envs={"A": "b"}, cwd="/tmp"))
    terminal = await done(sandbox.pty.create())
    by_pid = {process.pid: process for process in await done(sandbox.commands.list())}
    assert by_pid.keys() == {handle.pid, terminal.pid}
    process = by_pid[handle.pid]
    assert (process.cmd, tuple(process.args)) == ("/bin/bash", ("-l", "-c", "sleep 30"))
    assert (process.tag, process.envs, process.cwd, process.kind) == ("mark", {"A": "b"}, "/tmp", ProcessKind.COMMAND)
    assert by_pid[terminal.pid].kind is ProcessKind.TERMINAL
    assert await done(handle.kill()) is True
    assert await done(sandbox.pty.kill(terminal.pid)) is True
    for killed in (handle, terminal):
        with pytest.raises(CommandExitException):
            await done(killed.wait())
        assert await done(killed.kill()) is False
    with pytest.raises(NotFoundException):
        await done(sandbox.commands.connect(handle.pid + 10_000))
    with pytest.raises(NotFoundException):
        await done(sandbox.commands.send_stdin(handle.pid, "x"))


async def test_terminate_may_be_caught(sandbox):
    handle = await done(
        sandbox.commands.run("trap 'echo bye; exit 5' TERM; echo on; while :; do sleep 0.05; done", True)
    )
    assert (await done(handle.read())).stdout == b"on\n"
    assert await done(sandbox.commands.terminate(handle.pid)) is True
    with pytest.raises(CommandExitException) as ended:
        await done(handle.wait())
    assert (ended.value.exit_code, ended.value.stdout) == (5, "on\nbye\n")


async def test_a_tree_is_killed_when_asked(sandbox):
    """X4 to X6: also what made itself a session of its own."""
    command = "setsid sleep 4321 & sleep 4321"
    handle = await done(sandbox.commands.run(command, background=True, kill_tree=True))
    sleepers = "while [ $(pgrep -xc sleep) != %d ]; do read -t 0.05 < <(:); done; true"
    await done(sandbox.commands.run(sleepers % 2, timeout=20))
    assert await done(handle.kill()) is True
    await done(sandbox.commands.run(sleepers % 0, timeout=20))


async def test_a_second_handle_replays_and_follows(sandbox):
    """X11, X14."""
    first = await done(sandbox.commands.run("echo 1; echo 2 >&2; read x; echo $x; exit 0", True, stdin=True))
    seen = b""
    while len(seen) < 4:
        output = await done(first.read())
        seen += (output.stdout or b"") + (output.stderr or b"")
    second = await done(sandbox.commands.connect(first.pid, 0))
    later = await done(sandbox.commands.connect(first.pid, first.last_seq + 1))
    live = await done(sandbox.commands.connect(first.pid))
    await done(first.send_stdin("3\n"))
    for handle, shown in ((first, "1\n3\n"), (second, "1\n3\n"), (later, "3\n"), (live, "3\n")):
        assert (await done(handle.wait())).stdout == shown
    assert {handle.last_seq for handle in (first, second, later, live)} == {first.last_seq}
    with pytest.raises(InvalidArgumentException):
        await done(sandbox.commands.connect(first.pid, -1))


async def test_disconnect_leaves_the_command_running(sandbox):
    handle = await done(sandbox.commands.run("read x; echo $x", background=True, stdin=True))
    handle.disconnect()
    assert await every(handle) == []
    with pytest.raises(SandboxException, match="disconnected"):
        await done(handle.wait())
    again = await done(sandbox.commands.connect(handle.pid))
    await done(again.send_stdin("there\n"))
    assert (await done(again.wait())).stdout == "there\n"


def test_another_thread_may_disconnect_a_reader(gateway):
    with Sandbox.create(state_dir=gateway.state_dir) as box:
        handle = box.commands.run("sleep 30", background=True)
        timer = threading.Timer(0.2, handle.disconnect)
        timer.start()
        assert list(handle) == []
        timer.join()
        assert box.commands.kill(handle.pid) is True


async def test_a_cancelled_wait_can_be_taken_up_again(gateway):
    async with await AsyncSandbox.create(state_dir=gateway.state_dir) as box:
        handle = await box.commands.run("for i in 1 2 3 4 5 6; do echo $i; sleep 0.1; done", background=True)
        for _ in range(8):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle.wait(), 0.03)
        assert (await handle.wait()).stdout == "1\n2\n3\n4\n5\n6\n"
        assert handle.reconnects == 0


async def test_commands_run_side_by_side(gateway):
    async with await AsyncSandbox.create(state_dir=gateway.state_dir) as box:
        results = await asyncio.gather(*(box.commands.run(f"sleep 0.2; echo {number}") for number in range(30)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(30)]


async def test_a_program_without_a_shell_gets_its_words_as_they_are(sandbox):
    handle = await done(sandbox.commands.start(Program(argv=("printf", "%s|", "a b", "$HOME", "*"))))
    assert (await done(handle.wait())).stdout == "a b|$HOME|*|"


async def test_a_terminal_is_used(sandbox):
    shown = bytearray()
    terminal = await done(sandbox.pty.create(PtySize(rows=20, cols=70), on_data=shown.extend))
    await done(sandbox.pty.resize(terminal.pid, PtySize(rows=33, cols=111)))
    await done(terminal.send_stdin("stty size; read line; exit $line\n"))
    while b"33 111" not in shown:
        shown += (await done(terminal.read())).pty
    assert b"33 111" in terminal.pty_bytes
    second = await done(sandbox.pty.connect(terminal.pid))
    await done(sandbox.pty.send_stdin(second.pid, b"6\n"))
    for handle in (terminal, second):
        with pytest.raises(CommandExitException) as ended:
            await done(handle.wait())
        assert ended.value.exit_code == 6


async def test_files_are_written_and_read(sandbox, tmp_path):
    content = bytes(range(256)) * 10_000
    info = await done(sandbox.files.write("a/b/data", content))
    assert (info.path, info.size, info.type, info.owner) == ("/home/user/a/b/data", len(content), FileType.FILE, "user")
    assert await done(sandbox.files.read("a/b/data", "bytes")) == content
    stream = await done(sandbox.files.read("a/b/data", "stream"))
    parts = await every(stream)
    assert b"".join(parts) == content
    assert len(parts) > 1
    await done(sandbox.files.write("text", "é\n", user="root"))
    assert await done(sandbox.files.read("/root/text", user="root")) == "é\n"
    (tmp_path / "local").write_bytes(content)
    with (tmp_path / "local").open("rb") as file:
        await done(sandbox.files.write("copy", file))
    assert (await done(sandbox.commands.run("cmp copy a/b/data && wc -c < copy"))).stdout == f"{len(content)}\n"
    await done(sandbox.files.write("copy", b""))
    assert await done(sandbox.files.read("copy")) == ""


async def test_files_are_found_and_moved(sandbox):
    assert await done(sandbox.files.make_dir("d/e")) is True
    assert await done(sandbox.files.make_dir("d/e")) is False
    await done(sandbox.files.write("d/f", "x"))
    assert [entry.name for entry in await done(sandbox.files.list("d"))] == ["e", "f"]
    await done(sandbox.files.write("d/e/g", "x"))
    assert [entry.path for entry in await done(sandbox.files.list("d", 2))] == [
        "/home/user/d/e",
        "/home/user/d/e/g",
        "/home/user/d/f",
    ]
    assert (await done(sandbox.files.rename("d/f", "d/h"))).path == "/home/user/d/h"
    assert await done(sandbox.files.exists("d/f")) is False
    assert await done(sandbox.files.exists("d/h")) is True
    assert (await done(sandbox.files.get_info("d"))).type is FileType.DIRECTORY
    await done(sandbox.files.remove("d"))
    with pytest.raises(NotFoundException, match="/home/user/d"):
        await done(sandbox.files.list("d"))
    with pytest.raises(NotFoundException):
        await done(sandbox.files.read("d/h"))
    with pytest.raises(InvalidArgumentException):
        await done(sandbox.files.read("."))


async def test_a_file_that_cannot_be_read_here_says_why(sandbox):
    class Broken(io.BytesIO):
        def read(self, *_):
            raise OSError(5, "the disk is broken")

    with pytest.raises(OSError, match="the disk is broken"):
        await done(sandbox.files.write("x", Broken()))
    with pytest.raises(InvalidArgumentException, match="binary"):
        await done(sandbox.files.write("x", io.StringIO("text")))
