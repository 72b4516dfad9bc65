"""How a process ended, as the end event says it (behaviour.md O10-O12).

Made by :mod:`sandgate_agent.process` from what the spawner was told by the kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["End"]

# As the Go standard library words them, which clients match (O12).
_SIGNAL_TEXTS = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    5: "trace/breakpoint trap",
    6: "aborted",
    7: "bus error",
    8: "floating point exception",
    9: "killed",
    10: "user defined signal 1",
    11: "segmentation fault",
    12: "user defined signal 2",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
    16: "stack fault",
    24: "CPU time limit exceeded",
    25: "file size limit exceeded",
    26: "virtual timer expired",
    27: "profiling timer expired",
    29: "I/O possible",
    30: "power failure",
    31: "bad system call",
}


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended, as the end event says it (O10-O12)."""

    exit_code: int
    exited: bool
    status: str
    #: The time limit ended it.
    timed_out: bool = False
    #: It was ended because nobody read its output (X13).
    truncated: bool = False

    @property
    def error(self) -> str | None:
        if self.truncated:
            return "output_truncated"
        return None if self.exited and self.exit_code == 0 else self.status

    @classmethod
    def of(cls, status: int | None, *, timed_out: bool = False, truncated: bool = False) -> End:
        """From a wait status; None when it was lost with the process that knew it."""
        code, exited, text = _described(status)
        return cls(exit_code=code, exited=exited, status=text, timed_out=timed_out, truncated=truncated)


def _described(status: int | None) -> tuple[int, bool, str]:
    """Exit code, whether it exited, and the text."""
    if status is None:
        return -1, False, "exit status unknown"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        text = _SIGNAL_TEXTS.get(number, f"signal {number}")
        dumped = " (core dumped)" if os.WCOREDUMP(status) else ""
        return -1, False, f"signal: {text}{dumped}"
    code = os.WEXITSTATUS(status)
    return code, True, f"exit status {code}"
