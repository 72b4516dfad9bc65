"""The lock of the state directory: one core at a time.

Two cores on one store would each hold half the truth in memory. The lock is the kernel's (flock), so it is free again
when its holder is gone, however it went. A new core waits a little for a predecessor that is still ending.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["state_lock"]

_PATIENCE = 10.0
_PAUSE = 0.05


@asynccontextmanager
async def state_lock(state_dir: Path, *, patience: float = _PATIENCE) -> AsyncIterator[None]:
    """Holds the lock while the block runs. Raises FailedPrecondition after ``patience`` seconds."""
    descriptor = os.open(state_dir / "core.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _acquire(descriptor, state_dir, patience)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


async def _acquire(descriptor: int, state_dir: Path, patience: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise FailedPrecondition(f"another core uses the state directory {state_dir} (pid {holder})") from None
        await asyncio.sleep(_PAUSE)
