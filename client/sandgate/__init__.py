"""The native client, the command line of sandgate, and the front that runs the gateway's processes.

``from sandgate import Sandbox`` is the client, in ``client``. ``cli`` is the way into the rest; ``serve`` runs a gateway;
``keys`` and ``sandboxes`` ask a running one; ``doctor`` and ``demo`` help a first-time user. Nothing is imported here before
it is asked for, so that a command loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandgate.client.async_commands import AsyncCommandHandle
    from sandgate.client.async_sandbox import AsyncSandbox
    from sandgate.client.commands import CommandHandle
    from sandgate.client.exceptions import (
        CommandExitException,
        InvalidArgumentException,
        NotFoundException,
        RateLimitException,
        SandboxException,
        TimeoutException,
    )
    from sandgate.client.process_calls import Program
    from sandgate.client.records import (
        CommandResult,
        EntryInfo,
        FileType,
        Output,
        OutputText,
        ProcessInfo,
        ProcessKind,
        PtySize,
        SandboxInfo,
        SandboxState,
    )
    from sandgate.client.sandbox import Sandbox

__all__ = [
    "AsyncCommandHandle",
    "AsyncSandbox",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "EntryInfo",
    "FileType",
    "InvalidArgumentException",
    "NotFoundException",
    "Output",
    "OutputText",
    "ProcessInfo",
    "ProcessKind",
    "Program",
    "PtySize",
    "RateLimitException",
    "Sandbox",
    "SandboxException",
    "SandboxInfo",
    "SandboxState",
    "TimeoutException",
]

#: Where each name is; what is in none of these is a record.
_PLACES = {
    "async_commands": {"AsyncCommandHandle"},
    "async_sandbox": {"AsyncSandbox"},
    "commands": {"CommandHandle"},
    "exceptions": {name for name in __all__ if name.endswith("Exception")},
    "process_calls": {"Program"},
    "sandbox": {"Sandbox"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = next((place for place, names in _PLACES.items() if name in names), "records")
    return getattr(import_module(f"sandgate.client.{place}"), name)
