"""The native client, the command line of sandgate, and the front that runs the gateway's processes.

``from sandgate import Sandbox`` is the client, in ``client``. ``cli`` is the way into the rest; ``serve`` runs a gateway;
``keys`` and ``sandboxes`` ask a running one; ``doctor`` and ``demo`` help a first-time user. Nothing is imported here before
it is asked for, so that a command loads only what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandgate.client import (
        AsyncCommandHandle,
        AsyncSandbox,
        CommandExitException,
        CommandHandle,
        CommandResult,
        EntryInfo,
        FileType,
        InvalidArgumentException,
        NotFoundException,
        Output,
        OutputText,
        ProcessInfo,
        ProcessKind,
        Program,
        PtySize,
        RateLimitException,
        Sandbox,
        SandboxException,
        SandboxInfo,
        SandboxState,
        TimeoutException,
    )

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sandgate import client

    return getattr(client, name)
