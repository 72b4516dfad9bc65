"""A create: what the body may say, whether it is a cold start, and the life in whole minutes (K3 to K8, K10, K12).

The edge part looks at the JSON object before the gateway does; the core part at the request that came of it, so that it
holds for callers by gRPC too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from sandgate_errors import InvalidArgument
from sandgate_plugin_api import Egress, NewSandbox, ResourceLimits

__all__ = ["CONTAINER_NAME", "START_SECONDS", "accepted_body", "new_sandbox", "whole_minutes"]

#: The key of metadata that names the container.
CONTAINER_NAME = "ap-sandbox-id"
#: What a cold start has where its metadata does not say it.
_CPU_COUNT = 2
_MEMORY_MB = 8192
#: Seconds until a sandbox must be ready.
START_SECONDS = 85.0

_LARGEST = 2**31 - 1
_INTEGER = re.compile(r"\+?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"\+?(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
#: Members of the body that ROCK takes and does not heed, whatever they say.
_WITHOUT_EFFECT = frozenset({"secure", "allow_internet_access", "autoPause", "autoResume"})
_REFUSED_WHEN_GIVEN = ("mcp", "network", "volumeMounts")


def accepted_body(body: Mapping[str, object]) -> Mapping[str, object]:
    """The body of a create without what has no effect. Raises InvalidArgument (K12)."""
    if body.get("autoPauseMemory") is not None:
        raise InvalidArgument("autoPauseMemory is not supported")
    for name in _REFUSED_WHEN_GIVEN:
        if body.get(name) not in (None, {}, [], ""):
            raise InvalidArgument(f"{name} is not supported")
    return {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}


def whole_minutes(seconds: float) -> float:
    """Rounded up (K8, K11)."""
    return math.ceil(seconds / 60) * 60.0


def new_sandbox(request: NewSandbox, *, at_deadline: Literal["kill", "stop"]) -> NewSandbox:
    """The create as ROCK means it. Raises InvalidArgument (K4)."""
    stops = at_deadline == "stop"
    request = replace(
        request,
        # What is not positive is refused by the gateway, and must not become a minute.
        timeout=whole_minutes(request.timeout) if request.timeout > 0 else request.timeout,
        secure=True,
        egress=Egress(),
        pause_on_timeout=stops,
        pause_memory=not stops,
        auto_resume=False,
        start_timeout=START_SECONDS,
        name=request.metadata.get(CONTAINER_NAME, ""),
    )
    return request if request.ready else _cold_start(request)


def _cold_start(request: NewSandbox) -> NewSandbox:
    metadata = request.metadata
    return replace(
        request,
        resources=ResourceLimits(
            cpu_count=_integer(metadata, "cpuCount", _CPU_COUNT), memory_mb=_integer(metadata, "memoryMB", _MEMORY_MB)
        ),
        start_timeout=_seconds(metadata, "startup_timeout", START_SECONDS),
    )


def _integer(metadata: Mapping[str, str], name: str, otherwise: int) -> int:
    text = metadata.get(name)
    if text is None:
        return otherwise
    if not _INTEGER.fullmatch(text) or not 0 < int(text) <= _LARGEST:
        raise InvalidArgument(f"metadata.{name} must be a positive integer")
    return int(text)


def _seconds(metadata: Mapping[str, str], name: str, otherwise: float) -> float:
    text = metadata.get(name)
    if text is None:
        return otherwise
    # By its form first: float() also takes "infinity", "nan" and "1_0".
    value = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgument(f"metadata.{name} must be a positive finite number of seconds")
    return value
