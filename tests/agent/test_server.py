"""How the agent starts, whom it answers, and how errors leave it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from sandgate_agent.calls import _read_all
from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_errors import Canceled
from sandgate_testing.agent_process import Agent, code_of

SERVING = b"\x08\x01"


def start(line: bytes, folder: Path | None = None) -> tuple[dict[str, object], int]:
    """An agent that must refuse to start."""
    command = [sys.executable, "-m", "sandgate_agent"] if folder is None else [sys.executable, str(folder)]
    done = subprocess.run(command, input=line, capture_output=True, timeout=30, check=False)
    assert b"Traceback" not in done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer, done.returncode


def settings(**changes: object) -> bytes:
    good: dict[str, object] = {
        "listen": "unix:/nowhere/s",
        "token": "t",
        "identity": "same",
        "accounts": {"user": {"home": "/"}},
    }
    return json.dumps({key: value for key, value in (good | changes).items() if value is not None}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"", "not a line of JSON"),
        (b"{}\n", "listen"),
        (b"[]\n", "not a JSON object"),
        (settings(token=""), "token"),
        (settings(token=5), "token"),
        (settings(identity="other"), "identity"),
        (settings(accounts=None), "accounts"),
        (settings(accounts={"user": {}}), "home"),
        (settings(accounts={"user": {"home": "relative"}}), "home"),
        (settings(identity="switch"), "accounts"),
        (settings(system_files=1), "system_files"),
        (settings(colour="red"), "colour"),
        (settings(listen=f"unix:/{'x' * 120}"), "107"),
        (settings(), "cannot listen"),
        (settings(listen="127.0.0.1:99999"), "<port>"),
        (settings(listen="127.0.0.1:0"), "<port>"),
        (settings(listen="/a/path"), "<port>"),
        (settings(folder=2, listen="unix:/proc/self/fd/2/s"), "descriptor"),
        (settings(folder=True), "descriptor"),
        (settings(folder=5), "/proc/self/fd/<folder>"),
        (settings(tls={"certificate": "c"}, listen="127.0.0.1:1"), "key"),
        (settings(tls={"certificate": "c", "key": "k"}), "listens on a port"),
    ],
)
def test_bad_settings_are_one_line_for_the_operator(line: bytes, text: str) -> None:
    answer, status = start(line)
    assert status == 1
    assert answer["ready"] is False
    assert text in str(answer["error"])
    assert "\n" not in str(answer["error"])


def test_folder_with_the_packages_is_the_program(tmp_path: Path) -> None:
    """What backends put into a sandbox: the same file is ``__main__`` there."""
    import sandgate_agent

    source = Path(sandgate_agent.__file__ or "").with_name("__main__.py")
    (tmp_path / "__main__.py").write_bytes(source.read_bytes())
    assert start(b"{}\n", tmp_path)[1] == 1


async def test_token_is_needed_for_everything(agent: Agent) -> None:
    for metadata in ((), agent.metadata(token="wrong")):
        async with code_of(grpc.StatusCode.UNAUTHENTICATED):
            await agent.processes.List(process_pb2.ListRequest(), metadata=metadata)
        async with code_of(grpc.StatusCode.UNAUTHENTICATED):
            async for _ in agent.processes.Start(process_pb2.StartRequest(), metadata=metadata):
                pass
        async with code_of(grpc.StatusCode.UNAUTHENTICATED):
            await agent.agent.WriteFile(iter([]), metadata=metadata)


async def test_health_is_open_and_knows_the_services(agent: Agent) -> None:
    check = agent.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await check(b"") == SERVING
    name = b"sandgate_api.envd.v1.Process"
    assert await check(b"\x0a" + bytes([len(name)]) + name) == SERVING
    for unknown in (b"\x0a\x01x", b"\xff\xff\xff"):
        async with code_of(grpc.StatusCode.NOT_FOUND):
            await check(unknown)
    watch = agent.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    assert await watch.read() == SERVING
    watch.cancel()


async def test_only_the_owner_may_use_the_socket(agent: Agent) -> None:
    assert stat.S_IMODE(os.stat(agent.folder / "s").st_mode) == 0o600


async def test_methods_that_do_not_exist_are_unimplemented(agent: Agent) -> None:
    async with code_of(grpc.StatusCode.UNIMPLEMENTED):
        await agent.channel.unary_unary("/sandgate_api.envd.v1.Process/Fork")(b"")


async def test_bytes_that_are_no_message_do_not_hurt(agent: Agent) -> None:
    for method in ("Process/List", "Process/SendInput", "Filesystem/Stat"):
        async with code_of(grpc.StatusCode.INVALID_ARGUMENT, "is not a"):
            await agent.channel.unary_unary(f"/sandgate_api.envd.v1.{method}")(
                b"\xff\xff\xff", metadata=agent.metadata()
            )
    assert (await agent.run("echo", "ok")).text == "ok\n"


async def test_long_texts_from_callers_come_back_short(agent: Agent) -> None:
    """A status text is a header, and peers refuse long ones."""
    async with code_of(grpc.StatusCode.NOT_FOUND):
        await agent.stat("/" + "/".join(["😀" * 60] * 16))
    async with code_of(grpc.StatusCode.UNAUTHENTICATED):
        await agent.run("true", user="u" * 2000)


async def test_init_says_the_version_and_refuses_impossible_variables(agent: Agent) -> None:
    reply = await agent.agent.Init(agent_pb2.InitRequest(sandbox_id="i"), metadata=agent.metadata())
    assert reply.agent_version
    for envs in ({"A=B": "1"}, {"": "1"}, {"A": "\0"}):
        async with code_of(grpc.StatusCode.INVALID_ARGUMENT):
            await agent.agent.Init(agent_pb2.InitRequest(envs=envs), metadata=agent.metadata())


async def test_tcp_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    answer, status = await asyncio.to_thread(start, settings(listen=f"127.0.0.1:{port}"))
    listener.close()
    await listener.wait_closed()
    assert status == 1
    assert "cannot listen" in str(answer["error"])


async def test_agent_serves_tcp_too() -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandgate_agent"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(settings(listen=f"127.0.0.1:{port}"))
        assert json.loads(await process.stdout.readline()) == {"ready": True}
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = process_pb2_grpc.ProcessStub(channel)
            await stub.List(process_pb2.ListRequest(), metadata=(("agent-token", "t"),))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_folder_that_was_handed_over_is_nowhere_left_once_it_listens(tmp_path: Path) -> None:
    """Whoever could find its descriptor in a process of the sandbox could put something else in the socket's place."""
    folder = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandgate_agent"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(folder,),
        cwd="/",
    )
    os.close(folder)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(settings(listen=f"unix:/proc/self/fd/{folder}/s", folder=folder))
        assert json.loads(await process.stdout.readline()) == {"ready": True}
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            call = process_pb2_grpc.ProcessStub(channel).Start(
                process_pb2.StartRequest(process=process_pb2.ProcessConfig(cmd="/bin/sleep", args=["60"]), stdin=False),
                metadata=(("agent-token", "t"), ("acting-user-bin", b"user")),
            )
            assert (await call.read()).event.start.pid
            group = [process.pid, *descendants(process.pid)]
            assert len(group) >= 4
            for pid in group:
                held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
                assert str(tmp_path) not in held
            call.cancel()
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


async def test_agent_on_a_port_serves_by_tls_where_it_is_given_a_certificate(tmp_path: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-subj", "/CN=agent", "-addext", "subjectAltName=DNS:agent"]
    argv += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)
    certificate = (tmp_path / "certificate").read_text()
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandgate_agent"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        tls = {"certificate": certificate, "key": (tmp_path / "key").read_text()}
        process.stdin.write(settings(listen=f"127.0.0.1:{port}", tls=tls))
        assert json.loads(await process.stdout.readline()) == {"ready": True}
        metadata = (("agent-token", "t"),)
        options = (("grpc.ssl_target_name_override", "agent"),)
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            await process_pb2_grpc.ProcessStub(channel).List(process_pb2.ListRequest(), metadata=metadata)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await process_pb2_grpc.ProcessStub(channel).List(
                    process_pb2.ListRequest(), metadata=metadata, timeout=5
                )
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError("RPC already finished."), cygrpc._ServerStoppedError("stopped")]
)
async def test_call_that_the_server_or_its_caller_ended_is_no_fault(error: Exception) -> None:
    """Met while it reads its messages: what the library raises depends on the moment."""

    async def messages() -> AsyncIterator[bytes]:
        yield b""
        raise error

    read = _read_all(agent_pb2.DialRequest, messages())
    await anext(read)
    with pytest.raises(Canceled):
        await anext(read)
