"""Where plugins have a say in the core: records to what hooks see, and what they return back to records.

Called by :mod:`sandgate_core.sandboxes` at four points (create, list, new deadline, use of a sandbox) and told of every
change of state by :mod:`sandgate_core.live`. What a hook amends is checked afterwards like a client's own request; what it
may not change is refused here. Hooks and their rules: :mod:`sandgate_plugin_api.hookspecs`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from sandgate_core import clock
from sandgate_core.admission import Admitted, CreateSpec
from sandgate_core.listing import LARGEST_PAGE, Query, shown_state
from sandgate_core.records import NetworkRules, SandboxRecord
from sandgate_core.states import State
from sandgate_errors import (
    CapabilityMissing,
    Internal,
    NotFound,
    ResourceExhausted,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_api import (
    Activity,
    Backend,
    Capability,
    Change,
    Egress,
    ListQuery,
    NewLife,
    NewSandbox,
    PolicyContext,
    ResourceLimits,
    SandboxInfo,
    Template,
)
from sandgate_plugin_api.policies import Policies

__all__ = ["Policy", "Wish", "opened_policy"]

T = TypeVar("T")

#: Changes of state that nobody has been told yet. Beyond that the oldest go.
_MOST_UNTOLD = 10_000
#: Seconds for what observers are being told when the core stops.
_CLOSE_PATIENCE = 5.0
#: Seconds a backend may take to list its templates.
_TEMPLATES_PATIENCE = 10.0
#: Resources are 32-bit numbers on the wire.
_LARGEST_LIMIT = 2**31 - 1
#: With these a backend has started nothing, so that another may be asked.
_TRY_ANOTHER = (Unavailable, ResourceExhausted, NotFound)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A create as policy wants it."""

    spec: CreateSpec
    #: In this order; empty: the core's own choice.
    backends: tuple[str, ...] = ()
    resources: ResourceLimits | None = None
    #: As in :class:`~sandgate_core.admission.Admitted`.
    name: str = ""
    start_timeout: float | None = None

    def admitted(self, admitted: Admitted) -> Admitted:
        """With what policy wants beside the request. Raises CapabilityMissing."""
        admitted = replace(admitted, name=self.name, start_timeout=self.start_timeout)
        wanted = {name: value for name, value in vars(self.resources or ResourceLimits()).items() if value is not None}
        resources = replace(admitted.template.resources, **wanted)
        if resources == admitted.template.resources:
            return admitted
        if Capability.LIMITS not in admitted.backend.capabilities:
            raise CapabilityMissing.of(admitted.backend.name, Capability.LIMITS.value)
        return replace(admitted, template=replace(admitted.template, resources=resources))

    async def tried(self, attempt: Callable[[str | None], Awaitable[T]]) -> T:
        """``attempt`` with each backend in turn until one has not said that it started nothing."""
        if not self.backends:
            return await attempt(None)
        for name in self.backends[:-1]:
            try:
                return await attempt(name)
            except _TRY_ANOTHER as error:
                _log.warning("a create goes on with another backend", backend=name, reason=error.message)
        return await attempt(self.backends[-1])


class Policy:
    """The hooks of one core. Without plugins every method is a look into a dictionary."""

    def __init__(self, policies: Policies | None = None, *, backends: Mapping[str, Backend] | None = None) -> None:
        self._policies = policies or Policies()
        self._backends = backends or {}
        self._untold: deque[tuple[SandboxInfo, Change]] = deque()
        self._all_told = asyncio.Event()
        self._all_told.set()
        self._used: OrderedDict[tuple[str, Activity], None] = OrderedDict()
        self._wake = asyncio.Event()
        self._lost = 0

    async def wish(self, spec: CreateSpec, *, owner: str, is_ready: Callable[[], Awaitable[bool]]) -> Wish:
        """A create as the plugins want it. Raises what they refuse it with.

        ``is_ready``: whether its template is there without a backend having to look for it; asked for plugins only.
        """
        if not self._policies.has("sandgate_create_request"):
            return Wish(spec=spec)
        rules = spec.network or NetworkRules()
        asked = NewSandbox(
            template=spec.template,
            ready=await is_ready(),
            timeout=spec.timeout / clock.MICROSECONDS,
            metadata=dict(spec.metadata),
            envs=dict(spec.envs),
            secure=spec.secure,
            egress=Egress(internet=spec.allow_internet_access, allow=rules.allow_out, deny=rules.deny_out),
            pause_on_timeout=spec.pause_on_timeout,
            pause_memory=spec.pause_memory,
            auto_resume=spec.auto_resume,
            owner=owner,
        )
        wanted = await self._policies.amend("sandgate_create_request", asked, argument="request")
        with _told_as("sandgate_create_request"):
            self._check_wish(wanted, owner=owner)
            rules = replace(rules, allow_out=tuple(wanted.egress.allow), deny_out=tuple(wanted.egress.deny))
            changed = replace(
                spec,
                template=wanted.template,
                timeout=clock.to_microseconds(wanted.timeout),
                metadata=_texts(wanted.metadata),
                envs=_texts(wanted.envs),
                secure=wanted.secure,
                allow_internet_access=wanted.egress.internet,
                network=None if rules == NetworkRules() else rules,
                pause_on_timeout=wanted.pause_on_timeout,
                pause_memory=wanted.pause_memory,
                auto_resume=wanted.auto_resume,
            )
        return Wish(
            spec=changed,
            backends=tuple(wanted.backends),
            resources=wanted.resources,
            name=wanted.name,
            start_timeout=wanted.start_timeout,
        )

    def _check_wish(self, wanted: NewSandbox, *, owner: str) -> None:
        if wanted.owner != owner:
            raise ValueError("a plugin changed the owner of a create")
        if unknown := [name for name in wanted.backends if name not in self._backends]:
            raise ValueError(f"a plugin chose backend '{unknown[0]}', which is not configured")
        if wanted.resources is not None:
            _check_limits(wanted.resources)
        if not isinstance(wanted.name, str):
            raise TypeError("name")
        if wanted.start_timeout is not None and not wanted.start_timeout > 0:
            raise ValueError("start_timeout is not positive")

    async def life(self, record: SandboxRecord, *, timeout: int, extend_only: bool) -> tuple[int, bool]:
        """A new deadline as the plugins want it: microseconds, and whether it may only be later than the present one."""
        if not self._policies.has("sandgate_new_life"):
            return timeout, extend_only
        asked = NewLife(timeout=timeout / clock.MICROSECONDS, extend_only=extend_only)
        wanted = await self._policies.amend("sandgate_new_life", asked, argument="request", sandbox=info_of(record))
        with _told_as("sandgate_new_life"):
            return clock.to_microseconds(wanted.timeout), bool(wanted.extend_only)

    async def query(
        self, query: Query, *, owner: str | None, template: str | None
    ) -> tuple[Query, str | None, Callable[[SandboxRecord], bool] | None]:
        """A list as the plugins want it: the query, the template, and what else must hold of a sandbox."""
        if not self._policies.has("sandgate_list_query"):
            return query, template, None
        asked = ListQuery(
            owner=owner,
            metadata=dict(query.metadata),
            states=frozenset(state.value for state in query.states),
            template=template,
            page_size=query.page_size,
        )
        wanted = await self._policies.amend("sandgate_list_query", asked, argument="query")
        with _told_as("sandgate_list_query"):
            if wanted.owner != owner:
                raise ValueError("a plugin changed the owner of a list")
            if wanted.page_size is not None and not 1 <= wanted.page_size <= LARGEST_PAGE:
                raise ValueError("page_size")
            changed = replace(
                query,
                metadata=_texts(wanted.metadata),
                states=frozenset(map(State, wanted.states)),
                page_size=wanted.page_size,
                # One piece has no second page.
                page_token="" if wanted.page_size is None else query.page_token,
            )
        return changed, wanted.template, _all_of(wanted.where) if wanted.where else None

    def used(self, record: SandboxRecord, activity: Activity) -> None:
        """Somebody uses a sandbox. Told soon, and once for several uses in quick succession."""
        if self._policies.has("sandgate_activity"):
            self._used[record.id, activity] = None
            self._wake.set()

    def changed(self, record: SandboxRecord, came_from: State | None, note: str) -> None:
        """A change of state has happened. Told in order, soon."""
        if not self._policies.has("sandgate_lifecycle"):
            return
        if len(self._untold) >= _MOST_UNTOLD:
            self._untold.popleft()
            self._lost += 1
        came = None if came_from is None else came_from.value
        self._untold.append((info_of(record), Change(from_state=came, to_state=record.state.value, note=note)))
        self._all_told.clear()
        self._wake.set()

    @asynccontextmanager
    async def telling(
        self, find: Callable[[str], SandboxRecord | None], extend: Callable[[str, int], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """While the block runs, observers are told. ``extend``: id, and microseconds that it is to live at least."""
        tasks = {
            asyncio.create_task(self._tell_changes()),
            asyncio.create_task(self._tell_uses(find, extend)),
        }
        try:
            yield
        finally:
            await self._told(_CLOSE_PATIENCE)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._policies.close()

    async def _told(self, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._all_told.wait()
        except TimeoutError:
            _log.error("observers were not told of all changes when the core stopped", changes=len(self._untold))

    async def _tell_changes(self) -> None:
        async for _ in self._work(lambda: bool(self._untold)):
            sandbox, change = self._untold.popleft()
            await self._policies.collect("sandgate_lifecycle", sandbox=sandbox, change=change)
            if not self._untold:
                self._all_told.set()
            if self._lost:
                _log.error("observers are too slow: changes of state were given up untold", changes=self._lost)
                self._lost = 0

    async def _tell_uses(
        self, find: Callable[[str], SandboxRecord | None], extend: Callable[[str, int], Awaitable[None]]
    ) -> None:
        async for _ in self._work(lambda: bool(self._used)):
            (sandbox_id, activity), _nothing = self._used.popitem(last=False)
            record = find(sandbox_id)
            if record is None or record.state is not State.RUNNING:
                continue
            try:
                lives = await self._policies.collect("sandgate_activity", sandbox=info_of(record), activity=activity)
                if lives:
                    await extend(sandbox_id, clock.to_microseconds(max(map(float, lives))))
            except SandgateError as error:
                _log.warning("a sandbox's life was not extended", sandbox=sandbox_id, reason=error.message)
            except Exception:
                _log.exception("a plugin's answer about a sandbox's life cannot be used", sandbox=sandbox_id)

    async def _work(self, there: Callable[[], bool]) -> AsyncIterator[None]:
        while True:
            while there():
                yield
            self._wake.clear()
            await self._wake.wait()


@asynccontextmanager
async def opened_policy(
    tables: Mapping[str, Mapping[str, object]], *, backends: Mapping[str, Backend], default: str, state_dir: Path
) -> AsyncIterator[Policy]:
    """The plugins that the operator has named, configured. Raises FailedPrecondition with one line for the operator."""
    policies = Policies.load(tables)
    deployment = _Deployment(backends, default)

    def context(name: str, table: Mapping[str, object]) -> PolicyContext:
        folder = state_dir / "plugins" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return PolicyContext(process="core", settings=table, state_dir=folder, deployment=deployment)

    await policies.configure(tables, context)
    yield Policy(policies, backends=backends)


class _Deployment:
    """What policies may ask; see :class:`sandgate_plugin_api.Deployment`."""

    def __init__(self, backends: Mapping[str, Backend], default: str) -> None:
        self._backends = {default: backends[default], **backends}

    @property
    def backends(self) -> Mapping[str, frozenset[str]]:
        return {
            name: frozenset(capability.value for capability in backend.capabilities)
            for name, backend in self._backends.items()
        }

    async def ready_templates(self, backend: str) -> Sequence[Template]:
        if backend not in self._backends:
            raise NotFound(f"there is no backend '{backend}'")
        try:
            async with asyncio.timeout(_TEMPLATES_PATIENCE):
                return await self._backends[backend].templates()
        except TimeoutError:
            raise Unavailable(f"backend '{backend}' does not say which templates exist") from None


def info_of(record: SandboxRecord) -> SandboxInfo:
    """What a plugin sees of a sandbox."""
    return SandboxInfo(
        id=record.id,
        owner=record.owner,
        template_id=record.template_id,
        alias=record.alias,
        backend=record.backend,
        state=(shown_state(record.state) if record.state.shown else record.state).value,
        started_at=_seconds(record.started_at),
        end_at=_seconds(record.end_at),
        life=record.timeout / clock.MICROSECONDS,
        metadata=dict(record.metadata),
        resources=record.resources,
    )


def _check_limits(limits: object) -> None:
    if not isinstance(limits, ResourceLimits):
        raise TypeError("resources")
    for value in vars(limits).values():
        if value is not None and not (isinstance(value, int) and 0 < value <= _LARGEST_LIMIT):
            raise ValueError("resources are not positive 32-bit integers")


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / clock.MICROSECONDS


def _all_of(conditions: Sequence[Callable[[SandboxInfo], bool]]) -> Callable[[SandboxRecord], bool]:
    def holds(record: SandboxRecord) -> bool:
        with _told_as("sandgate_list_query"):
            info = info_of(record)
            return all(condition(info) for condition in conditions)

    return holds


def _texts(given: Mapping[str, str]) -> dict[str, str]:
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in given.items()):
        raise TypeError("a name or value is no text")
    return dict(given)


@contextmanager
def _told_as(hook: str) -> Iterator[None]:
    """What a plugin returned cannot be used: its fault, in the log with its cause, and never a client's."""
    try:
        yield
    except SandgateError:
        raise
    except Exception as error:
        _log.error("what a plugin returned cannot be used", hook=hook, exc_info=error)
        raise Internal(f"a plugin is faulty in {hook}", should_retry=False) from error
