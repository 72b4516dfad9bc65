"""Agents that are reached through a port of the engine's host: where no socket can be shared with their containers.

For engines on other machines, and for runtimes with a kernel of their own. The agent proves itself with a certificate made
for this one sandbox, so that root of another cannot pose as it, and asks for the sandbox's token. The core and the edges
see a unix socket as everywhere: behind it this module carries the bytes to the port and back, by TLS.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import secrets
import ssl
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandgate_bundle import MOUNT, Bundle
from sandgate_errors import FailedPrecondition, SandboxUnreachable
from sandgate_plugin_api import AgentAddress
from sandgate_plugin_docker.boxes import Box, Identity
from sandgate_plugin_docker.containers import AGENT_PORT, HELPER_LABEL, LABEL, Way
from sandgate_plugin_docker.engine import Details, Engine
from sandgate_plugin_docker.meeting import START_LIMIT_SECONDS, check, parse_answer
from sandgate_plugin_docker.reaching import Meanwhile, first_line
from sandgate_plugin_docker.settings import DockerSettings
from sandgate_plugin_docker.templates import Model

__all__ = ["ByPort"]

_log = logging.getLogger(__name__)

#: What an agent's certificate says; nobody looks it up anywhere.
_NAME = "sandgate-agent"
_VALID_DAYS = 3650
_CONNECT_LIMIT_SECONDS = 10.0
_PIECE = 256 * 1024
_COMPLETE = ".complete"
_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ByPort:
    """Agents that listen on a port."""

    needs_network = True

    def __init__(self, engine: Engine, identity: Identity, settings: DockerSettings, *, bundle: Bundle) -> None:
        self._engine = engine
        self._identity = identity
        self._bundle = bundle
        self._host = settings.agent_host or engine.host
        self._bind = settings.agent_bind or ("127.0.0.1" if engine.is_local else "0.0.0.0")
        self._volume = f"sandgate-{identity.gateway}-{bundle.name}"
        self._filling = asyncio.Lock()
        self._filled = False
        self._tunnels: dict[str, _Tunnel] = {}

    async def way(self, box: Box, model: Model) -> Way:
        if self._engine.is_local:
            return Way(port_on=self._bind, binds=((os.fspath(self._bundle.path), MOUNT),))
        await self._fill_volume(model)
        return Way(port_on=self._bind, volumes=((self._volume, MOUNT),))

    async def bring_up(
        self, box: Box, model: Model, begin: Callable[[], Awaitable[str]], *, anew: bool, meanwhile: Meanwhile
    ) -> AgentAddress:
        await asyncio.to_thread(box.make, anew=anew)
        if not anew:
            await asyncio.to_thread(_make_certificate, box)
        box.write("bundle", self._bundle.name.encode())
        container = await begin()
        agent = {
            "listen": f"0.0.0.0:{AGENT_PORT}",
            "token": self._identity.token(box.name),
            "tls": {name: (box.read(name) or b"").decode() for name in ("certificate", "key")},
        }
        line = json.dumps(first_line(model, agent)).encode() + b"\n"
        async with self._engine.attached(container) as stream:
            await self._engine.start(container)
            await stream.write_in(line)
            check(await _answer(stream.read_out))
            await meanwhile(container)
        details = await self._engine.inspect(container)
        if details is None:
            raise SandboxUnreachable("the sandbox has ended at once")
        return await self.address(box, details)

    async def address(self, box: Box, details: Details) -> AgentAddress:
        bindings = (details["NetworkSettings"].get("Ports") or {}).get(f"{AGENT_PORT}/tcp")
        if not bindings:
            raise SandboxUnreachable("the port of the sandbox's agent is not open")
        port = int(bindings[0]["HostPort"])
        tunnel = self._tunnels.get(box.name)
        if tunnel is None or tunnel.port != port:
            await self.forget(box)
            tunnel = _Tunnel(self._host, port, box.read("certificate") or b"")
            await tunnel.open(box)
            self._tunnels[box.name] = tunnel
        return AgentAddress(target=f"unix:{box.socket}", token=self._identity.token(box.name))

    async def answers(self, box: Box, details: Details) -> bool:
        try:
            await self.address(box, details)
        except SandboxUnreachable:
            return False
        return await self._tunnels[box.name].leads_somewhere()

    async def forget(self, box: Box) -> None:
        if (tunnel := self._tunnels.pop(box.name, None)) is not None:
            await tunnel.close()

    async def close(self) -> None:
        tunnels = list(self._tunnels.values())
        self._tunnels.clear()
        await asyncio.gather(*(tunnel.close() for tunnel in tunnels))

    async def sweep(self) -> None:
        """Remove the volumes of earlier versions, but for those that sandboxes still have."""
        for volume in await self._engine.volumes(f"{LABEL}gateway={self._identity.gateway}"):
            if volume != self._volume:
                await self._engine.remove_volume(volume)

    async def _fill_volume(self, model: Model) -> None:
        """Copy the bundle to the engine's host, once for each version."""
        async with self._filling:
            if self._filled:
                return
            await self._engine.create_volume(self._volume, {f"{LABEL}gateway": self._identity.gateway})
            config = {
                "Image": model.image.id,
                "Cmd": ["/never-started"],
                "Labels": {HELPER_LABEL: self._identity.gateway},
                "HostConfig": {"Mounts": [{"Type": "volume", "Source": self._volume, "Target": MOUNT}]},
            }
            name = f"sandgate-{self._identity.gateway}-f{secrets.token_hex(8)}"
            container = await self._engine.create(config, name=name)
            try:
                if await self._engine.read_file(container, f"{MOUNT}/{_COMPLETE}") is None:
                    _log.info("copying the agent's bundle to %s", self._engine.address)
                    archive = await asyncio.to_thread(_archive, self._bundle.path)
                    await self._engine.put_archive(container, MOUNT, archive)
                    await self._engine.put_archive(container, MOUNT, await asyncio.to_thread(_mark))
            finally:
                await self._engine.remove(container)
            self._filled = True


class _Tunnel:
    """One socket of this machine that leads to one port of the engine's host."""

    def __init__(self, host: str, port: int, certificate: bytes) -> None:
        self._host = host
        self.port = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # This one certificate and no other.
        self._context.load_verify_locations(cadata=certificate.decode())
        self._context.set_alpn_protocols(["h2"])
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def open(self, box: Box) -> None:
        box.runtime.mkdir(mode=0o700, exist_ok=True)
        box.sockets.mkdir(exist_ok=True)
        box.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, box.socket)

    async def leads_somewhere(self) -> bool:
        """Whether the agent accepts connections."""
        if (far := await self._connect()) is None:
            return False
        far[1].close()
        return True

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            # It was on its way when the server was closed.
            writer.close()
            return
        # A task of our own, and not the streams': those take the cancellation of one for a fault.
        task = asyncio.ensure_future(self._carry((reader, writer)))
        self._connections.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            # Not by the task: one that is cancelled before its first step runs nothing at all.
            self._connections.discard(task)
            writer.close()

        task.add_done_callback(ended)

    async def _carry(self, near: _Ends) -> None:
        if (far := await self._connect()) is not None:
            await _join(near, far)

    async def _connect(self) -> _Ends | None:
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_SECONDS):
                return await asyncio.open_connection(self._host, self.port, ssl=self._context, server_hostname=_NAME)
        except (OSError, TimeoutError) as error:
            _log.warning("the agent behind %s:%d cannot be reached: %s", self._host, self.port, error)
            return None


async def _join(near: _Ends, far: _Ends) -> None:
    """Carry bytes both ways until one side has gone, and with it the connection."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(near[0], far[1]))
            group.create_task(_pump(far[0], near[1]))
    except* (OSError, _Ended):
        pass
    finally:
        far[1].close()


class _Ended(Exception):
    """One direction has ended: HTTP/2 has no half-closed connections, so the other one goes too."""


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        # Not before it is taken on: what flows is bounded by the slower side.
        await sink.drain()
    raise _Ended


async def _answer(read: Callable[[], Awaitable[object]]) -> object:
    line = b""
    try:
        async with asyncio.timeout(START_LIMIT_SECONDS):
            while not line.endswith(b"\n"):
                message = await read()
                if message is None:
                    break
                line += getattr(message, "data", b"")
    except TimeoutError:
        return {"error": "it did not come up in time"}
    return parse_answer(line)


def _make_certificate(box: Box) -> None:
    """Key and certificate of one agent. Raises FailedPrecondition without the program that makes them."""
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", str(_VALID_DAYS), "-subj", f"/CN={_NAME}", "-addext", f"subjectAltName=DNS:{_NAME}"]
    box.write("key", b"")
    key, certificate = box.state / "key", box.state / "certificate"
    try:
        subprocess.run([*argv, "-keyout", key, "-out", certificate], capture_output=True, check=True, timeout=30)
    except FileNotFoundError:
        raise FailedPrecondition("agents that are reached by a port need the program openssl: install it") from None
    except subprocess.SubprocessError as error:
        raise FailedPrecondition(f"openssl makes no certificate: {error}") from error


def _archive(folder: Path) -> bytes:
    buffer = io.BytesIO()

    def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".", filter=of_root)
    return buffer.getvalue()


def _mark() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(_COMPLETE))
    return buffer.getvalue()
