"""The body of a create: from JSON members to the core's ``CreateRequest``.

Fields, defaults and meanings are those of ``rest.md`` 4.1 and 4.2. What this gateway cannot do is refused by name here
(volumes, identity tokens, header rules) or by the core, which knows the backend's capabilities.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.rest.bodies import Members
from sandgate_errors import InvalidArgument

__all__ = ["NOT_OFFERED_RULES", "TIMEOUT_V1", "TIMEOUT_V2", "create_request"]

#: Seconds of life when the body names none: by the old create route, and by everything newer.
TIMEOUT_V1 = 15
TIMEOUT_V2 = 300
#: Members of the network object that ask for what this gateway cannot do.
NOT_OFFERED_RULES = ("rules", "egressProxy", "dnsServers", "httpsPorts")


def create_request(body: Members, *, secure: bool, default_timeout: int) -> sandboxes_pb2.CreateRequest:
    """Raises InvalidArgument that names the member at fault."""
    body.refuse("volumeMounts", "iam")
    # The SDK starts the MCP gateway itself once the sandbox is there (``behaviour.md`` C11).
    body.nested("mcp")
    timeout = body.integer("timeout")
    return sandboxes_pb2.CreateRequest(
        template_id=body.required_text("templateID"),
        timeout=Duration(seconds=default_timeout if timeout is None else timeout),
        metadata=body.text_map("metadata"),
        envs=_envs(body),
        secure=secure,
        allow_internet_access=body.flag("allow_internet_access"),
        on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE if body.flag("autoPause") else sandboxes_pb2.ON_TIMEOUT_KILL,
        auto_resume=bool(body.nested("autoResume").flag("enabled")),
        network=_network(body.nested("network")),
        pause_memory=body.flag("autoPauseMemory"),
    )


def _envs(body: Members) -> dict[str, str]:
    envs = body.text_map("envVars")
    if any(not name or "=" in name for name in envs):
        raise InvalidArgument("envVars must not have a name that is empty or contains '='")
    return envs


def _network(network: Members) -> sandboxes_pb2.NetworkRules:
    """The rules that differ from the default: a message without any of them stands for "no rules"."""
    network.refuse(*NOT_OFFERED_RULES)
    # A rule that nobody knows would be one that nobody keeps.
    network.refuse_others("allowOut", "denyOut", "allowPublicTraffic", "maskRequestHost")
    public = network.flag("allowPublicTraffic")
    return sandboxes_pb2.NetworkRules(
        allow_out=network.texts("allowOut"),
        deny_out=network.texts("denyOut"),
        # True is what the core assumes.
        allow_public_traffic=False if public is False else None,
        mask_request_host=network.text("maskRequestHost") or "",
    )
