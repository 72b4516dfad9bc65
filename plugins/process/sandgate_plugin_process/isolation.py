"""What the two isolations have in common: how a box is furnished, started and ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sandgate_plugin_process.boxes import Box, Record
from sandgate_plugin_process.pids import ProcessId
from sandgate_plugin_process.starting import Joining, Started

__all__ = ["Isolation", "interpreter"]


class Isolation(Protocol):
    """One way to keep a sandbox apart. All methods block and are called in threads."""

    #: What settings and records say.
    name: str
    #: Whether a sandbox can be made without network.
    can_cut_network: bool
    #: Whether all files of a box can be copied, and another box started on the copy.
    can_copy_files: bool
    #: Whether :meth:`start` puts a box into its control group before anything of it runs.
    starts_in_group: bool

    def check(self, bundle: Path, private: Sequence[Path]) -> None:
        """Try it, beside ``bundle``; ``private`` are folders that no sandbox may see.

        Raises FailedPrecondition with one line that says how to mend it.
        """

    def base_for(self, taken: set[int]) -> int | None:
        """The first of a new box's outer ids, none of ``taken``; None where boxes have no ids of their own."""

    def furnish(self, box: Box, record: Record) -> None:
        """Make the box's files."""

    def mend(self, box: Box, record: Record) -> None:
        """Make files that a sandbox has lived in fit for a new start: they are as its code left them.

        Nothing that is put in place by the gateway may follow a link that was planted there.
        """

    def connect(self, box: Box, record: Record) -> None:
        """Give files that come from a box without network what a box with one has."""

    def root(self, box: Box) -> Path:
        """The root of the sandbox's file system, as it is seen from outside."""

    def members(self, record: Record) -> list[ProcessId]:
        """Every process of the box that can be found now, parents before children."""

    def processes_by_rlimit(self) -> str:
        """How far an rlimit keeps a box's processes in number, for the operator; empty: not at all."""

    def start(self, box: Box, record: Record, *, bundle: Path, joining: Joining, processes: int | None) -> Started:
        """Start its agent, at most ``processes`` of commands by rlimit. Raises StartFailed, OSError."""

    def agent_is_up(self, box: Box) -> None:
        """Called when the agent accepts calls, before anybody is told where it is."""

    def end(self, record: Record) -> None:
        """End every process of the box, also of one whose start was never recorded; returns when none is left.

        Raises Unavailable when one does not go.
        """


def interpreter() -> Path:
    """The interpreter below the gateway's virtual environment: the agent sees nothing of that environment."""
    return Path(os.path.realpath(sys.executable))
