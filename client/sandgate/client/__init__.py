"""The native client: sandboxes for internal services, by gRPC to the core alone.

``sandbox`` and ``async_sandbox`` hold the two faces; ``commands``, ``files`` and their async twins what hangs on them.
Below, without I/O and written once: ``*_calls`` (arguments to requests and back), ``following`` (a command over any number
of connections), ``transcript`` (its output). ``steps`` is the border between the two, which the drivers ``blocking`` and
``waiting`` cross.
"""

from sandgate.client.async_commands import AsyncCommandHandle, AsyncCommands, AsyncPty
from sandgate.client.async_files import AsyncFilesystem
from sandgate.client.async_sandbox import AsyncSandbox
from sandgate.client.commands import CommandHandle, Commands, Pty
from sandgate.client.exceptions import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    TimeoutException,
)
from sandgate.client.files import Filesystem
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
    "AsyncCommands",
    "AsyncFilesystem",
    "AsyncPty",
    "AsyncSandbox",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "Commands",
    "EntryInfo",
    "FileType",
    "Filesystem",
    "InvalidArgumentException",
    "NotFoundException",
    "Output",
    "OutputText",
    "ProcessInfo",
    "ProcessKind",
    "Program",
    "Pty",
    "PtySize",
    "RateLimitException",
    "Sandbox",
    "SandboxException",
    "SandboxInfo",
    "SandboxState",
    "TimeoutException",
]
