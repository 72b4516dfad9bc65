"""Our agent in a sandbox that has execd and nothing else of ours: put there, started, reached.

execd takes a file and runs a command as root, which is all that is asked of it. Afterwards everything goes through our agent,
as on every other backend. The bundle (``sandgate_bundle``) goes there once for each file system; a sandbox that comes from
files in which it is, or that has it mounted, needs a start only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from sandgate_bundle import MOUNT, Bundle
from sandgate_errors import Internal, SandboxUnreachable
from sandgate_plugin_api import AgentAddress
from sandgate_plugin_opensandbox.execd import EGRESS_PORT, EXECD_PORT, Execd
from sandgate_plugin_opensandbox.execds import Execds
from sandgate_plugin_opensandbox.identity import Identity, Name
from sandgate_plugin_opensandbox.server import Endpoint, Server
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings, TemplateSettings
from sandgate_plugin_opensandbox.tunnels import Tunnel, Tunnels

__all__ = ["Agents", "Starter", "pack"]

_log = logging.getLogger(__name__)

_FOLDER = "/run/sandgate"
_ARCHIVE = f"{_FOLDER}/bundle.tar.gz"
_MARK = f"{_FOLDER}/bundle.name"
_STARTS = f"{_FOLDER}/start"
_SOCKET = f"{_FOLDER}/agent/agent.sock"
_SUDO = f"{_FOLDER}/sudo"
#: Seconds.
_UNPACK_LIMIT = 120.0
#: From the command to the first connection. A first start on a cold disk reads the interpreter and gRPC.
_AGENT_LIMIT = 60.0
_LOOK_INTERVAL = 0.05
_SLOWEST_LOOK_INTERVAL = 0.5


def pack(bundle: Bundle, state: Path) -> Path:
    """The bundle as one file in ``state``, made if it is not there. Blocks."""
    archive = state / f"archive-{bundle.name}.tar.gz"
    if not archive.exists():
        draft = archive.with_name(f"{archive.name}.new")
        # Most of it is machine code: a higher level takes long and saves little.
        with tarfile.open(draft, "w:gz", compresslevel=1) as tar:
            tar.add(bundle.path, arcname=".", filter=_of_root)
        draft.rename(archive)
    for other in state.glob("archive-*"):
        if other != archive:
            other.unlink()
    return archive


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


class Agents(Protocol):
    """The agents of sandboxes: in them (:class:`Starter`), or outside (:mod:`sandgate_plugin_opensandbox.by_execd`)."""

    def environment(self, name: Name) -> Mapping[str, str]:
        """What the sandbox's first program has to be given."""

    async def start(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        """Return when a new one accepts calls. Raises Internal, Unavailable; what of it is there goes with the sandbox."""

    async def start_if_needed(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        """The same where an earlier start, of which nobody was told, may have come to its end."""

    async def reach(self, name: Name, sandbox: str) -> AgentAddress:
        """The way to an agent that was started."""

    async def reached(self, name: Name, sandbox: str) -> AgentAddress:
        """The same once it has answered. Raises SandboxUnreachable."""

    async def forget(self, name: Name) -> None:
        """Close the way."""


class Starter:
    """Starts agents in sandboxes, and holds the ways to them."""

    def __init__(
        self,
        server: Server,
        identity: Identity,
        settings: OpenSandboxSettings,
        *,
        bundle: Bundle,
        archive: Path | None,
        tunnels: Tunnels,
    ) -> None:
        """``archive`` is None where every sandbox has the bundle mounted."""
        self._server = server
        self._identity = identity
        self._port = settings.agent_port
        self._bundle = bundle
        self._archive = archive
        self._tunnels = tunnels
        self._execds = Execds(server, identity)

    def environment(self, name: Name) -> Mapping[str, str]:
        """What the sandbox's first program has to be given."""
        return self._execds.environment(name)

    async def start(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        """Return when the agent accepts calls. Raises Internal, Unavailable; what of it is there goes with the sandbox."""
        execd = await self._execds.up(name, sandbox)
        if self._archive is not None:
            await self._put_bundle(execd, self._archive)
        command = await self._begin(execd, name, template)
        tunnel = await self._tunnel(name, sandbox)
        tunnel.moved()
        await self._wait_for_agent(execd, command, tunnel)
        return self._address(name)

    async def start_if_needed(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        """The same where an earlier start, of which nobody was told, may have come to its end."""
        tunnel = await self._tunnel(name, sandbox)
        tunnel.moved()
        try:
            await tunnel.check()
        except SandboxUnreachable:
            return await self.start(name, sandbox, template)
        return self._address(name)

    async def reach(self, name: Name, sandbox: str) -> AgentAddress:
        """The way to an agent that runs."""
        await self._tunnel(name, sandbox)
        return self._address(name)

    async def reached(self, name: Name, sandbox: str) -> AgentAddress:
        """The same once the agent has answered. Raises SandboxUnreachable."""
        tunnel = await self._tunnel(name, sandbox)
        tunnel.moved()
        await self._until(tunnel)
        return self._address(name)

    async def forget(self, name: Name) -> None:
        await self._tunnels.forget(name.sandbox)

    def _address(self, name: Name) -> AgentAddress:
        return AgentAddress(
            target=f"unix:{self._tunnels.path(name.sandbox)}", token=self._identity.token(name, "agent")
        )

    async def _tunnel(self, name: Name, sandbox: str) -> Tunnel:
        async def where() -> Endpoint:
            return await self._server.endpoint(sandbox, self._port)

        return await self._tunnels.open(name.sandbox, sandbox, where, token=self._identity.token(name, "door"))

    async def _put_bundle(self, execd: Execd, archive: Path) -> None:
        known = await execd.run(f"mkdir -p {_FOLDER} && chmod 755 {_FOLDER} && cat {_MARK} 2>/dev/null || :")
        if known.exit_code == 0 and self._bundle.name in known.output:
            return
        await execd.write(_ARCHIVE, archive, mode=600)
        # The mark comes last: half a bundle is none.
        unpacked = await execd.run(
            f"umask 022 && rm -rf {MOUNT} {_MARK} && mkdir -p {MOUNT} && tar -xzf {_ARCHIVE} -C {MOUNT} && "
            f"rm -f {_ARCHIVE} && echo {shlex.quote(self._bundle.name)} > {_MARK}",
            seconds=_UNPACK_LIMIT,
        )
        if unpacked.exit_code != 0:
            _log.error("the agent's bundle cannot be unpacked in a sandbox: %s", unpacked.words)
            raise Internal("the sandbox could not be started: its image may lack tar, or room")

    async def _begin(self, execd: Execd, name: Name, template: TemplateSettings) -> str:
        """The command that becomes the agent, as execd knows it."""
        agent: dict[str, object] = {
            "listen": f"unix:{_SOCKET}",
            "token": self._identity.token(name, "agent"),
            "identity": "switch",
            "system_files": True,
            "network": "own",
            # execd, the door and the egress sidecar: a port's address opens them to nobody.
            "closed_ports": sorted({EXECD_PORT, EGRESS_PORT, self._port}),
        }
        if template.sudo:
            agent["sudo"] = _SUDO
        settings = {
            "agent": agent,
            "door": {"port": self._port, "token": self._identity.token(name, "door")},
            "acting": template.user,
            "workdir": template.workdir or "",
        }
        path = f"{_STARTS}/{secrets.token_hex(8)}.json"
        # Closed before anything is in it; execd logs what it runs, so the tokens go by the file.
        ready = await execd.run(f"mkdir -p {_FOLDER} && rm -rf {_STARTS} && mkdir -m 700 {_STARTS}")
        if ready.exit_code != 0:
            _log.error("no folder can be made in a sandbox: %s", ready.words)
            raise Internal("the sandbox could not be started: its file system cannot be written")
        await execd.write(path, json.dumps(settings).encode(), mode=600)
        # Nothing of execd's variables: its token is among them.
        line = f'exec env -i PATH="$PATH" {shlex.join(self._bundle.command(path))}'
        started = await execd.run(line, background=True)
        if started.exit_code not in {0, None} or not started.id:
            _log.error("execd does not start the agent: %s", started.words)
            raise Internal("the sandbox could not be started")
        return started.id

    async def _wait_for_agent(self, execd: Execd, command: str, tunnel: Tunnel) -> None:
        try:
            async with asyncio.timeout(_AGENT_LIMIT):
                await self._until(tunnel, execd=execd, command=command)
        except TimeoutError:
            _log.error("a sandbox's agent did not come up in time")
            raise Internal("the sandbox could not be started") from None

    async def _until(self, tunnel: Tunnel, *, execd: Execd | None = None, command: str = "") -> None:
        """Return when the door opens; raise Internal when the agent has ended, where that can be asked."""
        pause = _LOOK_INTERVAL
        deadline = asyncio.get_running_loop().time() + _AGENT_LIMIT
        while True:
            try:
                await tunnel.check()
            except SandboxUnreachable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                if execd is not None and (words := await execd.end_of(command)) is not None:
                    _log.error("a sandbox's agent did not start: %s", words)
                    raise Internal("the sandbox could not be started") from error
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SLOWEST_LOOK_INTERVAL)
