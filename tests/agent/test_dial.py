"""Tunnels to the sandbox's ports as the agent serves them (behaviour.md R5, R7)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from sandgate_agent.listeners import Listeners
from sandgate_agent.tunnels import Tunnels
from sandgate_api.agent.v1 import agent_pb2 as pb
from sandgate_errors import ResourceExhausted, SandboxUnreachable
from sandgate_testing.agent_process import Agent, Running, an_agent, code_of, eventually

#: Says which port it listens on, then does with each connection what the second line says.
SERVER = """
import os, socket, sys, threading
sock = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(sock.getsockname()[1], flush=True)
def serve(peer):
    {behaviour}
while True:
    threading.Thread(target=serve, args=[sock.accept()[0]], daemon=True).start()
"""
ECHO = """
    while data := peer.recv(65536): peer.sendall(data)
    peer.close()
"""
ECHO_AFTER_THE_END = """
    got = b""
    while data := peer.recv(65536): got += data
    peer.sendall(b"all: " + got)
    peer.close()
"""
SPEAK_THEN_LISTEN = """
    peer.sendall(b"bye")
    peer.shutdown(socket.SHUT_WR)
    got = b""
    while data := peer.recv(65536): got += data
    print(got.decode(), flush=True)
"""
POUR = """
    sent = 0
    try:
        while True: sent += peer.send(b"x" * 65536); open(sys.argv[2], "w").write(str(sent))
    except OSError: open(sys.argv[2], "a").write(" ended")
"""
REFUSE_AND_CLOSE = """
    peer.recv(10)
    peer.sendall(b"enough")
    peer.shutdown(socket.SHUT_WR)
    peer.close()
"""


@contextlib.asynccontextmanager
async def serving(
    agent: Agent, behaviour: str = ECHO, *more: str, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[tuple[int, Running]]:
    """A server inside, and its port."""
    script = SERVER.replace("    {behaviour}", behaviour.strip("\n"))
    async with agent.running("python3", "-c", script, host, *more, **options) as running:
        yield int((await running.read_until(b"\n")).split()[0]), running


class Dialled:
    """A tunnel as its caller holds it."""

    def __init__(self, agent: Agent) -> None:
        self.call: Any = agent.agent.Dial(metadata=agent.metadata())

    async def open(self, port: int) -> Dialled:
        await self.call.write(pb.DialRequest(open=pb.DialRequest.Open(port=port)))
        first = await self.call.read()
        if first is grpc.aio.EOF:
            # Read, so that the status is raised.
            await self.call
        assert first.WhichOneof("part") == "opened"
        return self

    async def send(self, data: bytes) -> None:
        await self.call.write(pb.DialRequest(data=data))

    async def read(self, size: int) -> bytes:
        got = b""
        async with asyncio.timeout(20):
            while len(got) < size:
                message = await self.call.read()
                assert message.WhichOneof("part") == "data", message
                got += message.data
        return got

    async def rest(self) -> bytes:
        got = b""
        async with asyncio.timeout(20):
            while (message := await self.call.read()).WhichOneof("part") == "data":
                got += message.data
        assert message.HasField("end")
        return got

    async def over(self) -> grpc.StatusCode:
        async with asyncio.timeout(20):
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await self.call.read() is grpc.aio.EOF
            return await self.call.code()


@contextlib.asynccontextmanager
async def dial(agent: Agent, port: int) -> AsyncIterator[Dialled]:
    dialled = Dialled(agent)
    try:
        yield await dialled.open(port)
    finally:
        dialled.call.cancel()


@pytest.fixture(params=["same", "switch", "nested"])
async def any_agent(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    async with an_agent(request.param) as running:
        yield running


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", "::"])
async def test_listener_is_found_wherever_it_is_bound(agent: Agent, host: str) -> None:
    """R7."""
    async with serving(agent, host=host) as (port, _), dial(agent, port) as tunnel:
        await tunnel.send(b"ping")
        assert await tunnel.read(4) == b"ping"


async def test_what_a_command_listens_on_is_reached_whoever_it_acts_as(any_agent: Agent) -> None:
    """The agent shares the network of this test: it must find out that the listener is its own."""
    async with serving(any_agent) as (port, _), dial(any_agent, port) as tunnel:
        await tunnel.send(b"ping")
        assert await tunnel.read(4) == b"ping"


async def test_what_root_listens_on_is_reached(switching: Agent) -> None:
    async with serving(switching, user="root") as (port, _), dial(switching, port) as tunnel:
        await tunnel.send(b"ping")
        assert await tunnel.read(4) == b"ping"


async def test_what_somebody_else_listens_on_is_not_reached(any_agent: Agent) -> None:
    """Not the machine's services, and not a neighbour's: to a caller, nothing listens there."""
    accepted = []
    server = await asyncio.start_server(lambda *peer: accepted.append(peer), "127.0.0.1", 0)
    async with server, an_agent("same") as neighbour, serving(neighbour) as (neighbours, _):
        for port in (server.sockets[0].getsockname()[1], neighbours):
            async with code_of(grpc.StatusCode.UNAVAILABLE, "nothing listens"):
                await Dialled(any_agent).open(port)
    assert not accepted, "it was not even knocked at"


async def test_own_listener_beside_a_foreign_one_is_reached(agent: Agent) -> None:
    """The exact address wins over the wildcard of the other family, which somebody else has."""
    with socket.socket(socket.AF_INET6) as foreign:
        foreign.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        foreign.bind(("::", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        script = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); p, _ = s.accept(); p.sendall(b'mine'); p.recv(1)"
        async with agent.running("python3", "-c", script) as running:
            await running.read_until(b"\n")
            async with dial(agent, port) as tunnel:
                assert await tunnel.read(4) == b"mine"


async def test_connection_taken_by_somebody_else_is_not_used() -> None:
    """As above, by one who stopped to listen once the connection was there."""

    class Blind(Listeners):
        def ours(self, address: str, port: int) -> frozenset[int]:
            return frozenset({1})

    server = socket.create_server(("127.0.0.1", 0))
    held = []

    def accept_one() -> None:
        with server:
            held.append(server.accept()[0])

    class Late(Blind):
        def still_ours(self, met: frozenset[int], address: str, port: int, *, caller: int) -> bool:
            accepting.join()
            return super().still_ours(met, address, port, caller=caller)

    accepting = threading.Thread(target=accept_one)
    accepting.start()
    with pytest.raises(SandboxUnreachable):
        async with Tunnels(Late(os.getpid() + 1)).open(server.getsockname()[1]):
            pass
    assert held[0].recv(10) == b""
    held[0].close()


async def test_listener_that_changes_hands_is_not_reached() -> None:
    """Between the look and the connection. Here the first look saw another one."""

    class Changing(Listeners):
        looks = 0

        def ours(self, address: str, port: int) -> frozenset[int]:
            Changing.looks += 1
            return frozenset({Changing.looks})

    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SandboxUnreachable):
        async with Tunnels(Changing(os.getpid())).open(server.getsockname()[1]):
            pass
    assert Changing.looks > 2


async def test_nothing_listens_is_said_by_a_reason_of_its_own(agent: Agent) -> None:
    """R5."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Dialled(agent).open(port)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("error-reason", "sandbox_unreachable") in tuple(caught.value.trailing_metadata() or ())


async def test_listener_that_starts_late_is_found(agent: Agent) -> None:
    """R5."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dialled = Dialled(agent)
    opening = asyncio.create_task(dialled.open(port))
    script = (
        f"import socket; s = socket.create_server(('127.0.0.1', {port})); s.accept()[0].sendall(b'late'); s.accept()"
    )
    async with agent.running("python3", "-c", script):
        assert await (await opening).read(4) == b"late"
    dialled.call.cancel()


async def test_each_side_ends_by_itself(agent: Agent) -> None:
    async with serving(agent, ECHO_AFTER_THE_END) as (port, _), dial(agent, port) as tunnel:
        await tunnel.send(b"one ")
        await tunnel.send(b"two")
        await tunnel.call.done_writing()
        assert await tunnel.rest() == b"all: one two"
        assert await tunnel.over() is grpc.StatusCode.OK

    async with serving(agent, SPEAK_THEN_LISTEN) as (port, running), dial(agent, port) as tunnel:
        assert await tunnel.rest() == b"bye"
        await tunnel.send(b"still heard")
        await tunnel.call.done_writing()
        assert await tunnel.over() is grpc.StatusCode.OK
        assert await running.read_until(b"\n") == b"still heard\n"


async def test_many_megabytes_pass_unchanged_both_ways_at_once(agent: Agent) -> None:
    piece = os.urandom(1 << 20)
    async with serving(agent) as (port, _), dial(agent, port) as tunnel:

        async def send() -> None:
            for _ in range(32):
                await tunnel.send(piece)
            await tunnel.call.done_writing()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            got = group.create_task(tunnel.rest())
        assert got.result() == piece * 32


async def test_slow_reader_slows_the_writer_and_nobody_else(agent: Agent) -> None:
    progress = agent.folder / "progress"
    async with serving(agent, POUR, str(progress)) as (pouring, _), serving(agent) as (port, _):
        async with dial(agent, pouring) as slow:
            await slow.read(1)
            size = 0
            while (now := int(progress.read_text() or "0")) != size:
                size = now
                await asyncio.sleep(0.3)
            assert size < 64 << 20
            async with dial(agent, port) as other:
                await other.send(b"ping")
                assert await other.read(4) == b"ping"
        await eventually(lambda: progress.read_text().endswith(" ended"))


async def test_answer_of_a_server_that_reads_no_more_arrives(agent: Agent) -> None:
    async with serving(agent, REFUSE_AND_CLOSE) as (port, _), dial(agent, port) as tunnel:
        await tunnel.send(b"x" * 10)
        assert await tunnel.rest() == b"enough"


async def test_end_of_the_server_ends_the_tunnel_and_frees_it(agent: Agent) -> None:
    before = agent.descriptors()
    async with serving(agent) as (port, running), dial(agent, port) as tunnel:
        await tunnel.send(b"ping")
        assert await tunnel.read(4) == b"ping"
        await running.signal(9)
        assert await tunnel.rest() == b""
    await eventually(lambda: agent.descriptors() <= before)


async def test_caller_that_leaves_frees_the_tunnel(agent: Agent) -> None:
    async with serving(agent) as (port, _):
        before = agent.descriptors()
        for _ in range(20):
            async with dial(agent, port) as tunnel:
                await tunnel.send(b"x")
        await eventually(lambda: agent.descriptors() <= before)


async def test_number_of_tunnels_is_bounded() -> None:
    """R16."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tunnels = Tunnels(None, most=2)
        async with tunnels.open(port), tunnels.open(port):
            with pytest.raises(ResourceExhausted):
                async with tunnels.open(port):
                    pass
        async with tunnels.open(port):
            pass


@pytest.mark.parametrize("port", [0, 65536, 4294967295])
async def test_port_must_be_one(agent: Agent, port: int) -> None:
    async with code_of(grpc.StatusCode.INVALID_ARGUMENT, "65535"):
        await Dialled(agent).open(port)


async def test_messages_out_of_order_are_refused(agent: Agent) -> None:
    call: Any = agent.agent.Dial(metadata=agent.metadata())
    await call.write(pb.DialRequest(data=b"x"))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = agent.agent.Dial(metadata=agent.metadata())
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with serving(agent) as (port, _), dial(agent, port) as tunnel:
        await tunnel.call.write(pb.DialRequest(open=pb.DialRequest.Open(port=port)))
        assert await tunnel.over() is grpc.StatusCode.INVALID_ARGUMENT


async def test_dial_needs_the_token(agent: Agent) -> None:
    call: Any = agent.agent.Dial(metadata=agent.metadata(token="wrong"))
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_closed_ports_are_as_if_nothing_listened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with Tunnels(None).open(port):
            pass
        with pytest.raises(SandboxUnreachable, match=f"nothing listens on port {port}"):
            async with Tunnels(None, closed=frozenset({port})).open(port):
                pass
