"""Open files that the agent hands over to callers on its machine (docs/architecture.md, "Large downloads")."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2
from sandgate_testing.agent_process import TOKEN, Agent, code_of, eventually


@contextlib.contextmanager
def asking(agent: Agent, *question: bytes) -> Iterator[socket.socket]:
    """A connection with one packet on it for each part of the question."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(agent.target.removeprefix("unix:") + ".files")
        # An agent that sends a caller away does not wait for the question.
        with contextlib.suppress(BrokenPipeError):
            for packet in question:
                connection.send(packet)
        yield connection


def question(path: str, *, user: str = "", token: str = TOKEN) -> bytes:
    return b"\0".join(word.encode() for word in (token, user, path))


def answer(connection: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(64))
    numbers = array.array("i")
    for _, _, content in ancillary:
        numbers.frombytes(content)
    return data, list(numbers)


def handed_over(agent: Agent, path: str, **options: str) -> tuple[agent_pb2.ReadFileResponse.Header, int]:
    with asking(agent, question(path, **options)) as connection:
        data, fds = answer(connection)
        assert len(fds) == 1, data
        return agent_pb2.ReadFileResponse.Header.FromString(data), fds[0]


def refused(agent: Agent, *packets: bytes) -> bool:
    with asking(agent, *packets) as connection:
        try:
            return answer(connection) == (b"", [])
        except ConnectionResetError:
            return True


async def header_of(agent: Agent, path: str, user: str | None = None) -> agent_pb2.ReadFileResponse.Header:
    request = agent_pb2.ReadFileRequest(path=path, header_only=True)
    call: Any = agent.agent.ReadFile(request, metadata=agent.metadata(user=user))
    header: agent_pb2.ReadFileResponse.Header = (await call.read()).header
    return header


@pytest.mark.parametrize("path", ["{home}/f", "f", "~/f", "{home}/../{name}/f", "link"])
async def test_file_is_described_and_opened_as_a_download_does(any_agent: Agent, path: str) -> None:
    """F2 to F5: the same answer by both roads, under every identity."""
    agent = any_agent
    (agent.home / "f").write_bytes(b"content")
    (agent.home / "link").symlink_to("f")
    if agent.identity != "same" and path in {"f", "~/f", "link"}:
        # Of these accounts the home is another.
        path = f"{agent.home}/{path.removeprefix('~/')}"
    path = path.format(home=agent.home, name=agent.home.name)
    header, fd = handed_over(agent, path)
    with os.fdopen(fd, "rb") as file:
        assert header == await header_of(agent, path)
        assert file.read() == b"content"
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


async def test_socket_is_for_the_agents_own_user_as_the_other_one_is(agent: Agent) -> None:
    for suffix in ("", ".files"):
        about = os.lstat(agent.target.removeprefix("unix:") + suffix)
        assert stat.S_ISSOCK(about.st_mode)
        assert stat.S_IMODE(about.st_mode) == 0o600


async def test_without_the_token_nothing_is_opened(agent: Agent) -> None:
    (agent.home / "f").write_bytes(b"content")
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
        assert refused(agent, question(f"{agent.home}/f", token=token))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0",
        b"\0" * 1000,
        TOKEN.encode(),
        TOKEN.encode() + b"\0",
        TOKEN.encode() + b"\0\xff\0/etc/passwd",
        TOKEN.encode() + b"\0\0\xff",
        TOKEN.encode() + b"\0\0/etc/passwd\0",
        TOKEN.encode() + b"\0\0" + b"/x" * 7000,
        os.urandom(200_000),
    ],
    ids=range(10),
)
async def test_junk_is_not_answered_and_harms_nobody(agent: Agent, packet: bytes) -> None:
    before = agent.descriptors()
    assert refused(agent, packet)
    await eventually(lambda: agent.descriptors() == before)
    await header_of(agent, "/etc/passwd")


async def test_what_a_download_refuses_is_not_handed_over(agent: Agent) -> None:
    """Neither what is no regular file, nor anything for an account that there is not; ReadFile has the reason."""
    os.mkfifo(agent.home / "pipe")
    (agent.home / "loop").symlink_to("loop")
    for path in ("none", "", "pipe", "loop", "/dev/zero", "/", "x\0y", "~other/f", "/" + "x" * 300):
        assert refused(agent, question(path)), path
        with pytest.raises(grpc.aio.AioRpcError):
            await header_of(agent, path)
    assert refused(agent, question("/etc/passwd", user="nobody-here"))
    async with code_of(grpc.StatusCode.UNAUTHENTICATED):
        await header_of(agent, "/etc/passwd", user="nobody-here")


async def test_connection_lasts_until_the_caller_leaves_and_costs_nothing_after(agent: Agent) -> None:
    (agent.home / "f").write_bytes(b"content")
    os.close(handed_over(agent, "f")[1])
    before = agent.descriptors()
    for _ in range(300):
        os.close(handed_over(agent, "f")[1])
    await eventually(lambda: agent.descriptors() <= before)
    with asking(agent, question("f")) as connection:
        os.close(answer(connection)[1][0])
        # The agent itself lets go of the file, a moment after it sent it: a removed one is not held.
        await eventually(lambda: not any(str(agent.home) in target for target in targets(agent)))


def targets(agent: Agent) -> list[str]:
    folder = Path(f"/proc/{agent.pid}/fd")
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(folder / name))
        except FileNotFoundError:
            pass
    return found


async def test_callers_that_say_nothing_do_not_keep_others_out(agent: Agent) -> None:
    """Beyond a number of files at once a caller is sent away and takes the stream; places come back."""
    (agent.home / "f").write_bytes(b"content")
    held = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(64)]
    for connection in held:
        connection.connect(agent.target.removeprefix("unix:") + ".files")
    await eventually(lambda: refused(agent, question("f")))
    assert await agent.read("f") == b"content"
    # After some seconds the agent has waited long enough for their questions.
    await eventually(lambda: not refused(agent, question("f")), seconds=30)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_end_of_the_agent_is_seen_on_the_connection(agent: Agent, number: signal.Signals) -> None:
    (agent.home / "f").write_bytes(b"content")
    with asking(agent, question("f")) as connection:
        os.close(answer(connection)[1][0])
        os.kill(agent.pid, number)
        assert connection.recv(1) == b""
