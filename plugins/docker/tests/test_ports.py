"""The way to an agent's port: what becomes of connections when it is given up. No engine is asked for any of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandgate_bundle import Bundle
from sandgate_plugin_docker.boxes import Box, Identity, Shelf
from sandgate_plugin_docker.containers import AGENT_PORT
from sandgate_plugin_docker.engine import Engine
from sandgate_plugin_docker.ports import ByPort
from sandgate_plugin_docker.settings import DockerSettings

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="agents that are reached by a port have certificates of their own"
)


@pytest.fixture
def box() -> Iterator[Box]:
    """With the certificate of an agent; in a short folder, for the socket's address."""
    with tempfile.TemporaryDirectory(prefix="sgp-") as folder:
        box = Shelf(state=Path(folder, "state"), runtime=Path(folder)).box("i1")
        box.make(anew=False)
        box.state.mkdir(parents=True)
        certify(box.state)
        yield box


def certify(folder: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-subj", "/CN=sandgate-agent", "-addext", "subjectAltName=DNS:sandgate-agent"]
    argv += ["-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run(argv, check=True, capture_output=True)


@pytest.fixture
async def by_port(box: Box) -> AsyncIterator[ByPort]:
    settings = DockerSettings.read({"host": "tcp://127.0.0.1:1"})
    engine = Engine.connect(settings)
    by_port = ByPort(
        engine, Identity.of(box.state), settings, bundle=Bundle(path=box.state / "b" / "root", loader=None)
    )
    yield by_port
    await by_port.close()
    await engine.close()


@contextlib.asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[tuple[int, asyncio.Queue[asyncio.StreamWriter]]]:
    """A port as an agent has it, that gives back what it gets, and the connections that came to it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "certificate", folder / "key")
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer)
        with contextlib.suppress(OSError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], accepted


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()


async def open_way(by_port: ByPort, box: Box, port: int) -> None:
    await by_port.address(box, {"NetworkSettings": {"Ports": {f"{AGENT_PORT}/tcp": [{"HostPort": str(port)}]}}})


async def test_what_is_said_to_the_socket_reaches_the_port_and_comes_back(by_port: ByPort, box: Box) -> None:
    async with listening(box.state) as (port, _):
        await open_way(by_port, box, port)
        reader, writer = await asyncio.open_unix_connection(box.socket)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        await close(writer)


# At once would be too early: what asyncio has accepted and not yet begun it forgets when its server is closed.
@pytest.mark.parametrize("steps", range(2, 6), ids=lambda steps: f"{steps} turns of the loop")
async def test_way_that_is_given_up_hangs_up_on_everybody_and_the_log_stays_empty(
    by_port: ByPort, box: Box, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections at every stage: one that carries bytes, and ones that have come just now."""
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with listening(box.state) as (port, accepted):
        await open_way(by_port, box, port)
        with caplog.at_level(logging.WARNING):
            ends = [await asyncio.open_unix_connection(box.socket)]
            far = await accepted.get()
            ends += [await asyncio.open_unix_connection(box.socket) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            await by_port.forget(box)
            async with asyncio.timeout(10):
                for reader, writer in ends:
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
                    await close(writer)
                await far.wait_closed()
    assert faults == []
    assert caplog.messages == []


async def test_port_behind_which_nobody_is_hangs_up_at_once(by_port: ByPort, box: Box) -> None:
    async with listening(box.state) as (port, _):
        pass
    await open_way(by_port, box, port)
    reader, writer = await asyncio.open_unix_connection(box.socket)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    await close(writer)


async def test_another_agent_on_the_port_hears_nothing(by_port: ByPort, box: Box, tmp_path: Path) -> None:
    """Its certificate is not the one of this sandbox."""
    certify(tmp_path)
    async with listening(tmp_path) as (port, accepted):
        await open_way(by_port, box, port)
        reader, writer = await asyncio.open_unix_connection(box.socket)
        writer.write(b"secret")
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        await close(writer)
        assert accepted.empty()
