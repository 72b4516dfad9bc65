"""Snapshots on disk: copies of root file systems, apart from the boxes they were made of.

::

    <state>/snapshots/<id>/rootfs/       the files, owned by the ids of the box they were copied from
    <state>/snapshots/<id>/origin.json   which ids those are
    <state>/snapshots/<id>.new/          one that is being made; what a crash leaves of it goes with the next start
    <state>/snapshots/<id>.gone-…/       one that is being removed

A copy gets its own name when it is whole. One that is being read is not removed before its readers are done.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from sandgate_errors import FailedPrecondition, Internal, NotFound
from sandgate_plugin_process.boxes import Box, Record
from sandgate_plugin_process.copying import Owners, copy_tree
from sandgate_plugin_process.removal import remove_tree

__all__ = ["Snapshots"]

_NAME = re.compile(r"[a-z0-9]{1,40}")


class Snapshots:
    """All snapshots of one gateway."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "snapshots"
        self._readers: Counter[str] = Counter()
        self._read = asyncio.Condition()

    def open(self) -> None:
        """Blocks. Removes what an earlier start began and did not finish."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for entry in self._folder.iterdir():
            if not _NAME.fullmatch(entry.name):
                remove_tree(entry)

    def take(self, snapshot_id: str, box: Box, record: Record, *, stop: threading.Event) -> Mapping[str, object]:
        """The handle of a copy of a box that stands still; blocks. Raises Stopped, OSError; nothing is left then."""
        whole = self._place(snapshot_id)
        draft = whole.with_name(f"{whole.name}.new")
        remove_tree(draft)
        try:
            draft.mkdir(mode=0o700)
            copy_tree(box.rootfs, draft / "rootfs", owners=Owners(record.base, record.base), stop=stop)
            (draft / "origin.json").write_text(json.dumps({"base": record.base, "internet": record.internet}))
            draft.rename(whole)
        except BaseException:
            remove_tree(draft)
            raise
        return {"snapshot_id": snapshot_id}

    def unfold(self, handle: Mapping[str, object], box: Box, record: Record, *, stop: threading.Event) -> bool:
        """Make the files of a new box; blocks. Whether what they are from had a network. Raises Stopped, NotFound, OSError."""
        place = self._place_of(handle)
        try:
            origin = json.loads((place / "origin.json").read_text())
        except FileNotFoundError:
            raise NotFound("the snapshot is gone") from None
        base = origin["base"]
        if (base is None) is not (record.base is None):
            raise FailedPrecondition(
                "the snapshot was made by a gateway that ran as another user: only as that one can it be used"
            )
        copy_tree(place / "rootfs", box.rootfs, owners=Owners(base, record.base), stop=stop)
        return bool(origin["internet"])

    @asynccontextmanager
    async def reading(self, handle: Mapping[str, object]) -> AsyncIterator[None]:
        """For as long as the block runs, the snapshot is not removed."""
        name = self._place_of(handle).name
        self._readers[name] += 1
        try:
            yield
        finally:
            self._readers[name] -= 1
            if not self._readers[name]:
                del self._readers[name]
            async with self._read:
                self._read.notify_all()

    async def remove(self, handle: Mapping[str, object]) -> None:
        """Returns when nothing of it is left; one that is not there is success."""
        place = self._place_of(handle)
        gone = place.with_name(f"{place.name}.gone-{secrets.token_hex(4)}")
        async with self._read:
            await self._read.wait_for(lambda: not self._readers[place.name])
            try:
                os.rename(place, gone)
            except FileNotFoundError:
                pass
        await asyncio.to_thread(remove_tree, gone)
        await asyncio.to_thread(remove_tree, place.with_name(f"{place.name}.new"))

    def _place_of(self, handle: Mapping[str, object]) -> Path:
        return self._place(str(handle.get("snapshot_id", "")))

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise Internal("the handle of the snapshot is damaged")
        return self._folder / name
