"""Snapshots: copies of a running sandbox's files, kept apart from it, from which others are made (C51 to C53).

Taking one is a change under the sandbox's lock, by way of the state ``snapshotting``: in the store that state comes first,
then the copy's row, then the backend acts; when it has, the row is ready before the sandbox is running again. So after a
crash at any point either the snapshot is whole, or its row says that something is to be given up (:meth:`Snapshots.tidy`),
and the sandbox itself is adopted like any running one (:mod:`sandgate_core.recovery`).

Giving up is done in the background too: a snapshot that was deleted or replaced is gone for callers at once, and its copy is
removed as often as it takes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import string
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from sandgate_core import clock
from sandgate_core.callers import Caller
from sandgate_core.capacity import of_the_machines
from sandgate_core.chores import Pause
from sandgate_core.ending import Ending
from sandgate_core.live import Live, LiveTable
from sandgate_core.snapshot_names import DEFAULT_TAG, SnapshotName, parse_name
from sandgate_core.snapshot_table import Place, SnapshotRecord, SnapshotState, SnapshotTable
from sandgate_core.states import State
from sandgate_core.templates import Templates
from sandgate_errors import (
    AlreadyExists,
    CapabilityMissing,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SandboxNotFound,
    Unimplemented,
)
from sandgate_plugin_api import Backend, Capability

__all__ = ["LARGEST_PAGE", "SnapshotPage", "Snapshots"]

LARGEST_PAGE = 100
#: Of one team. Each is a copy of a sandbox's files, and nobody is asked before they fill the disk.
_MOST_PER_TEAM = 1000
#: Seconds a backend may take for a copy: clients give a request a minute. And to give one up, which may be large.
_PATIENCE = 60.0
_DELETE_PATIENCE = 60.0
#: Seconds between two attempts to give up what could not be.
_TIDY = 60.0
_LETTERS = string.ascii_lowercase + string.digits
_POSITION = re.compile(r"1\.([0-9]{1,18})\.([a-z0-9]{1,64})")
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SnapshotPage:
    """One page of a list."""

    records: list[SnapshotRecord]
    #: Empty on the last page.
    next_token: str


class Snapshots:
    """Takes, lists and deletes snapshots."""

    def __init__(
        self,
        *,
        table: LiveTable,
        rows: SnapshotTable,
        templates: Templates,
        backends: Mapping[str, Backend],
        ending: Ending,
    ) -> None:
        self._table = table
        self._rows = rows
        self._templates = templates
        self._backends = backends
        self._ending = ending
        self._tidying = asyncio.Lock()
        #: Sandboxes of which somebody has asked for one, and has not heard of it yet.
        self._under_way: set[str] = set()

    @contextmanager
    def only(self, live: Live) -> Iterator[None]:
        """For as long as the block runs, no second snapshot of a sandbox begins. Raises Conflict (C51)."""
        sandbox_id = live.record.id
        if sandbox_id in self._under_way:
            raise Conflict(f"a snapshot of sandbox {sandbox_id} is being taken already")
        self._under_way.add(sandbox_id)
        try:
            yield
        finally:
            self._under_way.discard(sandbox_id)

    async def check(self, live: Live, *, name: str, memory: bool | None) -> SnapshotName | None:
        """What a snapshot is to be called, before anything waits for the sandbox.

        Raises InvalidArgument, CapabilityMissing, Unimplemented, AlreadyExists or ResourceExhausted.
        """
        backend = self._backends[live.record.backend]
        if Capability.SNAPSHOT not in backend.capabilities:
            raise CapabilityMissing.of(backend.name, Capability.SNAPSHOT.value)
        keeps_memory = Capability.FORK in backend.capabilities
        if memory and not keeps_memory:
            raise CapabilityMissing.of(backend.name, "snapshots with memory, only those of the file system")
        if memory is False and keeps_memory:
            raise Unimplemented(f"backend '{backend.name}' cannot leave the memory out of a snapshot")
        parsed = _parsed(name, owner=live.record.owner) if name else None
        if parsed is not None and await self._templates.is_taken(parsed):
            raise AlreadyExists(f"'{name}' is a template's name, which a snapshot cannot have")
        if await self._rows.count(live.record.owner) >= _MOST_PER_TEAM:
            raise ResourceExhausted(
                f"the team may have {_MOST_PER_TEAM} snapshots", should_retry=False, limit=_MOST_PER_TEAM
            )
        return parsed

    async def take(self, live: Live, *, name: SnapshotName | None) -> SnapshotRecord:
        """A copy of a running sandbox whose lock is held; the sandbox runs when this returns, also where it fails.

        Raises FailedPrecondition (it is paused), SandboxNotFound (it had died by itself), DeadlineExceeded, or the
        backend's reason.
        """
        record = live.record
        if record.state is not State.RUNNING:
            raise FailedPrecondition(f"sandbox {record.id} is {record.state.value}: resume it first")
        planned = self._planned(live, name)
        await self._table.move(live, State.SNAPSHOTTING, note="snapshot")
        try:
            await self._rows.add(planned)
            made = await self._copied(live, planned)
        except NotFound:
            await self._ending.end(live, final=State.FAILED, note="it was found gone")
            raise SandboxNotFound.of(record.id) from None
        finally:
            await self.settle(live)
        _log.info("snapshot taken", snapshot=made.id, sandbox=record.id, backend=record.backend, owner=record.owner)
        return made

    async def settle(self, live: Live) -> None:
        """A sandbox whose lock is held and that no copy is made of is not snapshotting."""
        if live.record.state is State.SNAPSHOTTING:
            await self._table.move(live, State.RUNNING, note="the snapshot is over")

    async def page(
        self, caller: Caller, *, sandbox_id: str, wanted: str, page_size: int, page_token: str
    ) -> SnapshotPage:
        """The caller's, newest first. Raises InvalidArgument for a token that is not ours."""
        after = _place_of(page_token) if page_token else None
        name = parse_name(wanted) if wanted else None
        try:
            owner = caller.owner if name is None else name.owner_for(caller.owner)
        except LookupError:
            return SnapshotPage(records=[], next_token="")
        found = await self._rows.page(
            owner=owner, sandbox_id=sandbox_id, wanted=wanted, name=name, after=after, limit=page_size + 1
        )
        page = found[:page_size]
        return SnapshotPage(records=page, next_token=_token_of(page[-1]) if len(found) > page_size else "")

    async def delete(self, wanted: str, caller: Caller) -> SnapshotRecord:
        """Of an id or a name. Raises NotFound, or PermissionDenied for a template: those are the operator's."""
        found = await self._templates.snapshot(wanted, owner=caller.owner)
        if found is None:
            if any(wanted in {item.template.id, *item.template.aliases} for item in await self._templates.listed()):
                raise PermissionDenied(f"template '{wanted}' is part of the gateway's configuration")
            raise NotFound(f"template '{wanted}' not found")
        if not await self._rows.take_out(found.id, owner=found.owner):
            raise NotFound(f"template '{wanted}' not found")
        _log.info("snapshot deleted", snapshot=found.id, backend=found.backend, owner=found.owner)
        return found

    async def tidying(self, pause: Pause) -> None:
        """The chore that gives up what nobody needs any more."""
        while True:
            try:
                await self.tidy()
            except Exception:
                _log.exception("snapshots could not be looked through")
            if not await pause(_TIDY):
                return

    async def tidy(self) -> None:
        """Give up every copy that is for deletion, as far as it can be now."""
        async with self._tidying:
            await self._rows.give_up_abandoned()
            for record in await self._rows.for_deletion():
                await self._give_up(record)

    async def _give_up(self, record: SnapshotRecord) -> None:
        backend = self._backends.get(record.backend)
        if backend is None or not self._rows.reaches(record):
            return  # another core's to do, or this one's once the backend is configured again
        # One without a handle was being made when its core stopped: nobody knows how far that went.
        handle = {"snapshot_id": record.content} if record.handle is None else record.handle
        try:
            async with asyncio.timeout(_DELETE_PATIENCE):
                await backend.delete_snapshot(handle)
            await self._rows.forget(record.content)
        except Exception:
            _log.exception("a snapshot could not be removed", snapshot=record.id, backend=record.backend)

    def _planned(self, live: Live, name: SnapshotName | None) -> SnapshotRecord:
        record = live.record
        content = _new_id()
        return SnapshotRecord(
            content=content,
            id=content,
            owner=record.owner,
            backend=record.backend,
            name="" if name is None else name.name,
            tag="" if name is None else name.tag or DEFAULT_TAG,
            sandbox_id=record.id,
            state=SnapshotState.MAKING,
            created_at=clock.now(),
            resources=record.resources,
            envs=dict(record.envs),
            setup=record.setup,
            core=self._rows.node if self._backends[record.backend].host_bound else "",
        )

    async def _copied(self, live: Live, planned: SnapshotRecord) -> SnapshotRecord:
        """The snapshot, whole and ready; or its row is for deletion."""
        try:
            backend = self._backends[live.record.backend]
            with of_the_machines():
                handle = await _bounded(backend.snapshot(live.record.handle, snapshot_id=planned.content))
        except BaseException:
            # Failed: the backend has kept nothing; but one that did not end in time may have.
            await self._rows.give_up(planned.content)
            raise
        try:
            return await self._rows.publish(planned.content, handle=handle)
        except BaseException:
            await self._rows.give_up(planned.content)
            raise


def _new_id() -> str:
    """`s` and 20 characters: over 100 random bits, so an id is never used twice."""
    return "s" + "".join(secrets.choice(_LETTERS) for _ in range(20))


def _parsed(written: str, *, owner: str) -> SnapshotName:
    name = parse_name(written)
    if name is None:
        raise InvalidArgument(
            "a snapshot's name has 1 to 128 letters, digits, '.', '_' and '-', and may have a ':tag' of the same"
        )
    try:
        name.owner_for(owner)
    except LookupError:
        raise InvalidArgument(f"the team in '{written}' is not yours") from None
    return name


async def _bounded(work: Awaitable[_T]) -> _T:
    try:
        async with asyncio.timeout(_PATIENCE) as bound:
            return await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise DeadlineExceeded(
            f"the snapshot was not done within {_PATIENCE:g} seconds; the sandbox runs", should_retry=False
        ) from None


def _token_of(record: SnapshotRecord) -> str:
    text = f"1.{record.created_at}.{record.content}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _place_of(token: str) -> Place:
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    found = _POSITION.fullmatch(text)
    if found is None:
        raise InvalidArgument("the page token is not valid for this list")
    return Place(created_at=int(found[1]), content=found[2])
