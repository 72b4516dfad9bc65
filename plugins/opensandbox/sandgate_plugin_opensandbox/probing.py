"""What a given server can do, found out before the first sandbox without making one; and what ``doctor`` says.

A server tells its capabilities nowhere. It does tell why it refuses: it is asked for things that it refuses in any case, and
how far it looked before it did is the answer.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api import AgentFeature, Capability
from sandgate_plugin_opensandbox.server import Refused, Server
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings

__all__ = ["Abilities", "diagnose", "probe"]

_DOCTOR_LIMIT = 15.0
#: Two volumes of one name: refused by every runtime, after timeout and network policy and before anything is made.
_IMPOSSIBLE = [
    {"name": "sandgate-probe", "pvc": {"claimName": "sandgate-probe"}, "mountPath": "/probe", "readOnly": True}
] * 2
_REFUSED_FOR_THAT = "VOLUME::"


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Of one server."""

    version: str
    #: ``docker`` freezes a sandbox, ``kubernetes`` keeps its files: what pausing means.
    runtime: str
    capabilities: frozenset[Capability]

    @property
    def freezes(self) -> bool:
        return self.runtime == "docker"


async def probe(server: Server, settings: OpenSandboxSettings) -> Abilities:
    """Raises FailedPrecondition with what is to be mended, Unavailable when the server is away."""
    await server.health()
    version = await server.version()
    await _check_key(server)
    await _check_lifetime(server, settings)
    runtime, pauses = await _runtime(server)
    snapshots = await _has_snapshots(server)
    found = {Capability.LIMITS}
    if snapshots:
        found.add(Capability.SNAPSHOT)
    if pauses and runtime == "docker":
        found.add(Capability.PAUSE)
    # Where the runtime only freezes, files are kept as a snapshot.
    if (runtime == "docker" and snapshots) or (runtime != "docker" and pauses):
        found.add(Capability.PAUSE_FILESYSTEM)
    if await _enforces_rules(server, settings):
        found |= {Capability.NO_INTERNET, Capability.NETWORK_RULES}
    return Abilities(version=version, runtime=runtime, capabilities=frozenset(found))


async def _check_key(server: Server) -> None:
    try:
        await server.list({"sandgate-gateway": "probe"}, states=["Running"])
    except Refused as refused:
        if refused.status in {401, 403}:
            raise FailedPrecondition(
                f"the OpenSandbox server at {server.address} does not know the key: set 'api_key' to its 'server.api_key'"
            ) from refused
        raise FailedPrecondition(f"{server.address} does not list sandboxes: {refused}") from refused


async def _check_lifetime(server: Server, settings: OpenSandboxSettings) -> None:
    refused = await _tried(server, settings, {})
    if not refused.code.startswith(_REFUSED_FOR_THAT):
        raise FailedPrecondition(
            f"the OpenSandbox server takes no sandbox as 'lifetime' asks for it: {refused.message}"
        )


async def _enforces_rules(server: Server, settings: OpenSandboxSettings) -> bool:
    """Whether an egress sidecar keeps rules below names, too: what only answers for names is no barrier.

    It can do one other thing in that mode only, so that is asked for.
    """
    wishes = {"networkPolicy": {"defaultAction": "deny", "egress": []}, "credentialProxy": {"enabled": True}}
    refused = await _tried(server, settings, wishes)
    return refused.code.startswith(_REFUSED_FOR_THAT)


async def _tried(server: Server, settings: OpenSandboxSettings, wishes: Mapping[str, object]) -> Refused:
    body: dict[str, object] = {
        "image": {"uri": "sandgate-probe:none"},
        "entrypoint": ["true"],
        "resourceLimits": {},
        "timeout": settings.lifetime,
        "volumes": _IMPOSSIBLE,
        **wishes,
    }
    try:
        made = await server.create(body)
    except Refused as refused:
        return refused
    # It takes what no version that we know takes.
    await server.delete(str(made["id"]))
    return Refused(202, code=_REFUSED_FOR_THAT, message="")


async def _runtime(server: Server) -> tuple[str, bool]:
    """Its kind, and whether it pauses: by what it says of a sandbox that does not exist."""
    try:
        await server.pause(str(uuid.uuid4()))
    except Refused as refused:
        runtime = "docker" if refused.code.startswith("DOCKER::") else "kubernetes"
        return runtime, refused.status == 404
    return "kubernetes", False


async def _has_snapshots(server: Server) -> bool:
    try:
        await server.snapshots("sandgate-probe")
    except Refused:
        return False
    return True


def diagnose(settings: OpenSandboxSettings) -> Sequence[tuple[str, bool, str]]:
    """The rows of ``sandgate doctor``. Blocks."""
    return asyncio.run(_diagnose(settings))


async def _diagnose(settings: OpenSandboxSettings) -> Sequence[tuple[str, bool, str]]:
    try:
        server = Server.connect(settings)
    except FailedPrecondition as error:
        return (("OpenSandbox server", False, error.message),)
    try:
        async with asyncio.timeout(_DOCTOR_LIMIT):
            found = await probe(server, settings)
    except (SandgateError, Refused, TimeoutError) as error:
        how = error.message if isinstance(error, SandgateError | Refused) else "it does not answer"
        return (("OpenSandbox server", False, f"{server.address}: {how}"),)
    finally:
        await server.close()
    offers = ", ".join(sorted(capability.value for capability in found.capabilities))
    rules = Capability.NETWORK_RULES in found.capabilities
    lacks = ", ".join(sorted(AgentFeature)) if settings.execd_only else ""
    return (
        ("OpenSandbox server", True, f"{found.version} at {server.address}, {found.runtime}; offers {offers}"),
        (
            "agents",
            True,
            f"none ('execd_only'), so there is no {lacks}" if lacks else "sandgate's own, in each sandbox",
        ),
        ("network rules", True, "kept by the egress sidecar" if rules else "not offered: 'egress' needs mode dns+nft"),
    )
