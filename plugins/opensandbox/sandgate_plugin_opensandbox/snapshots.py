"""Snapshots on the server: the clients' own, and the files of sandboxes that are paused without memory.

Each has a name of ours, by which it is found when an answer was lost or a core died over it. The server does not delete one
that a sandbox uses, but remembers that it is to go (``keeping.py`` tries again).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence

from sandgate_errors import CapabilityMissing, Internal, NotFound, Unavailable
from sandgate_plugin_api import Capability
from sandgate_plugin_opensandbox.identity import Name
from sandgate_plugin_opensandbox.keeping import snapshot_prefix
from sandgate_plugin_opensandbox.server import Details, Lost, Refused, Server, state_of

__all__ = ["Snapshots"]

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PAUSED = "paused:"
#: Seconds. A copy of gigabytes into a registry.
_LIMIT = 900.0
_INTERVAL = 0.1
_SLOWEST_INTERVAL = 2.0
#: A snapshot that is being made cannot be deleted yet.
_DELETE_LIMIT = 60.0
_GONE = frozenset({"Deleting", "Failed"})


class Snapshots:
    """Those of one gateway."""

    def __init__(self, server: Server, gateway: str) -> None:
        self._server = server
        self._prefix = snapshot_prefix(gateway)

    def name(self, snapshot_id: str) -> str:
        if not _ID.fullmatch(snapshot_id):
            raise Internal("the snapshot's id cannot be a name on the server")
        return f"{self._prefix}{snapshot_id}"

    def paused_name(self, name: Name) -> str:
        """Of the files of a paused sandbox, whichever core paused it."""
        return f"{snapshot_prefix(name.gateway)}{_PAUSED}{name.sandbox}"

    async def make(self, sandbox: str, *, name: str) -> str:
        """Its id once it is whole. Raises NotFound, Unavailable; nothing is kept then."""
        try:
            details = await self._begin(sandbox, name)
            return await self._whole(details)
        except BaseException:
            await self.give_up(name)
            raise

    async def _begin(self, sandbox: str, name: str) -> Details:
        try:
            return await self._server.snapshot(sandbox, name=name)
        except Lost:
            found = [each for each in await self._server.snapshots(name) if state_of(each) not in _GONE]
            if not found:
                raise
            return found[0]
        except Refused as refused:
            if refused.status == 501 or refused.code == "SNAPSHOT::UNSUPPORTED_RUNTIME":
                raise CapabilityMissing.of("opensandbox", Capability.SNAPSHOT.value) from refused
            if refused.status == 409 and refused.code == "SNAPSHOT::INVALID_SOURCE_STATE":
                raise NotFound("the sandbox has ended") from refused
            raise

    async def _whole(self, details: Details) -> str:
        snapshot = str(details["id"])
        pause = _INTERVAL
        try:
            async with asyncio.timeout(_LIMIT):
                while (state := state_of(details)) != "Ready":
                    if state in _GONE:
                        _log.error("a snapshot was not made: %s", details.get("status"))
                        raise Unavailable("the snapshot could not be made")
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _SLOWEST_INTERVAL)
                    found = await self._server.get_snapshot(snapshot)
                    if found is None:
                        raise Unavailable("the snapshot could not be made")
                    details = found
        except TimeoutError:
            raise Unavailable("the snapshot was not made in time") from None
        return snapshot

    async def check(self, snapshot: object) -> str:
        """The id of one from which sandboxes can be made. Raises NotFound."""
        if not isinstance(snapshot, str) or not snapshot:
            raise Internal("the handle of the snapshot is damaged")
        found = await self._server.get_snapshot(snapshot)
        if found is None or state_of(found) != "Ready":
            raise NotFound("the snapshot does not exist any more")
        return snapshot

    async def give_up(self, name: str) -> None:
        """Delete all of this name, whole or half made."""
        for snapshot in await self._server.snapshots(name):
            await self.delete(str(snapshot["id"]))

    async def delete(self, snapshot: str) -> None:
        """Nobody can start from it any more when this returns; it goes with the last sandbox that was."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _DELETE_LIMIT
        while True:
            try:
                await self._server.delete_snapshot(snapshot)
                return
            except Refused as refused:
                if refused.status != 409:
                    raise
                found = await self._server.get_snapshot(snapshot)
                if found is None or state_of(found) == "Deleting":
                    return
                if loop.time() > end:
                    raise
            await asyncio.sleep(0.2)

    async def paused(self) -> Mapping[str, str]:
        """Sandboxes of the gateway to the snapshots with their files."""
        prefix = f"{self._prefix}{_PAUSED}"
        found: Sequence[Details] = await self._server.snapshots(states=["Ready"])
        named = ((str(each.get("name", "")), str(each["id"])) for each in found)
        return {name.removeprefix(prefix): snapshot for name, snapshot in named if name.startswith(prefix)}

    async def forget_paused(self, name: Name) -> None:
        await self.give_up(self.paused_name(name))
