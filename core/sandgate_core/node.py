"""The name of a core among those of one database: its node id.

It lies in the state directory, next to what a core cannot give away: the sandboxes of its host. Whoever starts on the same
directory again is the same core and finds its sandboxes.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["node_of"]

_FILE = "node"
_ID = re.compile(r"n[0-9a-f]{12}")


def node_of(state_dir: Path) -> str:
    """The node id of a state directory, made if need be. Needs its lock. Raises FailedPrecondition when it is damaged."""
    path = state_dir / _FILE
    try:
        if not path.exists():
            _write_whole(path, f"n{secrets.token_hex(6)}\n")
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise FailedPrecondition(f"the node id {path} cannot be used: {error.strerror}") from error
    if not _ID.fullmatch(text):
        raise FailedPrecondition(
            f"{path} is damaged: put back its node id, which the gateway's log names at each start, or else its sandboxes "
            "are out of reach"
        )
    return text


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all, whatever cuts this off, and for nobody else to read."""
    draft = path.with_suffix(".new")
    with open(
        os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="ascii"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
