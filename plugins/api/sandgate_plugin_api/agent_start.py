"""Starting the agent where the gateway's own Python is, for backends whose sandboxes are processes of this machine.

A backend starts :func:`agent_command`, writes :func:`agent_settings` and a line feed to its standard input, and reads one
line of JSON from its standard output: ``{"ready": true}``, or ``{"ready": false, "error": ...}``. Both are then closed;
SIGTERM ends the agent and all it has started. Where the sandbox has a file system of its own, it needs the agent's bundle
instead (docs/architecture.md, "The agent's start").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["agent_command", "agent_settings", "agent_sockets"]

# Of the socket on which open files are handed over (docs/architecture.md, "Large downloads").
_FILES = ".files"


def agent_command() -> list[str]:
    """The program and its arguments. It needs no environment but ``PATH``."""
    # -P: the working directory is a sandbox's, and anything may lie there. -X utf8: the agent insists on it.
    return [sys.executable, "-P", "-X", "utf8", "-m", "sandgate_agent"]


def agent_settings(*, socket: str, token: str, homes: Mapping[str, str]) -> str:
    """The line of an agent without isolation: every account of ``homes`` (name to folder) is the agent's own user.

    ``socket`` is a path of at most 101 bytes, so that there is room for its neighbour (:func:`agent_sockets`); ``token``
    is a secret of the backend's making. Both are then the sandbox's
    :class:`~sandgate_plugin_api.records.AgentAddress`.
    """
    return json.dumps(
        {
            "listen": f"unix:{socket}",
            "token": token,
            "identity": "same",
            "accounts": {name: {"home": home} for name, home in homes.items()},
            "system_files": False,
        }
    )


def agent_sockets(socket: Path) -> tuple[Path, ...]:
    """All that an agent puts where it listens on ``socket``. One that was killed leaves them: remove them with its sandbox."""
    return socket, socket.with_name(socket.name + _FILES)
