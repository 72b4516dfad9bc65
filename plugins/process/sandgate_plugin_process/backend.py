"""The process backend: one sandbox is one box, a folder on this machine and the processes that live in it.

Called by the core (``sandgate_plugin_api.backend`` says when). What this module adds to the boxes (``boxes.py``) and
their isolation (``bubblewrap.py``, ``plain.py``) is order: a record before a process, a socket before an answer, and
nothing left behind by a call that fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sandgate_errors import Conflict, FailedPrecondition, Internal, InvalidArgument, NoSpace, ResourceExhausted
from sandgate_plugin_api import (
    Backend,
    BackendContext,
    Capability,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
)
from sandgate_plugin_process import bundle
from sandgate_plugin_process.boxes import Box, Record, Shelf
from sandgate_plugin_process.bubblewrap import Bubblewrap
from sandgate_plugin_process.children import Children
from sandgate_plugin_process.isolation import Isolation
from sandgate_plugin_process.pids import boot_id
from sandgate_plugin_process.plain import Plain
from sandgate_plugin_process.settings import ProcessSettings
from sandgate_plugin_process.starting import Started, StartFailed, agent_ready, tail

__all__ = ["ProcessBackend"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_ROOM = {errno.EAGAIN: "processes", errno.EMFILE: "open files", errno.ENFILE: "open files", errno.ENOMEM: "memory"}


class ProcessBackend(Backend):
    """Sandboxes as Linux processes on the gateway's own machine."""

    name = "process"

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._shelf = Shelf(state=context.state_dir, runtime=context.runtime_dir)
        self._children = Children()
        self._bases: set[int] = set()

    async def open(self) -> None:
        self._settings = ProcessSettings.read(self._context.settings)
        # Both: boxes that an earlier start made with the other isolation still have to be ended.
        self._isolations: Mapping[str, Isolation] = {
            "bubblewrap": Bubblewrap(self._settings.bwrap),
            "none": Plain(),
        }
        self._isolation = self._isolations[self._settings.isolation]
        if self._isolation.can_cut_network:
            self.capabilities = frozenset({Capability.NO_INTERNET})
        await asyncio.to_thread(self._prepare)
        self._template = Template(id="base", resources=_visible_resources(self._context.state_dir))

    def _prepare(self) -> None:
        self._shelf.open()
        self._bundle = bundle.make(self._context.state_dir)
        self._isolation.check(self._bundle)
        records = [record for box in self._shelf.all() if (record := box.read()) is not None]
        self._bases = {record.base for record in records if record.base is not None}
        bundle.forget(self._context.state_dir, {self._bundle.name, *(record.bundle for record in records)})

    async def close(self) -> None:
        self._children.close()

    async def templates(self) -> Sequence[Template]:
        return (self._template,)

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"box": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        if request.template.id != self._template.id:
            raise InvalidArgument(f"backend 'process' has no template '{request.template.id}'")
        if not request.allow_internet_access and not self._isolation.can_cut_network:
            raise FailedPrecondition("without isolation a sandbox cannot be kept from the internet")
        box = self._shelf.box(str(handle["box"]))
        return await self._make(box, sandbox_id=request.sandbox_id, internet=request.allow_internet_access)

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        return await asyncio.to_thread(self._locate, handle)

    def _locate(self, handle: Mapping[str, object]) -> Placement | None:
        box = self._shelf.find(handle)
        record = None if box is None else box.read()
        if box is None or record is None or not record.is_alive() or not box.socket.is_socket():
            return None
        return box.placement(record)

    async def survey(self) -> Sequence[Survivor]:
        return await asyncio.to_thread(self._survey)

    def _survey(self) -> Sequence[Survivor]:
        # A box whose record is lost was made for the sandbox it is named after: only those are named otherwise that
        # were made ahead, and what is left of such a one is nobody's.
        return [
            Survivor(sandbox_id=box.name if record is None else record.sandbox_id, handle=box.handle)
            for box, record in ((box, box.read()) for box in self._shelf.all())
        ]

    async def destroy(self, handle: Mapping[str, object]) -> None:
        await _to_its_end(self._destroy(handle))

    async def _destroy(self, handle: Mapping[str, object]) -> None:
        box = await asyncio.to_thread(self._shelf.find, handle)
        if box is not None:
            await self._erase(box)

    async def _make(self, box: Box, *, sandbox_id: str, internet: bool) -> Placement:
        """A box with an agent that accepts calls, or nothing at all."""
        record = Record.fresh(
            sandbox_id=sandbox_id,
            isolation=self._isolation.name,
            bundle=self._bundle.name,
            base=self._take_base(),
            internet=internet,
        )
        started: Started | None = None

        async def start() -> None:
            nonlocal started, record
            new, record = await asyncio.to_thread(self._start, box, record)
            self._children.adopt(new.popen)
            started = new

        try:
            await _to_its_end(start())
            assert started is not None  # noqa: S101 - start() has returned
            await agent_ready(started.output, box.log)
            self._isolation.agent_is_up(box)
        except Conflict:
            # The box of that name is another call's.
            self._give_base_back(record)
            raise
        except BaseException as error:
            if started is not None:
                started.output.close()
            report = _told(error, box) if isinstance(error, OSError | StartFailed) else None
            await _to_its_end(self._erase(box, record))
            if report is not None:
                raise report from error
            raise
        return box.placement(record)

    def _start(self, box: Box, record: Record) -> tuple[Started, Record]:
        box.make(record)
        self._isolation.furnish(box, record)
        started = self._isolation.start(box, record, self._bundle)
        record = record.started(main=started.main, init=started.init)
        box.write(record)
        return started, record

    async def _erase(self, box: Box, record: Record | None = None) -> None:
        """End the processes of a box and remove its files."""
        record = await asyncio.to_thread(self._clear, box, record)
        self._give_base_back(record)

    def _clear(self, box: Box, known: Record | None) -> Record | None:
        record = box.read() or known
        if record is not None and record.boot_id == boot_id():
            self._isolations[record.isolation].end(record)
        box.remove()
        return record

    def _take_base(self) -> int | None:
        base = self._isolation.base_for(self._bases)
        if base is not None:
            self._bases.add(base)
        return base

    def _give_base_back(self, record: Record | None) -> None:
        if record is not None and record.base is not None:
            self._bases.discard(record.base)

    @classmethod
    def diagnose(cls, settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
        return ()


async def _to_its_end(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even when cancelled meanwhile; the cancellation then goes on.

    For what a cancellation must not tear apart: a thread cannot be stopped, and a half-ended box would be left.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("failed while its caller was cancelled", exc_info=failure)
        raise cancelled
    return task.result()


def _told(error: OSError | StartFailed, box: Box) -> Exception:
    """What a client hears of a failed start; the log hears more."""
    _log.error("a sandbox could not be started: %s; its log ends: %s", error, tail(box.log))
    code = error.errno if isinstance(error, OSError) else None
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace("no disk space is left for another sandbox")
    if code in _NO_ROOM:
        return ResourceExhausted(f"the machine has no {_NO_ROOM[code]} left for another sandbox")
    return Internal("the sandbox could not be started")


def _visible_resources(folder: Path) -> Resources:
    """What a sandbox can see of the machine: this version limits nothing."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Resources(
        cpu_count=len(os.sched_getaffinity(0)),
        memory_mb=pages * page // 2**20,
        disk_size_mb=shutil.disk_usage(folder).total // 2**20,
    )
