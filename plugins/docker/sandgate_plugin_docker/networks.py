"""The network that sandboxes are on: one bridge of the gateway's own, on which they do not see one another.

A sandbox without internet access is on no network at all: its agent needs none, where it is reached by a socket. That can
also change later: joining and leaving a network is something an engine does to containers that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Mapping
from typing import Any

from sandgate_errors import Internal, Unavailable
from sandgate_plugin_docker.containers import LABEL
from sandgate_plugin_docker.engine import Details, Engine, Refused

__all__ = ["NONE", "Network", "address_in"]

_log = logging.getLogger(__name__)

#: The engine's name of no network.
NONE = "none"


class Network:
    """The gateway's own network."""

    def __init__(self, engine: Engine, gateway: str) -> None:
        self._engine = engine
        self._gateway = gateway
        self.name = f"sandgate-{gateway}"
        #: As the engine's host calls it; at most fifteen characters.
        self.bridge = f"sg-{gateway}"
        self._making = asyncio.Lock()

    async def ensure(self) -> None:
        """Make it where it is missing, also when somebody has removed it since."""
        async with self._making:
            if await self._engine.network(self.name) is not None:
                return
            try:
                await self._engine.create_network(self._config())
            except Refused as refused:
                # Made by somebody else meanwhile; by this gateway's name, so by this gateway.
                if refused.status != 409:
                    raise

    async def subnet(self) -> ipaddress.IPv4Network:
        """Raises Unavailable where there is none."""
        details = await self._engine.network(self.name) or {}
        for part in (details.get("IPAM") or {}).get("Config") or ():
            with contextlib.suppress(KeyError, ValueError):
                return ipaddress.IPv4Network(part["Subnet"])
        raise Unavailable("the sandboxes' network is not there at the moment")

    def _config(self) -> Mapping[str, object]:
        return {
            "Name": self.name,
            "Driver": "bridge",
            "CheckDuplicate": True,
            "EnableIPv6": False,
            "Labels": {f"{LABEL}gateway": self._gateway},
            "Options": {
                "com.docker.network.bridge.name": self.bridge,
                # Sandboxes are strangers to one another.
                "com.docker.network.bridge.enable_icc": "false",
            },
        }

    async def enter(self, network: str, container: str) -> None:
        """Put a container that has just been started, on none, on ``network``. Raises Internal if it has ended; Refused."""
        try:
            await self._engine.leave(NONE, container)
            await self._engine.join(network, container)
        except Refused as refused:
            if refused.status == 409:
                raise Internal("the sandbox could not be started") from refused
            raise

    async def admit(self, details: Details, *, network: str, internet: bool) -> None:
        """Let a container be on ``network`` and on no other, or on none."""
        container = details["Id"]
        current = set((details["NetworkSettings"].get("Networks") or {}).keys())
        wanted = network if internet else NONE
        try:
            for other in sorted(current - {wanted}):
                await self._engine.leave(other, container)
            if wanted not in current:
                await self._engine.join(wanted, container)
        except Refused as refused:
            _log.error("a sandbox's network cannot be changed: %s", refused)
            raise Unavailable("the sandbox's network cannot be changed at the moment") from refused


def address_in(details: Details) -> ipaddress.IPv4Address | None:
    """The address of a container that runs; None: it has none."""
    networks: Mapping[str, Any] = details["NetworkSettings"].get("Networks") or {}
    found = next((network["IPAddress"] for network in networks.values() if network.get("IPAddress")), None)
    return None if found is None else ipaddress.IPv4Address(found)
