"""What goes on beside the calls: sandboxes are spoken for, and what could not be removed at once is removed later.

The server removes a sandbox at its time whoever uses it. That is the net under a gateway that never comes back, not a
deadline of ours: each sandbox gets a long life and is renewed several times in it, as long as a core looks after it. Paused
ones have no other caller, so every core renews those of the whole gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sandgate_errors import SandgateError
from sandgate_plugin_opensandbox.identity import Name
from sandgate_plugin_opensandbox.server import Refused, Server

__all__ = ["Keeper", "labels", "snapshot_prefix"]

_log = logging.getLogger(__name__)

#: A life has this many renewals: several may fail before it ends.
_RENEWALS = 6
#: Renewed side by side; each writes a file on the server.
_AT_ONCE = 8
#: Seconds between two looks for what may still appear, and how long it may: a create waits for an image that is fetched.
_STRAY_INTERVAL = 5.0
_STRAY_PATIENCE = 900.0
#: Seconds between two tries to delete snapshots that were given up while sandboxes used them.
_SWEEP_INTERVAL = 60.0


def labels(name: Name) -> dict[str, str]:
    """All that the server is told of whose a sandbox is: labels hold little and everybody there reads them."""
    return {"sandgate-gateway": name.gateway, "sandgate-sandbox": name.sandbox}


def snapshot_prefix(gateway: str) -> str:
    """In front of the names of a gateway's snapshots; no name of a gateway holds a colon."""
    return f"sandgate:{gateway}:"


class Keeper:
    """Keeps the sandboxes of one backend."""

    def __init__(
        self,
        server: Server,
        *,
        gateway: str,
        lifetime: float,
        snapshots: bool,
        erase: Callable[[Name], Awaitable[bool]],
    ) -> None:
        """``erase`` removes what has a name, and says whether there was anything."""
        self._server = server
        self._gateway = gateway
        self._lifetime = lifetime
        self._snapshots = snapshots
        self._erase = erase
        #: Sandboxes that this core looks after, by the server's id.
        self._kept: set[str] = set()
        #: What may still appear on the server, to the loop's time until which it is looked for.
        self._strays: dict[Name, float] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._renew_always(), name="renewal of sandboxes"))
        self._tasks.append(asyncio.create_task(self._clear_always(), name="removal of stray sandboxes"))
        if self._snapshots:
            self._tasks.append(asyncio.create_task(self._sweep_always(), name="removal of snapshots given up"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            # Not awaited themselves: their cancellation would look like one of this call.
            await asyncio.wait(self._tasks)

    def keep(self, sandbox: str) -> None:
        self._kept.add(sandbox)

    def let_go(self, sandbox: str) -> None:
        self._kept.discard(sandbox)

    def look_for(self, name: Name) -> None:
        """Remove what has this name when it appears."""
        self._strays[name] = asyncio.get_running_loop().time() + _STRAY_PATIENCE
        self._wake.set()

    def expect(self, name: Name) -> None:
        """It is being made on purpose again."""
        self._strays.pop(name, None)

    async def _renew_always(self) -> None:
        while True:
            await asyncio.sleep(self._lifetime / _RENEWALS)
            try:
                await self.renew_all()
            except (Refused, SandgateError) as error:
                _log.warning("sandboxes could not be renewed, which is tried again: %s", error)

    async def renew_all(self) -> None:
        """Speak for every sandbox that is this core's, and every paused one of the gateway."""
        whole = {"sandgate-gateway": self._gateway}
        paused = await self._server.list(whole, states=["Paused", "Pausing"])
        places = asyncio.Semaphore(_AT_ONCE)
        wanted = self._kept | {str(details["id"]) for details in paused}
        await asyncio.gather(*(self._renew(sandbox, places) for sandbox in sorted(wanted)))

    async def _renew(self, sandbox: str, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                await self._server.renew(sandbox, seconds=self._lifetime)
            except Refused as refused:
                if refused.status == 404:
                    self.let_go(sandbox)
                elif refused.status != 409:
                    # 409 is one without an end, which needs none.
                    _log.warning("a sandbox could not be renewed: %s", refused)
            except SandgateError as error:
                _log.warning("a sandbox could not be renewed: %s", error.message)

    async def _clear_always(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._strays:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(_STRAY_INTERVAL)
            for name, until in list(self._strays.items()):
                try:
                    gone = await self._erase(name)
                except (Refused, SandgateError) as error:
                    _log.info("%s cannot be removed yet: %s", name.sandbox, error)
                    continue
                if gone or loop.time() > until:
                    self._strays.pop(name, None)

    async def _sweep_always(self) -> None:
        while True:
            try:
                await self.sweep()
            except (Refused, SandgateError) as error:
                _log.info("snapshots that were given up are not removed yet: %s", error)
            await asyncio.sleep(_SWEEP_INTERVAL)

    async def sweep(self) -> None:
        """Delete what the server could not: it remembers a snapshot that it was told to delete, and does not try again."""
        for snapshot in await self._server.snapshots(states=["Deleting"]):
            if str(snapshot.get("name", "")).startswith(snapshot_prefix(self._gateway)):
                try:
                    await self._server.delete_snapshot(str(snapshot["id"]))
                except Refused as refused:
                    if refused.status != 409:
                        raise
