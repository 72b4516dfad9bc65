"""A core that dies at a step that a test chooses: ``python -m sandgate_testing.crashing_core``, as ``python -m sandgate_core``.

Steps are the two sides of everything that outlives the core: each write of a sandbox or a snapshot to the store, each call of the
process backend that changes the world. ``CRASH_AT`` is the number of the step, counted from the moment when the file ``CRASH_ARMED``
is there, so that an operation is cut at each of its steps without a place for that in the product. The death is a SIGKILL.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

__all__: list[str] = []

_WRITES = ("add", "move", "amend")
_ROWS = ("add", "publish", "give_up", "take_out", "forget")
_DEEDS = ("create", "destroy", "pause", "resume", "snapshot", "delete_snapshot")


def _main() -> int:
    from sandgate_core.__main__ import main
    from sandgate_core.snapshot_table import SnapshotTable
    from sandgate_core.store import Store
    from sandgate_plugin_process.backend import ProcessBackend

    at, armed = int(os.environ["CRASH_AT"]), Path(os.environ["CRASH_ARMED"])
    steps = itertools.count(1)

    def step() -> None:
        if armed.exists() and next(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    for owner, names in ((Store, _WRITES), (SnapshotTable, _ROWS), (ProcessBackend, _DEEDS)):
        for name in names:
            setattr(owner, name, _between(step, getattr(owner, name)))
    return main()


def _between(step: Callable[[], None], work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(work)
    async def wrapped(*args: Any, **options: Any) -> Any:
        step()
        result = await work(*args, **options)
        step()
        return result

    return wrapped


if __name__ == "__main__":
    sys.exit(_main())
