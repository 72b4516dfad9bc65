"""The process backend: one sandbox is one box, a folder on this machine and the processes that live in it.

Called by the core (``sandgate_plugin_api.backend`` says when). What this module adds to the boxes (``boxes.py``) and
their isolation (``bubblewrap.py``, ``plain.py``) is order: a record before a process, a socket before an answer, and
nothing left behind by a call that fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from sandgate_errors import (
    CapabilityMissing,
    Conflict,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SandgateError,
)
from sandgate_plugin_api import (
    Backend,
    BackendContext,
    Capability,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
    Usage,
    to_its_end,
)
from sandgate_plugin_process import bundle
from sandgate_plugin_process.allowance import Allowance
from sandgate_plugin_process.boxes import Box, Record, Shelf
from sandgate_plugin_process.bubblewrap import Bubblewrap
from sandgate_plugin_process.children import Children
from sandgate_plugin_process.copying import Stopped
from sandgate_plugin_process.diagnosis import diagnose
from sandgate_plugin_process.isolation import Isolation
from sandgate_plugin_process.plain import Plain
from sandgate_plugin_process.settings import ProcessSettings
from sandgate_plugin_process.snapshots import Snapshots
from sandgate_plugin_process.standstill import Standstill, group_for, record_of
from sandgate_plugin_process.starting import Joining, Started, StartFailed, agent_ready, give_up, tail, told
from sandgate_plugin_process.usage import Gauge, Meter
from sandgate_plugin_process.warm import WarmPool

__all__ = ["ProcessBackend"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Boxes made ahead are named after nobody; a sandbox's id begins with "i".
_WARM_PREFIX = "w"
_REMOVALS_AT_ONCE = 4


class ProcessBackend(Backend):
    """Sandboxes as Linux processes on the gateway's own machine."""

    name = "process"
    capabilities = frozenset({Capability.PAUSE, Capability.PAUSE_FILESYSTEM})

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._shelf = Shelf(state=context.state_dir, runtime=context.runtime_dir)
        self._snapshots = Snapshots(context.state_dir)
        self._children = Children()
        self._bases: set[int] = set()
        self._warm: WarmPool[Box] | None = None
        #: Names of the boxes that are the pool's: made or being made, and given to nobody.
        self._spare: set[str] = set()
        # Of their own: removing what a sandbox has filled may take long, and must not keep others from being made.
        self._removals = ThreadPoolExecutor(max_workers=_REMOVALS_AT_ONCE, thread_name_prefix="box-removal")
        self._locks: MutableMapping[str, asyncio.Lock] = WeakValueDictionary()
        self._meter = Meter()

    async def open(self) -> None:
        self._settings = ProcessSettings.read(self._context.settings)
        # Both: boxes that an earlier start made with the other isolation still have to be ended.
        self._isolations: Mapping[str, Isolation] = {
            "bubblewrap": Bubblewrap(self._settings.bwrap),
            "none": Plain(),
        }
        self._standstill = Standstill(self._isolations)
        self._isolation = self._isolations[self._settings.isolation]
        if self._isolation.can_cut_network:
            self.capabilities |= {Capability.NO_INTERNET}
        if self._isolation.can_copy_files:
            self.capabilities |= {Capability.SNAPSHOT}
        try:
            await asyncio.to_thread(self._prepare)
        except OSError as error:
            raise FailedPrecondition(f"backend 'process' cannot get ready: {error}") from error
        if self._allowance.limits_resources:
            self.capabilities |= {Capability.LIMITS}
        self._warm = WarmPool(self._settings.warm, make=self._make_warm, discard=self._erase)
        self._warm.open()

    def _prepare(self) -> None:
        self._shelf.open()
        self._snapshots.open()
        self._bundle = bundle.make(self._context.state_dir)
        self._isolation.check(self._bundle, (self._context.state_dir, self._context.runtime_dir))
        self._allowance = Allowance.find(self._settings, self._isolation, self._context.state_dir)
        self._template = Template(id="base", resources=self._allowance.resources)
        self._clear_warm()
        records = [record for box in self._shelf.all() if (record := box.read()) is not None]
        self._allowance.ground.sweep(record.mark for record in records)
        self._bases = {record.base for record in records if record.base is not None}
        bundle.forget(self._context.state_dir, {self._bundle.name, *(record.bundle for record in records)})

    def _clear_warm(self) -> None:
        """End what an earlier core had made ahead and could not end itself."""
        for box in self._shelf.all():
            record = box.read()
            if record.sandbox_id == "" if record is not None else box.name.startswith(_WARM_PREFIX):
                try:
                    self._clear(box, record)
                except SandgateError as error:
                    _log.warning("a warm sandbox of an earlier start is still there: %s", error)

    async def close(self) -> None:
        if self._warm is not None:
            await self._warm.close()
        self._children.close()
        self._meter.close()
        self._removals.shutdown(wait=False)

    async def templates(self) -> Sequence[Template]:
        return (self._template,)

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        return {"box": request.sandbox_id}

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        if request.snapshot is None and request.template.id != self._template.id:
            raise InvalidArgument(f"backend 'process' has no template '{request.template.id}'")
        if not request.allow_internet_access and not self._isolation.can_cut_network:
            raise FailedPrecondition("without isolation a sandbox cannot be kept from the internet")
        box, internet = self._shelf.box(str(handle["box"])), request.allow_internet_access
        resources = self._allowance.admitted(request.template.resources, kept=request.snapshot is not None)
        try:
            if request.snapshot is not None:
                self._check_snapshots()
                async with self._snapshots.reading(request.snapshot):
                    return await self._make(
                        box,
                        sandbox_id=request.sandbox_id,
                        internet=internet,
                        resources=resources,
                        snapshot=request.snapshot,
                    )
            usual = internet and resources == self._template.resources
            if usual and (placement := await self._claim(request.sandbox_id)) is not None:
                return placement
            return await self._make(box, sandbox_id=request.sandbox_id, internet=internet, resources=resources)
        except (OSError, StartFailed) as error:
            raise told(error) from error

    async def _claim(self, sandbox_id: str) -> Placement | None:
        """One that was made ahead, if there is one that lives."""
        while self._warm is not None and (box := self._warm.take()) is not None:
            try:
                placement = await _to_its_end(asyncio.to_thread(_give, box, sandbox_id))
            except BaseException:
                await _to_its_end(self._erase(box))
                raise
            if placement is not None:
                self._spare.discard(box.name)
                return placement
            _log.warning("a warm sandbox had ended before it was used; its log ends: %s", tail(box.log))
            await _to_its_end(self._erase(box))
        return None

    async def _make_warm(self) -> Box:
        box = self._shelf.box(_WARM_PREFIX + secrets.token_hex(10))
        self._spare.add(box.name)
        try:
            await self._make(box, sandbox_id="", internet=True, resources=self._template.resources)
        except BaseException:
            self._spare.discard(box.name)
            raise
        return box

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        box = await asyncio.to_thread(self._shelf.find, handle)
        if box is None:
            return None
        record = await asyncio.to_thread(box.read)
        if record is not None and record.paused == "copy":
            # Either a copy is under way, or the gateway went down in the middle of one.
            async with self._busy(box):
                record = await _to_its_end(asyncio.to_thread(self._standstill.going_on, box))
        alive = record is not None and await asyncio.to_thread(record.is_alive) and box.socket.is_socket()
        return box.placement(record) if record is not None and alive else None

    async def survey(self) -> Sequence[Survivor]:
        return await asyncio.to_thread(self._survey)

    def _survey(self) -> Sequence[Survivor]:
        # The pool's boxes are this object's own business until they are somebody's.
        boxes = [box for box in self._shelf.all() if box.name not in self._spare]
        # A box whose record is lost was made for the sandbox it is named after: only those are named otherwise that
        # were made ahead, and what is left of such a one is nobody's.
        return [
            Survivor(sandbox_id=box.name if record is None else record.sandbox_id, handle=box.handle)
            for box, record in ((box, box.read()) for box in boxes)
        ]

    async def destroy(self, handle: Mapping[str, object]) -> None:
        await _to_its_end(self._destroy(handle))

    async def _destroy(self, handle: Mapping[str, object]) -> None:
        box = await asyncio.to_thread(self._shelf.find, handle)
        if box is not None:
            async with self._busy(box):
                await self._erase(box)
        self._meter.forget(str(handle["box"]))

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        box = await self._existing(handle)
        async with self._busy(box):
            await _to_its_end(asyncio.to_thread(self._pause, box, memory=memory))
            if not memory:
                self._meter.forget(box.name)
        return box.handle

    def _pause(self, box: Box, *, memory: bool) -> None:
        record = self._standstill.going_on(box)
        if not memory:
            self._standstill.end(record)
            box.write(record.ended())
        elif record.paused == "files":
            raise DataLoss("the memory of the sandbox was given up before")
        elif not record.is_alive():
            raise NotFound("the sandbox has ended")
        else:
            self._standstill.freeze(box, record)

    async def snapshot(self, handle: Mapping[str, object], *, snapshot_id: str) -> Mapping[str, object]:
        self._check_snapshots()
        box = await self._existing(handle)
        stop = threading.Event()
        async with self._busy(box):
            try:
                return await _to_its_end(asyncio.to_thread(self._snapshot, box, snapshot_id, stop), give_up=stop)
            except asyncio.CancelledError:
                # It may have been whole by then, and nobody hears of it.
                await _to_its_end(self._snapshots.remove({"snapshot_id": snapshot_id}))
                raise
            except OSError as error:
                raise told(error) from error

    def _snapshot(self, box: Box, snapshot_id: str, stop: threading.Event) -> Mapping[str, object]:
        record = self._standstill.going_on(box)
        if not record.is_alive():
            raise NotFound("the sandbox has ended")
        if record.paused:
            raise FailedPrecondition("the sandbox is paused")
        if not self._isolations[record.isolation].can_copy_files:
            raise CapabilityMissing.of(self.name, Capability.SNAPSHOT.value)
        self._standstill.freeze(box, record, kept="copy")
        try:
            return self._snapshots.take(snapshot_id, box, record, stop=stop)
        finally:
            self._standstill.let_go_on(box, record_of(box))

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        self._check_snapshots()
        await _to_its_end(self._snapshots.remove(snapshot))

    def _check_snapshots(self) -> None:
        if not self._isolation.can_copy_files:
            raise CapabilityMissing.of(self.name, Capability.SNAPSHOT.value)

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        box = await self._existing(handle)
        async with self._busy(box):
            record = await asyncio.to_thread(record_of, box)
            if record.paused == "files":
                return await self._start_anew(box, record)
            if not record.is_alive():
                raise DataLoss("the processes of the sandbox are gone")
            await _to_its_end(asyncio.to_thread(self._go_on, box, record))
            return box.placement(record)

    def _go_on(self, box: Box, record: Record) -> None:
        self._standstill.let_go_on(box, record)
        self._meter.begin(box.name)

    async def _start_anew(self, box: Box, record: Record) -> Placement:
        fresh = replace(record.ended(), bundle=self._bundle.name, groups=self._allowance.ground.boxes(record.mark))

        def start() -> Started:
            # What a resume left that a crash cut off.
            self._standstill.end(record)
            box.renew(fresh)
            self._isolations[fresh.isolation].mend(box, fresh)
            return self._start(box, fresh)

        try:
            placement = await self._bring_up(box, fresh, start)
            # Until now a crash left a sandbox that was paused.
            box.write(replace(record_of(box), paused=""))
            return placement
        except BaseException as error:
            await _to_its_end(asyncio.to_thread(self._pause, box, memory=False))
            if isinstance(error, OSError | StartFailed):
                raise told(error) from error
            raise

    async def usage(self, handle: Mapping[str, object]) -> Usage | None:
        if not self._allowance.ground.counts:
            return None
        return await self._meter.measure(str(handle.get("box")), partial(self._gauge, handle))

    def _gauge(self, handle: Mapping[str, object]) -> Gauge | None:
        box = self._shelf.find(handle)
        if box is None:
            raise NotFound("there is no such sandbox")
        record = record_of(box)
        return Gauge.of(record, root=self._isolations[record.isolation].root(box))

    async def _existing(self, handle: Mapping[str, object]) -> Box:
        box = await asyncio.to_thread(self._shelf.find, handle)
        if box is None:
            raise NotFound("there is no such sandbox")
        return box

    def _busy(self, box: Box) -> asyncio.Lock:
        """Held while a box is made or destroyed: a kill may come during the create, and two kills at once (C35, C37)."""
        return self._locks.setdefault(box.name, asyncio.Lock())

    async def _make(
        self,
        box: Box,
        *,
        sandbox_id: str,
        internet: bool,
        resources: Resources,
        snapshot: Mapping[str, object] | None = None,
    ) -> Placement:
        """A box with an agent that accepts calls, or nothing at all."""
        stop = threading.Event()
        async with self._busy(box):
            record = Record.fresh(
                sandbox_id=sandbox_id,
                isolation=self._isolation.name,
                bundle=self._bundle.name,
                base=self._take_base(),
                internet=internet,
                cpu_count=resources.cpu_count,
                memory_mb=resources.memory_mb,
            )
            record = replace(record, groups=self._allowance.ground.boxes(record.mark))
            try:
                start = partial(self._make_and_start, box, record, snapshot, stop)
                return await self._bring_up(box, record, start, give_up=stop)
            except Conflict:
                # The box of that name is another call's.
                self._give_base_back(record)
                raise
            except BaseException:
                await _to_its_end(self._erase(box, record))
                raise

    async def _bring_up(
        self, box: Box, record: Record, start: Callable[[], Started], *, give_up: threading.Event | None = None
    ) -> Placement:
        started: Started | None = None

        async def begin() -> None:
            nonlocal started
            started = await asyncio.to_thread(start)
            self._children.adopt(started.popen)

        try:
            # A thread cannot be cancelled: what it has started must be known before anything is cleared away.
            await _to_its_end(begin(), give_up=give_up)
            assert started is not None  # noqa: S101 - start() has returned
            await agent_ready(started.output, box.log)
        finally:
            if started is not None:
                started.output.close()
        self._isolations[record.isolation].agent_is_up(box)
        return box.placement(record)

    def _make_and_start(
        self, box: Box, record: Record, snapshot: Mapping[str, object] | None, stop: threading.Event
    ) -> Started:
        box.make(record)
        if snapshot is None:
            self._isolation.furnish(box, record)
        else:
            connected = self._snapshots.unfold(snapshot, box, record, stop=stop)
            self._isolation.mend(box, record)
            if record.internet and not connected:
                self._isolation.connect(box, record)
        return self._start(box, record)

    def _start(self, box: Box, record: Record) -> Started:
        isolation, groups = self._isolations[record.isolation], self._allowance.groups(record)
        freezer = group_for(record) if groups.freezer is None and isolation.starts_in_group else None
        place = freezer.path if freezer is not None else groups.freezer
        if place is not None:
            record = replace(record, group=str(place))
            box.write(record)
        started = isolation.start(
            box,
            record,
            bundle=self._bundle,
            joining=Joining(
                needed=groups.first, optional=freezer, commands=groups.commands, terminals=groups.terminals
            ),
            processes=self._allowance.processes_by_rlimit,
        )
        # Of version 2 the group that limits a box is also what freezes it, and without it nothing has started.
        grouped = started.grouped or groups.freezer is not None
        try:
            box.write(record.started(main=started.main, init=started.init, grouped=grouped))
        except BaseException:
            give_up(started.popen)
            raise
        return started

    async def _erase(self, box: Box, record: Record | None = None) -> None:
        """End the processes of a box and remove its files. ``record`` stands in for one that was never written."""
        loop = asyncio.get_running_loop()
        record = await loop.run_in_executor(self._removals, self._clear, box, record)
        self._give_base_back(record)
        self._spare.discard(box.name)

    def _clear(self, box: Box, known: Record | None) -> Record | None:
        record = box.read() or known
        if record is not None:
            self._standstill.end(record)
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
        return diagnose(settings)


def _give(box: Box, sandbox_id: str) -> Placement | None:
    """Make a warm box this sandbox's; None when it has ended. The record first: a crash then finds the sandbox."""
    record = box.read()
    if record is None or not record.is_alive():
        return None
    record = record.claimed(sandbox_id)
    box.write(record)
    return box.placement(record)


async def _to_its_end(work: Awaitable[T], *, give_up: threading.Event | None = None) -> T:
    """A thread cannot be stopped, and a half-ended box would be left. ``give_up`` is set for work that looks at it."""
    return await to_its_end(work, on_cancel=None if give_up is None else give_up.set, expected=Stopped)
