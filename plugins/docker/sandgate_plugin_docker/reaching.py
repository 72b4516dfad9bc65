"""How the agents of containers are reached: what the two ways have in common, and the one by a socket.

The socket lies on this machine, so it is for an engine on this machine whose containers share its kernel. The other way is
:mod:`sandgate_plugin_docker.ports`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sandgate_bundle import MOUNT, Bundle
from sandgate_plugin_api import AgentAddress
from sandgate_plugin_docker.boxes import Box, Identity
from sandgate_plugin_docker.containers import Way
from sandgate_plugin_docker.engine import Details, Engine
from sandgate_plugin_docker.furnishing import Furnishing
from sandgate_plugin_docker.meeting import INNER_FOLDER, INNER_PATH, meeting
from sandgate_plugin_docker.templates import Model

__all__ = ["BySocket", "Meanwhile", "Reach", "first_line"]

#: Where the agent puts its sudo.
_SUDO = "/run/sandgate/sudo"
_FOLDER = 3
_CONNECT_LIMIT_SECONDS = 10.0


#: What else a container needs, from its id on.
Meanwhile = Callable[[str], Awaitable[None]]


class Reach(Protocol):
    """One way. A box belongs to one container."""

    #: Whether a container needs a network for it.
    needs_network: bool

    async def way(self, box: Box, model: Model) -> Way:
        """What the container has to be made with."""

    async def bring_up(
        self, box: Box, model: Model, begin: Callable[[], Awaitable[str]], *, anew: bool, meanwhile: Meanwhile
    ) -> AgentAddress:
        """Return when the agent accepts calls. ``begin`` gives the id of the container, which is not started yet.

        ``anew``: it was started before. ``meanwhile`` gets the container once it is started, and may take as long as its
        agent does without making anybody wait; it has ended, too, when this returns.

        Raises Internal when the agent does not come up, and what the engine and ``meanwhile`` raise.
        """

    async def address(self, box: Box, details: Details) -> AgentAddress:
        """Where the agent of a container that runs is."""

    async def answers(self, box: Box, details: Details) -> bool:
        """Whether the agent of a container that runs, as the engine says, accepts connections.

        The engine hears of an end a moment later than connections do.
        """

    async def forget(self, box: Box) -> None:
        """Let go of what is held for a box."""

    async def close(self) -> None:
        """Let go of what is held for all."""


def first_line(model: Model, agent: Mapping[str, object]) -> dict[str, Any]:
    """What the first program of a container is told."""
    common: dict[str, object] = {"identity": "switch", "system_files": True, "network": "own"}
    if model.settings.sudo:
        common["sudo"] = _SUDO
    return {
        "account": model.account,
        "acting": model.default_user,
        "workdir": model.workdir,
        "agent": {**common, **agent},
    }


class BySocket:
    """Agents that listen in a folder of this machine."""

    needs_network = False

    def __init__(
        self, engine: Engine, identity: Identity, furnishing: Furnishing, *, state: Path, bundle: Bundle
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._furnishing = furnishing
        self._bundle = bundle
        # Looked up by the engine at each start: a sandbox that starts anew on its files gets the agent of today.
        self._current = state / "bundle"
        draft = self._current.with_name("bundle.new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(bundle.path.relative_to(state))
        draft.rename(self._current)

    async def way(self, box: Box, model: Model) -> Way:
        shown = await self._furnishing.shown(model) if model.settings.read_only else {}
        return Way(
            arguments=("meet", INNER_PATH),
            binds=(
                (os.fspath(self._current), MOUNT),
                (os.fspath(box.meeting), INNER_FOLDER),
                *((os.fspath(source), target) for target, source in shown.items()),
            ),
        )

    async def bring_up(
        self, box: Box, model: Model, begin: Callable[[], Awaitable[str]], *, anew: bool, meanwhile: Meanwhile
    ) -> AgentAddress:
        async with meeting(box, anew=anew) as place:
            # Which agent runs in it: files under a running interpreter must stay.
            box.write("bundle", self._bundle.name.encode())
            container = await begin()
            await self._engine.start(container)

            async def lives() -> bool:
                details = await self._engine.inspect(container)
                return details is not None and bool(details["State"]["Running"])

            line = first_line(
                model,
                {
                    "listen": f"unix:/proc/self/fd/{_FOLDER}/{box.socket.name}",
                    "folder": _FOLDER,
                    "token": self._identity.token(box.name),
                },
            )
            await _both(meanwhile(container), place.introduce(line, lives=lives))
        return self._address(box)

    async def address(self, box: Box, details: Details) -> AgentAddress:
        return self._address(box)

    def _address(self, box: Box) -> AgentAddress:
        return AgentAddress(target=f"unix:{box.socket}", token=self._identity.token(box.name))

    async def answers(self, box: Box, details: Details) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_SECONDS):
                _, writer = await asyncio.open_unix_connection(box.socket)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def forget(self, box: Box) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""


async def _both(first: Awaitable[None], second: Awaitable[None]) -> None:
    """The failure of one cancels the other, and is raised as it is."""

    async def of(work: Awaitable[None]) -> None:
        await work

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(of(first))
            group.create_task(of(second))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
