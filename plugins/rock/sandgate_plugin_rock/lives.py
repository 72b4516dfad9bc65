"""How long each sandbox lives after it was used (K9): as long as it was last told to.

The gateway remembers what a create asked for. What a set-timeout asked for later is kept here, one small file for each such
sandbox, in the plugin's folder, so that a restart does not change how long sandboxes live.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandgate_plugin_api import SandboxInfo

__all__ = ["Lives"]


class Lives:
    """Seconds of life by sandbox."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, float] = {}

    async def load(self) -> None:
        self._known = await asyncio.to_thread(self._read)

    def _read(self) -> dict[str, float]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found: dict[str, float] = {}
        for path in self._folder.iterdir():
            try:
                found[path.name] = float(path.read_text())
            except ValueError:
                # Cut off by a crash: what the create asked for holds.
                path.unlink(missing_ok=True)
        return found

    async def keep(self, sandbox: SandboxInfo, life: float) -> None:
        """A set-timeout has asked for ``life`` seconds; 0: its end, which no use that is told late may put off (K11)."""
        life = max(life, 0.0)
        if self._known.get(sandbox.id, sandbox.life) == life:
            return
        self._known[sandbox.id] = life
        await asyncio.to_thread((self._folder / sandbox.id).write_text, repr(life))

    def of(self, sandbox: SandboxInfo) -> float | None:
        """None: a use changes nothing."""
        return self._known.get(sandbox.id, sandbox.life) or None

    async def forget(self, sandbox: SandboxInfo) -> None:
        """It has ended, or begins anew."""
        if self._known.pop(sandbox.id, None) is not None:
            await asyncio.to_thread((self._folder / sandbox.id).unlink, missing_ok=True)
