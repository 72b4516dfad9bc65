"""What the core keeps of a sandbox: enough for another core to find it, and to start it anew on its files.

``gateway``, ``sandbox``
    Its name, from before it is made.
``id``
    The server's id; absent before it is made and while only its files are kept.
``template``, ``cpu_count``, ``memory_mb``
    What it was made as.
``paused``, ``kept``, ``network``
    While it is paused: ``memory`` or ``files``; the snapshot with its files, where it is one; the rules that held.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandgate_errors import Internal
from sandgate_plugin_opensandbox.identity import Name

__all__ = ["Handle", "id_of", "name_of", "running"]

Handle = Mapping[str, object]

_WHILE_PAUSED = frozenset({"paused", "kept", "network"})


def name_of(handle: Handle) -> Name:
    return Name.of(handle.get("gateway"), handle.get("sandbox"))


def id_of(handle: Handle) -> str | None:
    """The server's id, or that of a snapshot under the key ``kept``."""
    found = handle.get("id")
    if found is not None and (not isinstance(found, str) or not found):
        raise Internal("the handle of the sandbox is damaged")
    return found


def running(handle: Handle, sandbox: str) -> dict[str, object]:
    """The handle of a sandbox that is not paused (any more)."""
    kept = {key: value for key, value in handle.items() if key not in _WHILE_PAUSED}
    return {**kept, "id": sandbox}
