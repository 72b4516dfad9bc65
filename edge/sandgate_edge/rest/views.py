"""Sandboxes as the JSON objects of the control plane (``rest.md`` 3.1 to 3.4).

Optional members that are not known are left out: several clients cannot read a ``null`` there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_errors import Internal

__all__ = ["CLIENT_ID", "JsonObject", "detail_view", "listed_view", "sandbox_view", "timestamp_text"]

JsonObject: TypeAlias = dict[str, object]

#: Required by every client and read by none.
CLIENT_ID = "sandgate"

_STATES = {
    sandboxes_pb2.SANDBOX_STATE_RUNNING: "running",
    sandboxes_pb2.SANDBOX_STATE_PAUSED: "paused",
}
# Left out while it runs: the clients know these two words only.
_PAUSE_MODES = {
    sandboxes_pb2.PAUSE_MODE_FULL: "full",
    sandboxes_pb2.PAUSE_MODE_FILESYSTEM: "filesystem",
}


def sandbox_view(sandbox: sandboxes_pb2.Sandbox, *, domain: str | None) -> JsonObject:
    """The answer of create and connect. ``domain`` is left out when the gateway has none: clients then use their own."""
    return {
        **_identity(sandbox),
        **_given("envdAccessToken", sandbox.access_token),
        **_given("trafficAccessToken", sandbox.traffic_access_token),
        **_given("domain", domain),
    }


def listed_view(sandbox: sandboxes_pb2.Sandbox) -> JsonObject:
    """One item of a list; no token and no rules."""
    return {
        **_identity(sandbox),
        "startedAt": timestamp_text(sandbox.started_at),
        "endAt": timestamp_text(sandbox.end_at),
        "cpuCount": sandbox.resources.cpu_count,
        "memoryMB": sandbox.resources.memory_mb,
        "diskSizeMB": sandbox.resources.disk_size_mb,
        "state": _state(sandbox),
        "metadata": dict(sandbox.metadata),
        **({"envdUnresponsiveAtPause": True} if sandbox.agent_unresponsive_at_pause else {}),
    }


def detail_view(sandbox: sandboxes_pb2.Sandbox, *, domain: str | None) -> JsonObject:
    """Everything about one sandbox."""
    return {
        **listed_view(sandbox),
        **_given("envdAccessToken", sandbox.access_token),
        **_given("domain", domain),
        "allowInternetAccess": sandbox.allow_internet_access,
        "lifecycle": {
            "autoResume": sandbox.auto_resume,
            "onTimeout": "pause" if sandbox.on_timeout == sandboxes_pb2.ON_TIMEOUT_PAUSE else "kill",
        },
        "network": _network(sandbox.network),
        "volumeMounts": [],
        **_given("pauseMode", _PAUSE_MODES.get(sandbox.pause_mode)),
    }


def timestamp_text(moment: Timestamp) -> str:
    """RFC 3339 in UTC, whole milliseconds, `Z`. Cut rather than rounded, so that it never lies after the real moment."""
    seconds = datetime.fromtimestamp(moment.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{moment.nanos // 1_000_000:03d}Z"


def _identity(sandbox: sandboxes_pb2.Sandbox) -> JsonObject:
    return {
        "sandboxID": sandbox.id,
        "templateID": sandbox.template_id,
        "clientID": CLIENT_ID,
        "envdVersion": sandbox.envd_version,
        **_given("alias", sandbox.alias),
    }


def _given(name: str, value: str | None) -> JsonObject:
    return {name: value} if value else {}


def _state(sandbox: sandboxes_pb2.Sandbox) -> str:
    state = _STATES.get(sandbox.state)
    if state is None:
        # A value the clients do not know makes them fail on the whole answer.
        raise Internal(f"sandbox {sandbox.id} is in a state that cannot be shown")
    return state


def _network(rules: sandboxes_pb2.NetworkRules) -> JsonObject:
    view: JsonObject = {}
    if rules.allow_out:
        view["allowOut"] = list(rules.allow_out)
    if rules.deny_out:
        view["denyOut"] = list(rules.deny_out)
    if rules.HasField("allow_public_traffic"):
        view["allowPublicTraffic"] = rules.allow_public_traffic
    return {**view, **_given("maskRequestHost", rules.mask_request_host)}
