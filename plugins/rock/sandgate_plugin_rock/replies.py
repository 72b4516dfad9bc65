"""What replies say of a sandbox (K1, K2, K14), and which errors ROCK tells otherwise (K33, K35)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from sandgate_errors import Internal, InvalidArgument, NotFound, SandboxNotFound, SandgateError
from sandgate_plugin_api import AgentRequest, Reply, ReplyKind, RestRequest, SandboxInfo
from sandgate_plugin_rock.files import is_about_files

__all__ = ["ADDRESS", "CLIENT_ID", "ENVD_VERSION", "KEY_HEADER", "described", "told"]

ENVD_VERSION = "0.3.0"
CLIENT_ID = "rock"
#: The key of metadata under which a detail says where the sandbox is.
ADDRESS = "e2b.agents.kruise.io/sandbox-ip"
#: Where the client's own key stands while a request is under way; ``X-API-KEY`` then holds the gateway's.
KEY_HEADER = "X-Rock-Client-Key"


def described(sandbox: SandboxInfo, reply: Reply, *, address: str) -> Mapping[str, object]:
    """The JSON object as ROCK writes it. ``address``: of a sandbox that has none of its own. Raises Internal (K14)."""
    body = {**reply.body, "envdVersion": ENVD_VERSION, "clientID": CLIENT_ID}
    if reply.kind is not ReplyKind.LISTED:
        body["envdAccessToken"] = reply.request.headers.get(KEY_HEADER, "")
        for name in ("domain", "trafficAccessToken"):
            body.pop(name, None)
    if reply.kind is ReplyKind.SANDBOX and (asked := reply.request.body.get("templateID")):
        body["templateID"] = asked
    if reply.kind is ReplyKind.DETAIL:
        body["metadata"] = {**_checked(sandbox), ADDRESS: str(ipaddress.ip_address(sandbox.address or address))}
    return body


def _checked(sandbox: SandboxInfo) -> Mapping[str, str]:
    """The metadata of a sandbox of which everything is known; half an answer would be taken for a whole one."""
    whole = (
        sandbox.started_at is not None
        and sandbox.end_at is not None
        and 0 < sandbox.started_at <= sandbox.end_at
        and min(sandbox.resources.cpu_count, sandbox.resources.memory_mb) > 0
    )
    if not whole:
        raise Internal(f"the record of sandbox {sandbox.id} is not whole", should_retry=False)
    return sandbox.metadata


def told(request: RestRequest | AgentRequest, error: SandgateError) -> SandgateError | None:
    """Another error where ROCK's differs."""
    if not isinstance(request, AgentRequest):
        return None
    if isinstance(error, SandboxNotFound):
        return NotFound(error.message) if is_about_files(request) else None
    if isinstance(error, NotFound) and request.route == "POST /filesystem.Filesystem/ListDir":
        return InvalidArgument(error.message)
    return None
