"""execd in a sandbox that was just made: given its token, waited for, and looked at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from sandgate_errors import Internal, Unavailable
from sandgate_plugin_opensandbox.execd import EXECD_PORT, Execd
from sandgate_plugin_opensandbox.identity import Identity, Name
from sandgate_plugin_opensandbox.server import Server, has_ended

__all__ = ["EXECD_TOKEN", "Execds"]

_log = logging.getLogger(__name__)

#: By this variable execd is told what its callers have to know.
EXECD_TOKEN = "EXECD_ACCESS_TOKEN"  # noqa: S105 - a name
#: Seconds. A sandbox's first program starts execd; a pod may still be looking for its network.
_EXECD_LIMIT = 60.0
_STATE_INTERVAL = 3.0


class Execds:
    """Those of one gateway's sandboxes."""

    def __init__(self, server: Server, identity: Identity) -> None:
        self._server = server
        self._identity = identity
        self._looked = False

    def environment(self, name: Name) -> Mapping[str, str]:
        """What the sandbox's first program has to be given."""
        # Else every neighbour on its network could run commands in it.
        return {EXECD_TOKEN: self.token(name)}

    def token(self, name: Name) -> str:
        return self._identity.token(name, "execd")

    async def up(self, name: Name, sandbox: str) -> Execd:
        """Once it answers. Raises Internal, Unavailable."""
        endpoint = await self._server.endpoint(sandbox, EXECD_PORT)
        execd = Execd(self._server.session, endpoint, self.token(name))
        try:
            async with asyncio.timeout(_EXECD_LIMIT):
                while not await execd.answers(seconds=_STATE_INTERVAL):
                    # One whose first program cannot run has ended before anybody could have answered.
                    found = await self._server.get(sandbox)
                    if found is None or has_ended(found):
                        raise Internal("the sandbox could not be started: its image may lack a shell")
        except TimeoutError:
            _log.error("execd of %s does not answer at %s", name.sandbox, endpoint.base)
            raise Unavailable("the sandbox did not come up in time") from None
        if not self._looked:
            self._looked = True
            if await execd.is_open():
                _log.warning(
                    "execd of this server does not ask for its token: who reaches a sandbox's network is root in it. "
                    "Keep sandboxes apart, or take an execd that knows %s",
                    EXECD_TOKEN,
                )
        return execd
