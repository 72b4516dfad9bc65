"""How the program that runs the agent is started once more, as ``sudo`` needs it.

In the portable bundle a loader stands in front of it (docs/architecture.md, "The agent's start"): the system around may
have none, or another.
"""

from __future__ import annotations

import os
import sys

__all__ = ["interpreter_command"]


def interpreter_command() -> list[str]:
    """The interpreter's path, behind the loader and its options if it was started through one."""
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    # The loader takes itself and its options away, so Python knows of the rest only.
    own = len(words) - len(sys.orig_argv)
    return [*words[: max(own, 0)], sys.executable]
