"""A short run of the rules about commands and files: that the agent in this kind of sandbox is sandgate's and works.

The whole of those rules is tested with the agent itself; here only what depends on the box around it: users, homes,
pipes, signals, and a file system that takes writes and tells of changes.
"""

from __future__ import annotations

import asyncio
import os

import grpc
import grpc.aio
import pytest

from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_plugin_api.backend import AgentFeature
from sandgate_plugin_api.testsuite.box import CALL_SECONDS, Box, rest_of

pytestmark = pytest.mark.asyncio


async def test_init_says_whose_sandbox_it_is_and_its_variables(box: Box) -> None:
    async with box.agent() as agent:
        await agent.init(box.request.sandbox_id, envs={"FROM_CREATE": "a b"})
        seen = await agent.run('echo "$E2B_SANDBOX_ID $FROM_CREATE $MORE"', envs={"MORE": "c"})
    assert seen.text() == f"{box.request.sandbox_id} a b c"


async def test_command_has_output_error_and_exit_code_apart(box: Box) -> None:
    done = await box.run("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")


async def test_command_runs_in_the_home_of_a_user_who_can_write_there(box: Box) -> None:
    done = await box.run('cd && pwd && touch a && echo "$HOME"')
    home, named = done.text().splitlines()
    assert home == named
    assert (await box.run("pwd")).text() == home


async def test_user_that_does_not_exist_is_refused(box: Box) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await box.run("true", user="nobody-of-this-name")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_commands_and_files_of_another_user(box: Box) -> None:
    if AgentFeature.USERS in box.backend.lacks:
        own = (await box.run("id -un")).text()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await box.run("true", user="nobody")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert f"'{own}'" in str(refused.value.details())
        return
    # Accounts that share one id are told apart by this.
    assert (await box.run('echo "$USER"', user="root")).text() == "root"


async def test_pid_is_that_of_the_system(box: Box) -> None:
    if AgentFeature.PIDS in box.backend.lacks:
        pytest.skip("its numbers are its own")
    async with box.agent() as agent:
        pid = await agent.background("echo $$ > pid; exec sleep 600")
        assert (await agent.run("until [ -s pid ]; do sleep 0.05; done; cat pid")).text() == str(pid)


async def test_input_reaches_a_command(box: Box) -> None:
    async with box.agent() as agent:
        call = agent.start('read line; echo "$line"', stdin=True)
        selector = process_pb2.ProcessSelector(pid=(await call.read()).event.start.pid)
        await agent.process.SendInput(
            process_pb2.SendInputRequest(process=selector, input=process_pb2.ProcessInput(stdin=b"given\n")),
            metadata=agent.metadata(),
            timeout=CALL_SECONDS,
        )
        events = await rest_of(call)
    assert b"".join(event.data.stdout for event in events) == b"given\n"
    assert events[-1].end.exit_code == 0


async def test_input_ends(box: Box) -> None:
    async with box.agent() as agent:
        call = agent.start("cat; echo over", stdin=True)
        pid = (await call.read()).event.start.pid
        selector = process_pb2.ProcessSelector(pid=pid)
        await agent.process.SendInput(
            process_pb2.SendInputRequest(process=selector, input=process_pb2.ProcessInput(stdin=b"given\n")),
            metadata=agent.metadata(),
            timeout=CALL_SECONDS,
        )
        closing = agent.process.CloseStdin(
            process_pb2.CloseStdinRequest(process=selector), metadata=agent.metadata(), timeout=CALL_SECONDS
        )
        if AgentFeature.CLOSE_STDIN in box.backend.lacks:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await closing
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            call.cancel()
            return
        await closing
        events = await rest_of(call)
    assert b"".join(event.data.stdout for event in events) == b"given\nover\n"
    assert events[-1].end.exit_code == 0


async def test_killed_command_ends_with_its_signal(box: Box) -> None:
    async with box.agent() as agent:
        call = agent.start("exec sleep 600")
        pid = (await call.read()).event.start.pid
        await agent.process.SendSignal(
            process_pb2.SendSignalRequest(
                process=process_pb2.ProcessSelector(pid=pid), signal=process_pb2.SIGNAL_SIGKILL
            ),
            metadata=agent.metadata(),
            timeout=CALL_SECONDS,
        )
        events = await rest_of(call)
    assert events[-1].end.exit_code == -1
    assert events[-1].end.status == "signal: killed"


async def test_much_output_arrives_whole(box: Box) -> None:
    done = await box.run("i=0; while [ $i -lt 20000 ]; do echo line$i; i=$((i+1)); done")
    assert done.stdout.splitlines() == [f"line{number}" for number in range(20000)]


async def test_file_comes_back_as_it_was_written(box: Box) -> None:
    content = os.urandom(3 * 2**20 + 1)
    async with box.agent() as agent:
        await agent.write("sub/data", content)
        assert await agent.read("sub/data") == content
    assert (await box.run("wc -c < sub/data")).text() == str(len(content))


async def test_file_that_a_command_wrote_is_read(box: Box) -> None:
    async with box.agent() as agent:
        (await agent.run("printf here > made")).text()
        assert await agent.read("made") == b"here"
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await agent.read("missing")
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_directories_are_made_listed_and_removed(box: Box) -> None:
    async with box.agent() as agent:
        options = {"metadata": agent.metadata(), "timeout": CALL_SECONDS}
        await agent.filesystem.MakeDir(filesystem_pb2.MakeDirRequest(path="tree/below"), **options)
        await agent.write("tree/file", b"12345")
        listed = await agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(path="tree", depth=1), **options)
        assert {(entry.name, entry.type) for entry in listed.entries} == {
            ("below", filesystem_pb2.FILE_TYPE_DIRECTORY),
            ("file", filesystem_pb2.FILE_TYPE_FILE),
        }
        moved = filesystem_pb2.MoveRequest(source="tree/file", destination="tree/below/file")
        await agent.filesystem.Move(moved, **options)
        found = await agent.filesystem.Stat(filesystem_pb2.StatRequest(path="tree/below/file"), **options)
        assert found.entry.size == 5
        await agent.filesystem.Remove(filesystem_pb2.RemoveRequest(path="tree"), **options)
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await agent.filesystem.Stat(filesystem_pb2.StatRequest(path="tree"), **options)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_of_a_new_file(box: Box) -> None:
    async with box.agent() as agent:
        (await agent.run("mkdir watched")).text()
        call = agent.filesystem.WatchDir(
            filesystem_pb2.WatchDirRequest(path="watched"), metadata=agent.metadata(), timeout=CALL_SECONDS
        )
        assert (await call.read()).HasField("start")
        (await agent.run("echo x > watched/new")).text()
        async with asyncio.timeout(CALL_SECONDS):
            while not (event := await call.read()).filesystem.name:
                pass
        call.cancel()
    assert event.filesystem.name == "new"
    assert event.filesystem.type == filesystem_pb2.EVENT_TYPE_CREATE


async def test_measurements_make_sense(box: Box) -> None:
    async with box.agent() as agent:
        usage = await agent.agent.Metrics(agent_pb2.MetricsRequest(), metadata=agent.metadata(), timeout=CALL_SECONDS)
    assert usage.cpu_count > 0
    assert 0 < usage.mem_used <= usage.mem_total
    if AgentFeature.USAGE in box.backend.lacks:
        assert (usage.disk_used, usage.disk_total) == (0, 0)
    else:
        assert 0 < usage.disk_used <= usage.disk_total


async def test_metadata_is_kept_with_a_file(box: Box) -> None:
    async with box.agent() as agent:
        writing = agent.write("described", b"content", metadata={"made-by": "the suite"})
        if AgentFeature.METADATA in box.backend.lacks:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await writing
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        await writing
        found = await agent.filesystem.Stat(
            filesystem_pb2.StatRequest(path="described"), metadata=agent.metadata(), timeout=CALL_SECONDS
        )
    assert dict(found.entry.metadata) == {"made-by": "the suite"}


async def test_tree_of_a_command_ends_with_it(box: Box) -> None:
    process = process_pb2.ProcessConfig(cmd="/bin/sh", args=["-c", "setsid sleep 600 & echo $! > far; wait"])
    async with box.agent() as agent:
        call = agent.process.Start(
            process_pb2.StartRequest(process=process, stdin=False, kill_tree=True),
            metadata=agent.metadata(),
            timeout=CALL_SECONDS,
        )
        if AgentFeature.KILL_TREE in box.backend.lacks:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        selector = process_pb2.ProcessSelector(pid=(await call.read()).event.start.pid)
        (await agent.run("until [ -s far ]; do sleep 0.05; done")).text()
        await agent.process.SendSignal(
            process_pb2.SendSignalRequest(process=selector, signal=process_pb2.SIGNAL_SIGKILL),
            metadata=agent.metadata(),
            timeout=CALL_SECONDS,
        )
        await rest_of(call)
        assert (await agent.run('kill -0 "$(cat far)" 2>/dev/null || echo gone')).text() == "gone"
