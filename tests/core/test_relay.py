"""The relay: bytes, deadlines, cancellation, status and metadata of an agent's call, on the core's address."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_errors import SandboxNotFound, SandboxUnreachable, SandgateError
from sandgate_errors.grpc import from_status


class Line:
    """Calls of one client to one sandbox through the relay."""

    def __init__(self, client, sandbox_id):
        self.channel = client.channel
        self.metadata = (*client.credentials, ("sandbox-id", sandbox_id))

    def open(self, name, *, metadata=(), timeout=None, method=None):
        stream = self.channel.stream_stream(method or f"/sandgate_api.envd.v1.Test/{name}")
        return stream(metadata=(*self.metadata, *metadata), timeout=timeout)


async def error_of(call) -> SandgateError:
    code, details, trailers = await call.code(), await call.details(), await call.trailing_metadata()
    return from_status(code, details, tuple(trailers))


@pytest.fixture
async def sandbox(core):
    return await core.owner.create()


@pytest.fixture
def line(core, sandbox):
    return Line(core.owner, sandbox.id)


@pytest.fixture
def agent(world, sandbox):
    return world.boxes[sandbox.id].agent


async def test_bytes_pass_both_ways_one_by_one(line):
    call = line.open("Echo")
    for message in (b"", b"\x00\xff", b"x" * 3_000_000):
        await call.write(message)
        assert await call.read() == message
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_metadata_passes_and_credentials_of_the_gateway_do_not(line, agent):
    call = line.open(
        "Echo",
        metadata=(
            ("acting-user-bin", "jörg".encode()),
            ("timeout-ms", "5"),
            ("request-id", "r1"),
            ("agent-token", "forged"),
            ("double", "1"),
            ("double", "2"),
        ),
    )
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert ("initial", "one") in tuple(await call.initial_metadata())
    assert ("initial-bin", b"\x00\xff") in tuple(await call.initial_metadata())
    assert ("trailing", "two") in tuple(await call.trailing_metadata())
    assert ("trailing-bin", b"\xff\x00") in tuple(await call.trailing_metadata())
    (seen,) = agent.calls
    metadata = [(key, value) for key, value in seen["metadata"] if key != "user-agent"]
    assert sorted(metadata, key=str) == sorted(
        [
            ("acting-user-bin", "jörg".encode()),
            ("timeout-ms", "5"),
            ("request-id", "r1"),
            ("agent-token", agent.token),
            ("double", "1"),
            ("double", "2"),
        ],
        key=str,
    )


async def test_error_of_the_agent_arrives_as_it_was_raised(line):
    call = line.open("Fail")
    assert await call.read() == b"before"
    error = await error_of(call)
    assert await call.code() is grpc.StatusCode.DATA_LOSS
    assert (error.message, error.error_code) == ("what was kept is gone: ä", "slug")


async def test_unavailable_in_the_agents_own_words_passes(line):
    call = line.open("Unavailable")
    error = await error_of(call)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert error.message == "the agent's own words"


async def test_unknown_method_is_refused_by_the_agent(line):
    for method in ("/sandgate_api.envd.v1.Newer/Thing", "/sandgate_api.agent.v1.Agent/Newer"):
        call = line.open("", method=method)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_cancellation_reaches_the_agent(line, agent):
    call = line.open("Hang")
    assert await call.read() == b"started"
    call.cancel()
    async with asyncio.timeout(20):
        await agent.cancelled.wait()


async def test_deadline_reaches_the_agent(line, agent):
    call = line.open("Hang", timeout=3)
    assert await call.read() == b"started"
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(20):
        await agent.cancelled.wait()
    assert 0 < agent.calls[0]["remaining"] < 4


async def test_call_without_deadline_has_none_at_the_agent(line, agent):
    call = line.open("Echo")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    remaining = agent.calls[0]["remaining"]
    assert remaining is None or remaining > 10**6


async def test_agent_may_end_while_the_callers_side_is_open(line):
    call = line.open("Early")
    assert await call.read() == b"enough"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_slow_reader_slows_the_agent(line, agent):
    call = line.open("Flood")
    await call.read()
    sent = -1
    while sent != agent.sent:
        sent = agent.sent
        await asyncio.sleep(0.3)
    # What fits into the buffers of two connections, not the 6.5 GB that the agent has.
    assert sent < 2000
    call.cancel()


async def test_killing_the_sandbox_ends_its_streams_as_not_found(core, line, sandbox):
    # R13, R14
    call = line.open("Hang")
    await call.read()
    await core.owner.call("Kill", id=sandbox.id)
    error = await error_of(call)
    assert type(error) is SandboxNotFound
    assert error.message == SandboxNotFound.of(sandbox.id).message


async def test_sandbox_that_died_is_not_found_and_its_record_ends(core, line, world, sandbox):
    await world.lose(sandbox.id)
    error = await error_of(line.open("Echo"))
    assert type(error) is SandboxNotFound
    assert await core.owner.ids() == []


async def test_agent_that_does_not_answer_is_unreachable_without_a_path_of_the_host(core, line, world, sandbox):
    # The box exists, its server does not.
    await world.boxes[sandbox.id].server.stop(0)
    error = await error_of(line.open("Echo"))
    assert type(error) is SandboxUnreachable
    assert "/" not in error.message
    assert await core.owner.ids() == [sandbox.id]


async def test_init_is_not_relayed(core, sandbox, agent):
    stub = agent_pb2_grpc.AgentStub(core.internal.channel)
    for client in (core.owner, core.internal):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Init(
                agent_pb2.InitRequest(sandbox_id="other"), metadata=(*client.credentials, ("sandbox-id", sandbox.id))
            )
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(agent.inits) == 1


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ([], grpc.StatusCode.UNAUTHENTICATED),
        ([("sandbox-id", "ID")], grpc.StatusCode.UNAUTHENTICATED),
        ([("api-key", "KEY")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("api-key", "KEY"), ("sandbox-id", "../x")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("api-key", "KEY"), ("sandbox-id", "inobody")], grpc.StatusCode.NOT_FOUND),
        ([("api-key", "KEY"), ("sandbox-id", "ID"), ("sandbox-id", "ID")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("api-key", "OTHER"), ("sandbox-id", "ID")], grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_caller_must_prove_itself_and_name_its_own_sandbox(core, sandbox, agent, metadata, code):
    other = (await core.internal.call("CreateKey", name="other", owner="other", create_team=True)).secret
    ((_, key),) = core.owner.credentials
    known = {"ID": sandbox.id, "KEY": key, "OTHER": other}
    call = core.client().channel.stream_stream("/sandgate_api.envd.v1.Test/Echo")(
        metadata=[(name, known.get(value, value)) for name, value in metadata]
    )
    assert await call.code() is code
    assert not agent.calls


async def test_the_gateway_itself_may_call_any_agent(core, sandbox, agent):
    call = Line(core.internal, sandbox.id).open("Echo")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert all(key != "internal-token" for key, _ in agent.calls[0]["metadata"])
