"""Commands and files by execd alone, where execd is in the hands of whoever is root in the sandbox, or is cut at any moment.

In execd's place stands a server that keeps files in memory and lies as each test says. What must hold is that a sandbox harms
nobody but itself: calls end, nothing is left open, and what it says is never more than one sandbox may cost.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web

from sandgate_agent.accounts import Account
from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_errors import InvalidArgument
from sandgate_plugin_api import Placement
from sandgate_plugin_api.testsuite.box import Agent, agent_at, rest_of
from sandgate_plugin_opensandbox.by_execd.agent import FarAgents, Surroundings
from sandgate_plugin_opensandbox.by_execd.client import TOKEN_HEADER, Client
from sandgate_plugin_opensandbox.by_execd.listing import Items
from sandgate_plugin_opensandbox.by_execd.ports import addressed
from sandgate_plugin_opensandbox.server import Endpoint

pytestmark = pytest.mark.timeout(120)

FOLDER = "/run/sandgate/execd"
ABOUT: Mapping[str, object] = {
    "session_id": "left",
    "cmd": "sleep",
    "args": [],
    "envs": {},
    "cwd": None,
    "tag": None,
    "stdin": True,
    "terminal": None,
    "until": None,
    "term_grace": 0,
    "group": False,
    "strict_output": False,
}
Talk = Callable[[web.WebSocketResponse], Awaitable[None]]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _silent(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


class Hostile:
    """Answers as execd does, but for what a test has put in place of it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        #: What is answered for a route, in place of the truth.
        self.answers: dict[tuple[str, str], Answer] = {}
        self.state: object = {"running": True, "output_offset": 0}
        #: What a session does after it said that it is connected.
        self.talk: Talk = _silent
        self.greets = True
        #: Sockets of sessions so far, lines of commands, sessions that were deleted.
        self.attached = 0
        self.lines: list[str] = []
        self.deleted: list[str] = []
        self.asked: list[str] = []
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Hostile]:
        runner = web.ServerRunner(web.Server(self._handle), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.path.strip("/")
        route = "pty/*" if path.startswith("pty/") and not path.endswith("/ws") else path
        self.asked.append(f"{method} {route}")
        if (answer := self.answers.get((method, route))) is not None:
            return await answer(request)  # type: ignore[arg-type]
        if path.endswith("/ws"):
            return await self._session(request)
        return await self._told(request, method, route)

    async def _told(self, request: web.BaseRequest, method: str, route: str) -> web.StreamResponse:
        path = request.query.get("path", "")
        match method, route:
            case "POST", "files/upload":
                await self._upload(request)
            case "GET", "files/download" if path in self.files:
                return web.Response(body=self.files[path])
            case "GET", "files/info":
                return web.json_response({path: {"path": path, "type": "directory", "size": 0, "mode": 755}})
            case "GET", "directories/list":
                below = {name.removeprefix(f"{path}/").partition("/")[0] for name in self.files}
                return web.json_response([{"path": f"{path}/{name}"} for name in sorted(below)])
            case "DELETE", "directories":
                self.files = {name: body for name, body in self.files.items() if not name.startswith(path + "/")}
            case "POST", "pty":
                self.lines.append((await request.json())["command"])
                return web.json_response({"session_id": f"s{len(self.lines)}"}, status=201)
            case "GET", "pty/*":
                return web.Response(text=json.dumps(self.state))
            case "DELETE", "pty/*":
                self.deleted.append(request.path.rpartition("/")[2])
            case _:
                return web.Response(status=404)
        return web.Response()

    async def _upload(self, request: web.BaseRequest) -> None:
        path = ""
        async for part in await request.multipart():
            assert isinstance(part, aiohttp.BodyPartReader)
            content = await part.read()
            if part.name == "metadata":
                path = json.loads(content)["path"]
            else:
                self.files[path] = bytes(content)

    async def _session(self, request: web.BaseRequest) -> web.StreamResponse:
        self.attached += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        with suppress(ConnectionError, RuntimeError):
            if self.greets:
                await socket.send_str('{"type": "connected"}')
            await self.talk(socket)
        return socket


class Box:
    """The gateway's side."""

    def __init__(self, execd: Hostile, sockets: Path) -> None:
        self.execd = execd
        self._sockets = sockets

    @asynccontextmanager
    async def agents(self) -> AsyncIterator[FarAgents]:
        async with AsyncExitStack() as closing:
            session = await closing.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()))
            agents = FarAgents(session, self._sockets, tls=ssl.create_default_context)
            closing.push_async_callback(agents.close)
            yield agents

    @asynccontextmanager
    async def opened(self, agents: FarAgents, *, new: bool) -> AsyncIterator[Agent]:
        async def where(port: int) -> Endpoint:
            return Endpoint(f"http://127.0.0.1:{self.execd.port}", {})

        account = Account(name="root", uid=0, gid=0, groups=(0,), home="/")
        surroundings = Surroundings(account=account, group="root", path=os.environ["PATH"])
        if not new:
            self.execd.files[f"{FOLDER}/surroundings.json"] = json.dumps(surroundings.record).encode()
        agent = await agents.open(
            "ibox", "id", where, token="t", execd_token="e", surroundings=surroundings if new else None
        )
        async with agent_at(Placement(handle={}, agent=agent.address)) as spoken:
            yield spoken

    @asynccontextmanager
    async def gateway(self, *, new: bool = True) -> AsyncIterator[Agent]:
        async with self.agents() as agents, self.opened(agents, new=new) as agent:
            if new:
                await agent.init("ibox")
            yield agent

    def leave(self, number: int | str, about: object) -> None:
        """A record as of an earlier gateway."""
        body = about if isinstance(about, bytes) else json.dumps(about).encode()
        self.execd.files[f"{FOLDER}/{number}/about.json"] = body


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    # Short, for socket addresses.
    with tempfile.TemporaryDirectory(prefix="sgx-") as sockets:
        async with Hostile().serving() as execd:
            yield Box(execd, Path(sockets))
        assert os.listdir(sockets) == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks_of_gateway() -> int:
    return sum("RequestHandler" not in repr(task) for task in asyncio.all_tasks())


async def settled(count: Callable[[], int], expected: int) -> bool:
    """Whether it comes down to this."""
    for _ in range(1000):
        if count() <= expected:
            return True
        await asyncio.sleep(0.02)
    return False


async def listed(agent: Agent) -> list[process_pb2.ProcessInfo]:
    found = await agent.process.List(process_pb2.ListRequest(), metadata=agent.metadata(), timeout=60)
    return list(found.processes)


async def refusal(attempt: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await attempt
    assert "reference" not in str(refused.value.details())
    return refused.value


def frame(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + data


# Records.

JUNK: tuple[object, ...] = (
    b"",
    b"[]",
    b"\xff" * 64,
    b"[" * 100_000,
    b"9" * 5000,
    {},
    {**ABOUT, "session_id": "../../command"},
    {**ABOUT, "session_id": "x" * 100_000},
    {**ABOUT, "cmd": ""},
    {**ABOUT, "cmd": "\0"},
    {**ABOUT, "cmd": "\ud800"},
    {**ABOUT, "tag": "\udfff"},
    {**ABOUT, "args": 3},
    {**ABOUT, "envs": []},
    {**ABOUT, "envs": {"a=b": "c"}},
    {**ABOUT, "terminal": [1]},
    {**ABOUT, "terminal": [float("inf"), 1]},
    {**ABOUT, "terminal": [-1, -1]},
    {**ABOUT, "terminal": [10**30, 1]},
    {**ABOUT, "until": float("inf")},
    {**ABOUT, "until": float("nan")},
    {**ABOUT, "until": 10**400},
    {**ABOUT, "term_grace": float("inf")},
    {**ABOUT, "term_grace": float("nan")},
    {**ABOUT, "term_grace": -1},
    {**ABOUT, "term_grace": 10**400},
)


async def test_junk_for_records_is_no_command_and_is_cleared_away(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    for number, about in enumerate(JUNK, 1):
        box.leave(number, about)
    async with box.gateway(new=False) as agent:
        assert await listed(agent) == []
        assert await settled(lambda: len(box.execd.files), 1)
    assert "unexpected error" not in caplog.text


@pytest.mark.parametrize("names", [["0", "-1", "007", "²", "9" * 300, str(2**31), str(2**64), "1.json", ""]])
async def test_names_that_are_no_numbers_of_ours_are_nobodys(box: Box, names: list[str]) -> None:
    for name in names:
        box.leave(name, ABOUT)
    box.leave(2**31 - 1, {**ABOUT, "session_id": "?"})
    async with box.gateway(new=False) as agent:
        assert await listed(agent) == []
        call = agent.start("true")
        assert (await call.read()).event.start.pid == 1
        call.cancel()


@pytest.mark.parametrize("body", ["5", "true", '"x"', "{}", "[1]", "[[]]", '[{"path": 1}, {}]', "[{]", "", "null"])
async def test_list_of_records_that_is_none_is_an_error_and_no_fault(
    box: Box, caplog: pytest.LogCaptureFixture, body: str
) -> None:
    async def lie(_request: web.Request) -> web.Response:
        return web.Response(text=body)

    box.execd.answers["GET", "directories/list"] = lie
    async with box.gateway(new=False) as agent:
        with suppress(grpc.aio.AioRpcError):
            assert await listed(agent) == []
    assert "unexpected error" not in caplog.text


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {"running": True},
        {"running": 1, "output_offset": 0},
        *(
            {"running": True, "output_offset": offset}
            for offset in (-1, 2**63, 10**400, 1.5, True, "7", None, float("inf"), float("nan"))
        ),
    ],
)
async def test_session_that_lies_of_itself_is_not_taken_up(box: Box, state: object) -> None:
    box.leave(1, ABOUT)
    # Numbers of this length are no JSON for all.
    box.execd.state = state
    async with box.gateway(new=False) as agent:
        assert await listed(agent) == []
        assert await settled(lambda: -len(box.execd.deleted), -1)
    assert box.execd.deleted == ["left"]
    assert box.execd.attached == 0


@pytest.mark.parametrize(
    "record", ["surroundings", "identity"], ids=["where the commands of it run", "what Init has said"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b'{"uid": Infinity, "gid": 0, "name": "root", "home": "/", "path": "", "group": "root"}',
        b'{"uid": 0, "gid": 0, "name": "root", "home": "\\u0000", "path": "", "group": "root"}',
        b'{"envs": {"a": 1}}',
        b'{"envs": 3, "log_commands": 1e400}',
        b'{"default_user": ["x"]}',
        b'{"log_commands": 99999999999999999999}',
    ],
)
async def test_damaged_record_is_an_error_and_no_fault(
    box: Box, caplog: pytest.LogCaptureFixture, record: str, content: bytes
) -> None:
    async with box.agents() as agents, box.opened(agents, new=False) as agent:
        box.execd.files[f"{FOLDER}/{record}.json"] = content
        with suppress(grpc.aio.AioRpcError):
            await listed(agent)
    assert "unexpected error" not in caplog.text


async def test_more_commands_than_there_may_be_are_not_taken_up(box: Box) -> None:
    """And each that is costs descriptors: what fails half way must give all of them back."""
    box.execd.answers["GET", "pty/*"] = _shut
    before = descriptors()
    for number in range(1, 1500):
        box.leave(number, {**ABOUT, "session_id": f"s{number}"})
    async with box.gateway(new=False) as agent:
        assert await listed(agent) == []
        assert await settled(lambda: len(box.execd.files), 1)
    # Those of the library for calls stay.
    assert await settled(descriptors, before + 20)


async def _shut(_request: web.Request) -> web.Response:
    return web.json_response({"running": False, "output_offset": 0})


async def test_adoption_that_fails_half_way_leaves_nothing_open(box: Box) -> None:
    for number in range(1, 9):
        box.leave(number, {**ABOUT, "session_id": f"s{number}"})
    begun = 0

    async def every_fifth_fails(_request: web.Request) -> web.Response:
        nonlocal begun
        begun += 1
        fails = begun % 5 == 0
        await asyncio.sleep(0.2 * fails)
        return web.Response(status=503) if fails else web.json_response(box.execd.state)

    box.execd.answers["GET", "pty/*"] = every_fifth_fails
    async with box.gateway(new=False) as agent:
        await refusal(listed(agent))
        await asyncio.sleep(0.3)
        before, tasks = descriptors(), tasks_of_gateway()
        for _ in range(5):
            await refusal(listed(agent))
        assert await settled(descriptors, before + 2)
        assert await settled(tasks_of_gateway, tasks + 2)


async def test_many_who_wait_for_a_silent_execd_wait_together(box: Box) -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    box.execd.answers["GET", "files/download"] = never
    async with box.agents() as agents, box.opened(agents, new=False) as agent:
        calls = [asyncio.ensure_future(refusal(listed(agent))) for _ in range(30)]
        await asyncio.sleep(0.5)
        assert box.execd.asked.count("GET files/download") == 1
        # The gateway ends though execd does not answer, and all hear of it.
        began = time.monotonic()
        await agents.forget("ibox")
        await asyncio.wait(calls)
        assert time.monotonic() - began < 10
        assert {call.result().code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}


# Sessions.


@pytest.mark.parametrize("code", ["true", "3.5", '"7"', "null", "[]", "9" * 400, "-5", "256", "1e999", "NaN", "{}"])
async def test_command_ends_whatever_is_told_for_an_exit_code(box: Box, code: str) -> None:
    async def end(socket: web.WebSocketResponse) -> None:
        await socket.send_str(f'{{"type": "exit", "exit_code": {code}}}')
        await asyncio.sleep(5)

    box.execd.talk = end
    async with box.gateway() as agent:
        assert (await rest_of(agent.start("true")))[-1].HasField("end")
        assert await listed(agent) == []


@pytest.mark.parametrize("offset", ["Infinity", "-7", "NaN", '"x"', "true", "1e999", "9" * 400, "[]"])
async def test_command_ends_whatever_is_told_of_its_output(box: Box, offset: str) -> None:
    async def end(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(frame(1, b"said"))
        await socket.send_str('{"type": "exit", "exit_code": 3}')

    async def lie(_request: web.Request) -> web.Response:
        return web.Response(text=f'{{"running": false, "output_offset": {offset}}}')

    box.execd.talk = end
    box.execd.answers["GET", "pty/*"] = lie
    async with box.gateway() as agent:
        events = await rest_of(agent.start("true"))
    assert events[-1].end.exit_code == 3


async def test_output_that_is_promised_and_never_comes_is_waited_for_once(box: Box) -> None:
    async def end(socket: web.WebSocketResponse) -> None:
        if box.execd.attached == 1:
            await socket.send_str('{"type": "exit", "exit_code": 0}')
        await asyncio.sleep(3600)

    box.execd.talk = end
    box.execd.state = {"running": False, "output_offset": 2**62}
    async with box.gateway() as agent:
        error = await refusal(rest_of(agent.start("true")))
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert await settled(lambda: len(box.execd.files), 2)
        assert await listed(agent) == []


async def test_replay_from_nowhere_is_a_loss_and_no_fault(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    async def lie(socket: web.WebSocketResponse) -> None:
        for data in (b"", b"\3", b"\3\0", b"\3" + b"\xff" * 8 + b"x", b"\3" + b"\0" * 8, b"\1", b"\x09junk", b"\xff"):
            await socket.send_bytes(data)
        for text in (
            "",
            "[]",
            "{",
            '{"type": 3}',
            '{"type": "error"}',
            '{"type": "error", "message": [1]}',
            "[" * 9999,
        ):
            await socket.send_str(text)
        await socket.send_str('{"type": "exit", "exit_code": 0}')

    box.execd.talk = lie
    async with box.gateway() as agent:
        assert (await refusal(rest_of(agent.start("true")))).code() is grpc.StatusCode.DATA_LOSS
        assert await settled(lambda: len(box.execd.files), 2)
        assert await listed(agent) == []
    assert "cannot be followed" not in caplog.text


async def test_session_that_is_cut_at_once_is_not_attached_without_end(box: Box) -> None:
    async def cut(socket: web.WebSocketResponse) -> None:
        await socket.close()

    box.execd.talk = cut
    async with box.gateway() as agent:
        call = agent.start("true")
        await call.read()
        await asyncio.sleep(3)
        assert box.execd.attached < 10
        call.cancel()


async def test_complaints_are_written_down_once(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    async def complain(socket: web.WebSocketResponse) -> None:
        for _ in range(1000):
            await socket.send_str('{"type": "error", "message": "a\\nb"}')
        await socket.send_str('{"type": "exit", "exit_code": 0}')

    box.execd.talk = complain
    async with box.gateway() as agent:
        await rest_of(agent.start("true"))
    assert sum("trouble with a session" in record.message for record in caplog.records) == 1
    assert all("\n" not in record.message for record in caplog.records if "trouble" in record.message)


@pytest.mark.parametrize("size", [0, 1])
async def test_frames_before_the_beginning_cost_no_more_than_they_may(box: Box, size: int) -> None:
    """However short they are, and whoever else is served meanwhile."""

    async def flood(socket: web.WebSocketResponse) -> None:
        piece = b"\1" * size
        for number in itertools.count():
            await socket.send_bytes(piece)
            if number % 100 == 0:
                # It stands in the gateway's own process here.
                await asyncio.sleep(0)

    box.execd.greets = False
    box.execd.talk = flood
    async with box.gateway() as agent:
        began = time.process_time()
        error = await refusal(agent.run("true"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert time.process_time() - began < 20


async def test_sizes_that_come_faster_than_execd_takes_them_cost_one_task(box: Box) -> None:
    async with box.gateway() as agent:
        process = process_pb2.ProcessConfig(cmd="sh")
        pty = process_pb2.PTY(size=process_pb2.PTY.Size(cols=0, rows=0))
        call = agent.process.Start(
            process_pb2.StartRequest(process=process, pty=pty), metadata=agent.metadata(), timeout=60
        )
        pid = (await call.read()).event.start.pid
        tasks = tasks_of_gateway()
        for number in (1, 65_535, *range(1, 300)):
            size = process_pb2.PTY.Size(cols=number, rows=65_535)
            update = process_pb2.UpdateRequest(
                process=process_pb2.ProcessSelector(pid=pid), pty=process_pb2.PTY(size=size)
            )
            await agent.process.Update(update, metadata=agent.metadata(), timeout=30)
        assert tasks_of_gateway() < tasks + 20
        call.cancel()


async def test_signal_is_told_once_though_the_socket_is_cut_later(box: Box) -> None:
    told: list[str] = []
    cut = asyncio.Event()

    async def talk(socket: web.WebSocketResponse) -> None:
        async def hear() -> None:
            async for message in socket:
                told.append(message.data)  # noqa: PERF401 - it never comes to its end

        hearing = asyncio.create_task(hear())
        if box.execd.attached == 1:
            await cut.wait()
        else:
            await asyncio.wait({hearing})
        hearing.cancel()
        await socket.close()

    box.execd.talk = talk
    async with box.gateway() as agent:
        call = agent.start("true", stdin=False)
        pid = (await call.read()).event.start.pid
        await agent.process.SendSignal(
            process_pb2.SendSignalRequest(
                process=process_pb2.ProcessSelector(pid=pid), signal=process_pb2.SIGNAL_SIGTERM
            ),
            metadata=agent.metadata(),
            timeout=30,
        )
        cut.set()
        assert await settled(lambda: -box.execd.attached, -2)
        await asyncio.sleep(0.3)
        call.cancel()
    assert [json.loads(text)["signal"] for text in told] == ["SIGTERM"]


# Other gateways, and the end of this one.


async def test_gateway_whose_place_another_takes_lets_go_until_it_is_called_again(box: Box) -> None:
    taken = asyncio.Event()

    async def talk(socket: web.WebSocketResponse) -> None:
        if box.execd.attached == 1:
            await taken.wait()
            await socket.close(code=4001, message=b"taken over")
        else:
            await asyncio.sleep(3600)

    box.execd.talk = talk
    async with box.gateway() as agent:
        call = agent.start("sleep", stdin=True)
        pid = (await call.read()).event.start.pid
        taken.set()
        error = await refusal(rest_of(call))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(1)
        assert box.execd.attached == 1
        assert box.execd.deleted == []
        # It is called, so the sandbox is its own again.
        assert [process.pid for process in await listed(agent)] == [pid]
        assert box.execd.attached == 2


async def test_end_of_a_gateway_leaves_nothing_open_and_its_commands_alone(box: Box) -> None:
    async with box.agents() as agents:
        # What is made once stays.
        for again in (False, True):
            async with box.opened(agents, new=True) as agent:
                await agent.init("ibox")
                if again:
                    before, tasks = descriptors(), tasks_of_gateway()
                calls = [agent.start("sleep", stdin=number % 2 == 0) for number in range(20)]
                for call in calls:
                    await call.read()
                process = process_pb2.ProcessConfig(cmd="sh")
                pty = process_pb2.PTY(size=process_pb2.PTY.Size(cols=1, rows=1))
                terminal = agent.process.Start(
                    process_pb2.StartRequest(process=process, pty=pty), metadata=limited(agent, 60), timeout=60
                )
                await terminal.read()
                await agents.forget("ibox")
                for call in (*calls, terminal):
                    with suppress(grpc.aio.AioRpcError):
                        await rest_of(call)
        assert await settled(descriptors, before)
        assert await settled(tasks_of_gateway, tasks + 3)
    assert box.execd.deleted == []


def limited(agent: Agent, seconds: float) -> tuple[tuple[str, str | bytes], ...]:
    return (*agent.metadata(), ("timeout-ms", str(round(1000 * seconds))))


@pytest.mark.parametrize(
    "route",
    [("GET", "files/info"), ("POST", "pty"), ("POST", "files/upload"), ("WS", "")],
    ids=lambda it: it[1] or it[0],
)
async def test_end_of_a_gateway_ends_a_start_at_whatever_step(box: Box, route: tuple[str, str]) -> None:
    """And with it what was started: nobody has been told of it."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        reached.set()
        await go_on.wait()
        return web.Response(status=503)

    async def held(_socket: web.WebSocketResponse) -> None:
        reached.set()
        await asyncio.sleep(3600)

    async with box.agents() as agents, box.opened(agents, new=True) as agent:
        await agent.init("ibox")
        before, tasks = descriptors(), tasks_of_gateway()
        if route[0] == "WS":
            box.execd.greets, box.execd.talk = False, held
        else:
            box.execd.answers[route] = hold
        call = agent.start("sleep")
        await asyncio.wait_for(reached.wait(), 30)
        began = time.monotonic()
        await agents.forget("ibox")
        go_on.set()
        assert time.monotonic() - began < 15
        await refusal(rest_of(call))
        assert await settled(descriptors, before)
        assert await settled(tasks_of_gateway, tasks)
    assert set(box.execd.files) <= {f"{FOLDER}/surroundings.json", f"{FOLDER}/identity.json"}
    assert len(box.execd.deleted) == (route[1] not in {"files/info", "pty"})


async def test_agent_of_a_sandbox_is_opened_once_however_many_ask(box: Box) -> None:
    async def where(port: int) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{box.execd.port}", {})

    async def slow(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    box.execd.answers["DELETE", "directories"] = slow
    account = Account(name="root", uid=0, gid=0, groups=(0,), home="/")
    new = Surroundings(account=account, group="root", path="/bin")
    async with box.agents() as agents:
        opened = await asyncio.gather(
            *(
                agents.open("ibox", "id", where, token="t", execd_token="e", surroundings=surroundings)
                for surroundings in (new, None, new, None)
            )
        )
        assert opened[2] is opened[3]
        async with agent_at(Placement(handle={}, agent=opened[3].address)) as agent:
            await agent.init("ibox")
        await asyncio.gather(agents.forget("ibox"), agents.forget("ibox"))


# Files.


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * 30_000_000 + b"[]]",
        b'[{"path": "/x", "a": [' + b"[]," * 10_000_000 + b"[]]}]",
        b"[" + b'{"path": "/x", "type": "file", "size": 1, "mode": 644},' * 400_000 + b"{}]",
        b'[{"path": "/' + b"x" * 50_000_000 + b'"}]',
        b"[" * 50_000_000,
    ],
    ids=["lists", "one object", "entries", "one name", "depth"],
)
async def test_list_that_stands_for_gigabytes_is_refused_before_it_is_held(box: Box, body: bytes) -> None:
    async def bomb(_request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with box.gateway() as agent:
        await listed(agent)
        box.execd.answers["GET", "directories/list"] = bomb
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        request = filesystem_pb2.ListDirRequest(path="/", depth=3)
        error = await refusal(agent.filesystem.ListDir(request, metadata=agent.metadata(), timeout=60))
        assert error.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


async def test_watching_much_takes_no_more_of_the_gateway_than_its_share(box: Box) -> None:
    """However many watch: all sandboxes have one gateway."""
    files = [{"path": f"/{number}", "type": "file", "size": 1, "mode": 644} for number in range(15_000)]
    body = json.dumps(files).encode()

    async def many(_request: web.Request) -> web.Response:
        return web.Response(body=body)

    box.execd.answers["GET", "directories/list"] = many
    async with box.gateway() as agent:
        request = filesystem_pb2.WatchDirRequest(path="/")
        calls = [agent.filesystem.WatchDir(request, metadata=agent.metadata(), timeout=60) for _ in range(12)]
        await asyncio.sleep(4)
        assert 1 <= box.execd.asked.count("GET directories/list") <= 4
        for call in calls:
            call.cancel()


async def test_watchers_are_counted_until_they_are_gone(box: Box) -> None:
    async def nothing(_request: web.Request) -> web.Response:
        return web.Response(body=b"null")

    box.execd.answers["GET", "directories/list"] = nothing
    options: dict[str, Any] = {"timeout": 30}
    async with box.gateway() as agent:
        options["metadata"] = agent.metadata()
        made = [
            (await agent.filesystem.CreateWatcher(filesystem_pb2.CreateWatcherRequest(path="/"), **options)).watcher_id
            for _ in range(256)
        ]
        for attempt in (
            agent.filesystem.CreateWatcher(filesystem_pb2.CreateWatcherRequest(path="/"), **options),
            rest_of_watch(agent, options),
        ):
            assert (await refusal(attempt)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await agent.filesystem.RemoveWatcher(filesystem_pb2.RemoveWatcherRequest(watcher_id=made[0]), **options)
        for _ in range(3):
            call = agent.filesystem.WatchDir(filesystem_pb2.WatchDirRequest(path="/"), **options)
            assert (await call.read()).HasField("start")
            call.cancel()
            await asyncio.sleep(0.2)


async def rest_of_watch(agent: Agent, options: dict[str, Any]) -> None:
    async for _ in agent.filesystem.WatchDir(filesystem_pb2.WatchDirRequest(path="/"), **options):
        pass


async def test_answer_without_end_is_not_read_to_it(box: Box) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async with box.gateway() as agent:
        for route, attempt in (
            (
                ("GET", "files/info"),
                lambda: agent.filesystem.Stat(
                    filesystem_pb2.StatRequest(path="/x"), metadata=agent.metadata(), timeout=60
                ),
            ),
            (
                ("GET", "metrics"),
                lambda: agent.agent.Metrics(agent_pb2.MetricsRequest(), metadata=agent.metadata(), timeout=60),
            ),
            (("POST", "pty"), lambda: agent.run("true")),
        ):
            box.execd.answers[route] = endless
            assert (await refusal(attempt())).code() is grpc.StatusCode.INTERNAL
            del box.execd.answers[route]


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2**63},
        {"size": -1},
        {"size": float("inf")},
        {"size": float("nan")},
        {"mode": float("inf")},
        {"mode": 10**30},
        {"path": "\ud800"},
        {"path": "x" * 5000},
        {"owner": "\udfff"},
        {"owner": "x" * 5000},
        {"owner": {"a": 1}},
        {"modified_at": "9999-99-99T99:99:99Z"},
        {"modified_at": "0000-01-01T00:00:00Z"},
        {"modified_at": "9999-12-31T23:59:59-23:59"},
        {"modified_at": "0001-01-01T00:00:00+23:59"},
        {"modified_at": [1]},
        {"type": ["file"]},
    ],
    ids=str,
)
async def test_entry_that_cannot_be_is_an_error_and_no_fault(
    box: Box, caplog: pytest.LogCaptureFixture, change: Mapping[str, object]
) -> None:
    about = {"path": "/x", "type": "file", "size": 1, "mode": 644, "modified_at": "2026-01-01T00:00:00Z", **change}

    async def lie(_request: web.Request) -> web.Response:
        return web.Response(text=json.dumps({"/x": about}))

    async def lie_in_list(_request: web.Request) -> web.Response:
        return web.Response(text=json.dumps([about]))

    options: dict[str, Any] = {"timeout": 30}
    async with box.gateway() as agent:
        options["metadata"] = agent.metadata()
        box.execd.answers["GET", "directories/list"] = lie_in_list
        with suppress(grpc.aio.AioRpcError):
            await agent.filesystem.ListDir(filesystem_pb2.ListDirRequest(path="/", depth=1), **options)
        box.execd.answers["GET", "files/info"] = lie
        with suppress(grpc.aio.AioRpcError):
            await agent.filesystem.Stat(filesystem_pb2.StatRequest(path="/x"), **options)
        with suppress(grpc.aio.AioRpcError):
            await agent.read("/x")
    assert "unexpected error" not in caplog.text


@pytest.mark.parametrize("value", ["1e300", "Infinity", "NaN", "-1", "true", '"1"', "null", "9" * 400])
@pytest.mark.parametrize("name", ["timestamp", "cpu_count", "cpu_used_pct", "mem_total_mib"])
async def test_measurement_that_cannot_be_is_an_error_and_no_fault(
    box: Box, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    figures = {"timestamp": "1", "cpu_count": "1", "cpu_used_pct": "1", "mem_total_mib": "1", "mem_used_mib": "1"}
    text = ", ".join(f'"{each}": {figure}' for each, figure in {**figures, name: value}.items())

    async def lie(_request: web.Request) -> web.Response:
        return web.Response(text=f"{{{text}}}")

    box.execd.answers["GET", "metrics"] = lie
    async with box.gateway() as agent:
        metrics = agent.agent.Metrics(agent_pb2.MetricsRequest(), metadata=agent.metadata(), timeout=30)
        assert (await refusal(metrics)).code() is grpc.StatusCode.INTERNAL
    assert "unexpected error" not in caplog.text


async def test_range_is_what_was_asked_for_though_execd_gives_all(box: Box) -> None:
    async def all_of_it(_request: web.Request) -> web.Response:
        return web.Response(body=b"0123456789")

    async def about(_request: web.Request) -> web.Response:
        return web.json_response({"/x": {"path": "/x", "type": "file", "size": 10, "mode": 644}})

    box.execd.answers["GET", "files/info"] = about
    async with box.gateway() as agent:
        box.execd.answers["GET", "files/download"] = all_of_it
        request = agent_pb2.ReadFileRequest(path="/x", offset=3, length=4)
        parts = [part async for part in agent.agent.ReadFile(request, metadata=agent.metadata(), timeout=30)]
    assert b"".join(part.data for part in parts[1:]) == b"3456"


async def test_download_that_is_cut_is_not_taken_for_whole(box: Box) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"01234")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def about(_request: web.Request) -> web.Response:
        return web.json_response({"/x": {"path": "/x", "type": "file", "size": 10, "mode": 644}})

    box.execd.answers["GET", "files/info"] = about
    async with box.gateway() as agent:
        box.execd.answers["GET", "files/download"] = half
        assert (await refusal(agent.read("/x"))).code() is grpc.StatusCode.UNAVAILABLE


async def test_upload_that_its_caller_spoils_is_the_callers_fault_and_not_taken_for_whole(box: Box) -> None:
    async def requests() -> AsyncIterator[agent_pb2.WriteFileRequest]:
        yield agent_pb2.WriteFileRequest(header=agent_pb2.WriteFileRequest.Header(path="/x"))
        yield agent_pb2.WriteFileRequest(data=b"begun")
        yield agent_pb2.WriteFileRequest(header=agent_pb2.WriteFileRequest.Header(path="/y"))

    async def nothing(_request: web.Request) -> web.Response:
        return web.Response(status=404)

    async with box.gateway() as agent:
        box.execd.answers["GET", "files/info"] = nothing
        error = await refusal(agent.agent.WriteFile(requests(), metadata=agent.metadata(), timeout=30))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "/x" not in box.execd.files


TEXT = b' [ {"a": "\xc3\xa9]},{"} , {}\n,{"b":[{"c":[]}]}] '


@pytest.mark.parametrize("cut", range(len(TEXT)))
def test_list_is_read_whole_wherever_it_is_cut(cut: int) -> None:
    items = Items()
    found = [item for piece in (TEXT[:cut], TEXT[cut:]) for item in items.feed(piece)]
    items.end()
    assert found == [{"a": "é]},{"}, {}, {"b": [{"c": []}]}]


@pytest.mark.parametrize("text", [b"", b"null", b" null ", b"[]", b" [ ] "])
def test_list_of_nothing_is_empty(text: bytes) -> None:
    for cut in range(len(text) + 1):
        items = Items()
        assert [item for piece in (text[:cut], text[cut:]) for item in items.feed(piece)] == []
        items.end()


@pytest.mark.parametrize(
    "text", [b"[", b"[{}", b"[{},", b"[{},]", b"[,{}]", b"[{}{}]", b"[{}]x", b"[1]", b"nul", b"nulls", b"{}", b"[{]"]
)
def test_list_that_is_none_is_refused(text: bytes) -> None:
    items = Items()
    with pytest.raises(ValueError, match=r".+"):  # noqa: PT012 - at either
        list(items.feed(text))
        items.end()


# Ports.


@pytest.mark.parametrize(
    "path",
    [
        b"/..",
        b"/../../other/proxy/44772/command",
        b"/a/../../b",
        b"/%2e%2e/x",
        b"/.%2E/x",
        b"/..%2fx",
        b"/%252e%252e%252fx",
        b"/..\\x",
        b"/..;a/x",
        b"/a/..;/..;/x",
        b"/./../x",
        b"//../../x",
    ],
)
def test_path_that_climbs_out_of_its_port_is_refused(path: bytes) -> None:
    """A relay on the way that walks it would come to other ports, and to other sandboxes."""
    with pytest.raises(InvalidArgument, match="leads out"):
        addressed(b"GET %b HTTP/1.1\r\nHost: x" % path, Endpoint("http://10.0.0.1/v1/sandboxes/id/proxy/80", {}))


@pytest.mark.parametrize("path", [b"/a/../b", b"/a/b/../../c", b"/...", b"/?a=/../..", b"/a..b/..c", b"/%2e/x", b"/"])
def test_path_that_stays_in_its_port_passes_as_it_is(path: bytes) -> None:
    head = addressed(b"GET %b HTTP/1.1\r\nHost: x" % path, Endpoint("http://10.0.0.1/proxy/80", {}))
    assert head.startswith(b"GET /proxy/80%b HTTP/1.1\r\n" % path)


@pytest.mark.parametrize(
    "base", ["http://10.0.0.1:41000/proxy/8000", "http://10.0.0.1:41001", "http://10.0.0.1/v1/x/8000"]
)
async def test_token_of_execd_is_told_to_execd_and_to_no_program_behind_a_port(base: str) -> None:
    """Who may run as somebody else than root there would learn what commands execd."""

    async def where(port: int) -> Endpoint:
        return Endpoint("http://10.0.0.1:41000/proxy/44772" if port == 44772 else base, {"A": "b"})

    async with aiohttp.ClientSession() as session:
        client = Client(session, where, port=44772, token="secret")
        assert (await client.endpoint()).headers == {"A": "b", TOKEN_HEADER: "secret"}
        assert (await client.endpoint(8000)).headers == {"A": "b"}
