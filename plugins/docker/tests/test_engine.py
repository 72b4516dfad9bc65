"""The engine between us and the sandboxes: away for a while, silent, on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandgate_errors import CapabilityMissing, FailedPrecondition, Unavailable
from sandgate_plugin_api import Capability, Egress
from sandgate_plugin_docker.backend import DockerBackend
from sandgate_plugin_docker.checks import how_to_reach
from sandgate_testing.engine import docker, engine_socket


class Road:
    """A way to the engine that can be closed, swallow what is sent, or let everything pass but removals."""

    def __init__(self) -> None:
        self.state = "open"
        self.tasks: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        far = None
        try:
            if self.state == "closed":
                return
            if self.state == "silent":
                await asyncio.sleep(3600)
            first = await reader.read(65536)
            if self.state == "without removals" and first.startswith(b"DELETE "):
                return
            there, far = await asyncio.open_unix_connection(engine_socket())
            far.write(first)
            await asyncio.gather(self.pump(reader, far), self.pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, far):
                if each is not None:
                    each.close()
            self.tasks.discard(task)

    @staticmethod
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
        # Attaching closes one direction before the other.
        with contextlib.suppress(OSError):
            sink.write_eof()


@asynccontextmanager
async def road(*, port: bool = False) -> AsyncIterator[tuple[Road, str]]:
    way = Road()
    with tempfile.TemporaryDirectory(prefix="sgr-") as folder:
        if port:
            server = await asyncio.start_server(way.carry, "127.0.0.1", 0)
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        else:
            server = await asyncio.start_unix_server(way.carry, f"{folder}/engine")
            address = f"unix://{folder}/engine"
        try:
            yield way, address
        finally:
            server.close()
            for task in list(way.tasks):
                task.cancel()
            if way.tasks:
                await asyncio.wait(way.tasks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.05)


async def test_engine_that_is_down_loses_nothing_and_says_when_to_come_again(gateway, run):
    async with road() as (way, address), gateway.backend(host=address) as backend:
        placement = await gateway.create(backend)
        request = await gateway.request(backend)
        way.state = "closed"
        # The sandbox itself needs no engine.
        assert await run(placement, "echo alive") == (0, "alive\n")
        for call in (
            backend.create(request, backend.reserve(request)),
            backend.locate(placement.handle),
            backend.destroy(placement.handle),
            backend.pause(placement.handle, memory=True),
            backend.survey(),
        ):
            with pytest.raises(Unavailable) as error:
                await call
            assert error.value.retry_after
        way.state = "open"
        assert await backend.locate(placement.handle) == placement
        assert await backend.create(request, backend.reserve(request))
        assert len(gateway.containers()) == 2


async def test_engine_that_is_down_at_the_start_is_one_line(gateway):
    with pytest.raises(FailedPrecondition, match="unix:///none/here"):
        await DockerBackend(gateway.context(host="unix:///none/here")).open()
    with pytest.raises(FailedPrecondition, match="none of unix"):
        await DockerBackend(gateway.context(host="fd://3")).open()
    if importlib.util.find_spec("asyncssh") is None:
        with pytest.raises(FailedPrecondition, match="pip install"):
            await DockerBackend(gateway.context(host="ssh://me@example.org")).open()


async def test_silent_engine_is_given_up_on(gateway, monkeypatch):
    monkeypatch.setattr("sandgate_plugin_docker.engine._LOOK_LIMIT", 0.5)
    async with road() as (way, address), gateway.backend(host=address) as backend:
        way.state = "silent"
        with pytest.raises(Unavailable, match="has not answered"):
            await backend.survey()
        way.state = "open"


async def test_dead_spare_sandbox_that_cannot_be_removed_yet_costs_nobody_a_sandbox(gateway, run, monkeypatch):
    monkeypatch.setattr("sandgate_plugin_docker.fleet._STRAY_INTERVAL", 0.1)
    templates = {"base": {"image": gateway.images.debian(), "warm": 1}}
    async with road() as (way, address), gateway.backend(host=address, templates=templates) as backend:
        ready = backend._pools["base"]._ready
        await until(lambda: bool(ready))
        dead = ready[0].container
        docker("kill", dead)
        way.state = "without removals"
        assert await run(await gateway.create(backend), "echo whole") == (0, "whole\n")
        assert dead in gateway.containers()
        way.state = "open"
        await until(lambda: dead not in gateway.containers())


async def test_engine_on_another_machine_is_used_by_port_and_tls(gateway, run):
    async with road(port=True) as (_, address):
        async with gateway.backend(host=address) as backend:
            assert Capability.NO_INTERNET not in backend.capabilities
            placement = await gateway.create(backend)
            assert await run(placement, "id -un; echo $((6 * 7))") == (0, "user\n42\n")
            # Megabytes one way, and streams at once.
            code, text = await run(placement, "head -c 3000000 /dev/zero | tr '\\0' x")
            assert (code, len(text)) == (0, 3_000_000)
            assert set(await asyncio.gather(*(run(placement, "echo hi") for _ in range(10)))) == {(0, "hi\n")}
            mounts = docker("inspect", "-f", "{{range .Mounts}}{{.Type}} {{end}}", str(placement.handle["container"]))
            assert mounts.stdout.split() == ["volume"]
            with pytest.raises(CapabilityMissing):
                await gateway.create(backend, allow_internet_access=False, egress=Egress(internet=False))
            handle = await backend.pause(placement.handle, memory=False)
            again = await backend.resume(handle)
            assert await run(again, "echo again", "user") == (0, "again\n")
        # Another core makes the way anew.
        async with gateway.backend(host=address) as backend:
            found = await backend.locate(placement.handle)
            assert found is not None
            assert await run(found, "echo found", "user") == (0, "found\n")
            await backend.destroy(placement.handle)
        volume = docker("volume", "ls", "-q", "--filter", f"label=sandgate.gateway={gateway.id}").stdout.split()
        docker("volume", "rm", *volume)


async def test_agent_behind_a_port_answers_nobody_who_does_not_know_its_token(gateway):
    import ssl

    import grpc

    from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc

    async with gateway.backend(agents="port") as backend:
        placement = await gateway.create(backend)
        name = str(placement.handle["container"])
        port = int(docker("port", name, "49983/tcp").stdout.rpartition(":")[2])
        certificate = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        options = (("grpc.ssl_target_name_override", "sandgate-agent"),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await agent_pb2_grpc.AgentStub(channel).Metrics(agent_pb2.MetricsRequest(), timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # Its key is on none of the ways that anybody can look at.
        shown = docker("inspect", name).stdout + docker("logs", name).stdout
        assert "PRIVATE KEY" not in shown
        assert placement.agent.token not in shown


async def test_port_is_open_on_loopback_only_where_the_engine_is_here(gateway):
    async with gateway.backend(agents="port") as backend:
        placement = await gateway.create(backend)
        assert docker("port", str(placement.handle["container"])).stdout.startswith("49983/tcp -> 127.0.0.1:")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"unknown": 1}, "'unknown'"),
        ({"pull": "sometimes"}, "'pull'"),
        ({"templates": {"a": {}}}, "templates.a.image"),
        ({"templates": {"a": {"image": "x", "memory_mb": "1"}}}, "templates.a.memory_mb"),
        ({"templates": {"a": {"image": "x", "start_command": "y", "entrypoint": True}}}, "two ways"),
        ({"templates": {"a": {"image": "x", "aliases": ["b"]}, "b": {"image": "y"}}}, "'b' names two"),
        ({"templates": {"a": {"image": "x", "mounts": [{"source": "/x", "target": "/run"}]}}}, "would hide"),
        ({"templates": {"a": {"image": "x", "runtime": "runq"}}}, "no runtime 'runq'"),
        ({"templates": {"a": {"image": "x", "cpu_count": 999}}}, "CPUs only"),
        ({"templates": {"a": {"image": "x", "disk_size_mb": 100}}}, "disk_size_mb"),
        ({"agents": "port", "templates": {"a": {"image": "x", "read_only": True}}}, "read-only"),
    ],
)
async def test_wrong_setting_stops_the_start_with_one_line(gateway, settings, text):
    if "disk_size_mb" in text and "extfs" not in docker("info").stdout:
        pytest.skip("this engine may limit disks")
    with pytest.raises(FailedPrecondition) as error:
        await DockerBackend(gateway.context(**settings)).open()
    assert text in error.value.message
    assert "\n" not in error.value.message


def test_doctor_says_what_is_there_and_what_is_missing():
    name, fine, about = DockerBackend.diagnose({})[0]
    assert (name, fine) == ("engine", True)
    assert Path(about.partition(" at unix://")[2].partition(",")[0]).resolve() == engine_socket().resolve()
    assert [row[:2] for row in DockerBackend.diagnose({"host": "unix:///none"})] == [("engine", False)]
    assert [row[:2] for row in DockerBackend.diagnose({"x": 1})] == [("settings", False)]


def test_doctor_says_of_each_template_whether_it_can_be_used(images):
    templates = {
        "here": {"image": images.busybox()},
        "missing": {"image": "sandgate-none/at-all"},
        "unable": {"image": images.busybox(), "runtime": "none"},
    }
    for pull, able in (("missing", True), ("never", False)):
        rows = {row[0]: row[1:] for row in DockerBackend.diagnose({"templates": templates, "pull": pull})}
        assert rows["template 'here'"] == (True, f"the image {images.busybox()} is here")
        assert rows["template 'missing'"][0] is able
        assert rows["template 'unable'"][0] is False
        assert rows["template 'unable'"][1].startswith("the engine has no runtime 'none'")


def test_doctor_says_how_to_come_to_an_engine_that_does_not_answer(tmp_path):
    assert "start the engine" in how_to_reach(f"unix://{tmp_path}/none")
    assert how_to_reach("tcp://192.0.2.1:2376") == ""
    (tmp_path / "socket").touch(mode=0o600)
    assert how_to_reach(f"unix://{tmp_path}/socket") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_doctor_tells_who_may_not_use_an_engine_which_group_may(folder):
    (socket := folder / "socket").touch(mode=0o660)
    folder.chmod(0o755)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65534)
        os.write(writer, how_to_reach(f"unix://{socket}").encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as answer:
        assert "make it a member of the group 'root'" in answer.read()
