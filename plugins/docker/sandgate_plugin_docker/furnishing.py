"""What a read-only root file system needs beforehand, as nothing in it can be added later.

The account `user` and the profile that keeps a PATH are put over the image's own files, by mounts. They are made once for
each image: from a container of it that is never started.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from sandgate_plugin_docker import enter
from sandgate_plugin_docker.boxes import Identity
from sandgate_plugin_docker.containers import HELPER_LABEL
from sandgate_plugin_docker.engine import Engine
from sandgate_plugin_docker.templates import Model

__all__ = ["Furnishing"]

_READ = ("/etc/passwd", "/etc/group", "/etc/profile")


class Furnishing:
    """Files for containers of read-only images, below ``state``."""

    def __init__(self, engine: Engine, identity: Identity, state: Path) -> None:
        self._engine = engine
        self._identity = identity
        self._folder = state / "furnishing"
        self._locks: dict[str, asyncio.Lock] = {}

    async def shown(self, model: Model) -> Mapping[str, Path]:
        """Place in the sandbox -> file of this machine."""
        key = f"{model.image.id} {sorted(model.account.items())}"
        folder = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        async with self._locks.setdefault(folder.name, asyncio.Lock()):
            if not folder.is_dir():
                await self._make(folder, model)
        return {f"/etc/{file.name}": file for file in sorted(folder.iterdir())}

    async def _make(self, folder: Path, model: Model) -> None:
        found = await self._read(model)
        passwd, group = enter.accounts_with_user(
            found["/etc/passwd"] or "", found["/etc/group"] or "", wanted=model.account, shell=enter.SHELL
        )
        files = {"passwd": passwd, "group": group}
        if (profile := found["/etc/profile"]) is not None:
            # There is no second place for it that a mount could make: both in one file.
            files["profile"] = enter.profile_around(profile)
        draft = folder.with_name(f"{folder.name}.new")
        draft.mkdir(parents=True, exist_ok=True)
        for parent in (folder.parent, draft):
            parent.chmod(0o755)
        for name, text in files.items():
            (draft / name).write_text(text, errors="surrogateescape")
            (draft / name).chmod(0o644)
        draft.rename(folder)

    async def _read(self, model: Model) -> Mapping[str, str | None]:
        config = {
            "Image": model.image.id,
            "Cmd": ["/never-started"],
            "Labels": {HELPER_LABEL: self._identity.gateway},
        }
        name = f"sandgate-{self._identity.gateway}-r{secrets.token_hex(8)}"
        container = await self._engine.create(config, name=name)
        try:
            texts = {path: await self._engine.read_file(container, path) for path in _READ}
        finally:
            await self._engine.remove(container)
        return {path: None if text is None else text.decode(errors="surrogateescape") for path, text in texts.items()}
