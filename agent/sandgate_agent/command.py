"""What a caller asked to start (behaviour.md 3), checked before anything is opened for it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandgate_agent.pty import Size
from sandgate_errors import InvalidArgument

__all__ = ["Command", "Reach"]

_LONGEST_GRACE = 60.0


class Reach(enum.Enum):
    """What signals and the time limit of a command reach (behaviour.md, end of 15.2)."""

    #: The process group, and whatever else of the command the kernel lets us know: the default (B03).
    FAMILY = enum.auto()
    #: The process group alone: what left it lives on (X1, X3, X9).
    GROUP = enum.auto()
    #: The family, and the command is made the subreaper of its descendants so that none can get away (X4-X6).
    TREE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a caller asked to start."""

    cmd: str
    args: Sequence[str] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    #: As asked for; the resolved one is an argument of its own.
    cwd: str | None = None
    tag: str | None = None
    stdin: bool = True
    #: Present: on a terminal.
    size: Size | None = None
    #: Seconds.
    limit: float | None = None
    reach: Reach = Reach.FAMILY
    #: Seconds from SIGTERM to SIGKILL at the limit; 0: SIGKILL at once.
    term_grace: float = 0.0
    #: Whether output waits for a reader (X13).
    strict_output: bool = False

    def check(self) -> None:
        if not self.cmd:
            raise InvalidArgument("cmd is empty")
        if any("\0" in text for text in (self.cmd, *self.args)):
            raise InvalidArgument("cmd and args must not contain a NUL byte")
        for name, value in self.envs.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise InvalidArgument(f"'{name[:100]}' is not a valid variable, or its value contains a NUL byte")
        if self.size is not None:
            self.size.check()
        if not 0 <= self.term_grace <= _LONGEST_GRACE:
            raise InvalidArgument(f"term_grace is not between 0 and {_LONGEST_GRACE:g} s")
