"""What sandboxes can be made from, by all names there are for it (C6, C24).

A name is looked for in three places, the first that knows it decides: the templates that the backends list, in the order of
the configuration with the default backend first; the team's snapshots, by id or name; and what a backend finds by name
without listing it, as with references to images, in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from sandgate_core import clock
from sandgate_core.snapshot_names import SnapshotName, parse_name
from sandgate_core.snapshot_table import SnapshotRecord, SnapshotTable
from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound, SandgateError, Unavailable
from sandgate_plugin_api import Backend, Template

__all__ = ["Found", "Listed", "Templates"]

_LONGEST_NAME = 256
#: Seconds. Listing templates is meant to be cheap.
_LISTING_PATIENCE = 10.0
#: Seconds until a client should ask again for a snapshot whose core is away.
_AWAY = 10.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a name stands for."""

    backend: Backend
    #: As the backend knows it: of a snapshot, its source's.
    template: Template
    #: What clients are told: the template's id, or the snapshot's.
    id: str
    alias: str
    #: The handle of the snapshot that it is; None: it is a template.
    snapshot: Mapping[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A template that a backend lists."""

    backend: Backend
    template: Template
    #: Microseconds since 1970: when this core saw it first.
    found_at: int


class Templates:
    """The templates of all backends, and the snapshots."""

    def __init__(self, backends: Mapping[str, Backend], snapshots: SnapshotTable, *, default: str) -> None:
        others = (backend for name, backend in backends.items() if name != default)
        self._backends = [backends[default], *others]
        self._by_name = backends
        self._snapshots = snapshots
        self._seen: dict[tuple[str, str], int] = {}

    async def find(self, name: str, *, owner: str | None, patience: float) -> Found:
        """What ``name`` stands for, within ``patience`` seconds.

        Raises InvalidArgument, NotFound, Unavailable (also for a snapshot that cannot be reached from here),
        FailedPrecondition (its backend is not configured).
        """
        if not name:
            raise InvalidArgument("a template must be named")
        if len(name) > _LONGEST_NAME:
            raise InvalidArgument(f"a template's name is at most {_LONGEST_NAME} characters")
        listed, failure = await self._listed(name)
        if listed is not None:
            return listed
        snapshot = await self.snapshot(name, owner=owner)
        if snapshot is not None:
            return self._of_snapshot(snapshot)
        if failure is not None:
            # Whether that backend has it is not known: not the same as "there is none".
            raise failure
        return await self._by_reference(name, patience=patience)

    async def is_ready(self, name: str, *, owner: str | None) -> bool:
        """Whether ``name`` is a listed template or a snapshot, as far as backends answer."""
        if not name or len(name) > _LONGEST_NAME:
            return False
        listed, _ = await self._listed(name)
        return listed is not None or await self.snapshot(name, owner=owner) is not None

    async def snapshot(self, name: str, *, owner: str | None) -> SnapshotRecord | None:
        """The snapshot of an id or a name; for a caller who sees all teams, of an id or a name with its team."""
        parsed = parse_name(name)
        try:
            owner = owner if parsed is None else parsed.owner_for(owner)
        except LookupError:
            return None
        # Several teams may have the name: which of them is meant must not be left to chance.
        return await self._snapshots.find(name, None if owner is None else parsed, owner=owner)

    async def kept_at(self, name: str, *, owner: str | None) -> str | None:
        """The node id of the core that alone reaches the snapshot ``name``; None: this one does, or it is no snapshot."""
        if not name or len(name) > _LONGEST_NAME:
            return None
        snapshot = await self.snapshot(name, owner=owner)
        if snapshot is None or self._snapshots.reaches(snapshot):
            return None
        listed, _ = await self._listed(name)
        return snapshot.core if listed is None else None

    async def names_of(self, name: str, *, owner: str | None) -> frozenset[str]:
        """The template ids that ``name``, an id or a name, may stand for in a list of sandboxes."""
        if len(name) > _LONGEST_NAME:
            return frozenset()
        listed, _ = await self._listed(name)
        if listed is not None:
            return frozenset({name, listed.id})
        snapshot = await self.snapshot(name, owner=owner)
        return frozenset({name} if snapshot is None else {name, snapshot.id})

    async def listed(self) -> Sequence[Listed]:
        """All that backends list; of a name that two have, the first. Backends that do not answer are left out."""
        found: dict[str, Listed] = {}
        for backend in self._backends:
            try:
                templates = await _templates_of(backend)
            except SandgateError as error:
                _log.warning("a backend's templates cannot be listed", backend=backend.name, reason=error.message)
                continue
            for template in templates:
                seen = self._seen.setdefault((backend.name, template.id), clock.now())
                found.setdefault(template.id, Listed(backend=backend, template=template, found_at=seen))
        return list(found.values())

    async def is_taken(self, name: SnapshotName) -> bool:
        """Whether a snapshot of this name could never be meant by it, since a template has it."""
        written = name.name if name.tag is None else f"{name.name}:{name.tag}"
        taken = {other for item in await self.listed() for other in (item.template.id, *item.template.aliases)}
        return not taken.isdisjoint({name.name, written})

    async def _listed(self, name: str) -> tuple[Found | None, SandgateError | None]:
        """What the first backend that lists ``name`` has, and why one that came before it could not be asked."""
        failure: SandgateError | None = None
        for backend in self._backends:
            try:
                template = _named(name, await _templates_of(backend))
            except SandgateError as error:
                failure = failure or error
                continue
            if template is not None:
                return _of_template(name, backend, template), failure
        return None, failure

    async def _by_reference(self, name: str, *, patience: float) -> Found:
        deadline = asyncio.get_running_loop().time() + patience
        missing = NotFound(f"template '{name}' not found")
        for backend in self._backends:
            try:
                async with asyncio.timeout_at(deadline):
                    template = await backend.find_template(name)
            except TimeoutError:
                raise Unavailable(f"backend '{backend.name}' could not look for template '{name}' in time") from None
            except NotFound as error:
                # Another backend may have it; else this one knows best what is missing.
                missing = error
                continue
            if template is not None:
                return _of_template(name, backend, template)
        raise missing

    def _of_snapshot(self, snapshot: SnapshotRecord) -> Found:
        backend = self._by_name.get(snapshot.backend)
        if backend is None:
            raise FailedPrecondition(
                f"the backend of snapshot '{snapshot.id}', '{snapshot.backend}', is not configured"
            )
        if not self._snapshots.reaches(snapshot):
            # Calls for it go to that core where it lives (routing.py).
            raise Unavailable(
                f"snapshot '{snapshot.id}' is kept on the machine of core {snapshot.core}, which is away",
                retry_after=_AWAY,
                should_retry=True,
            )
        setup = snapshot.setup
        template = Template(
            id=setup.template,
            resources=snapshot.resources,
            envs=dict(snapshot.envs),
            default_user=setup.default_user,
            workdir=setup.workdir,
            start_command=setup.start_command,
            ready_command=setup.ready_command,
        )
        return Found(
            backend=backend, template=template, id=snapshot.id, alias=snapshot.name, snapshot=snapshot.handle or {}
        )


async def _templates_of(backend: Backend) -> Sequence[Template]:
    try:
        async with asyncio.timeout(_LISTING_PATIENCE):
            return await backend.templates()
    except TimeoutError:
        raise Unavailable(f"backend '{backend.name}' does not say which templates exist") from None


def _named(name: str, templates: Sequence[Template]) -> Template | None:
    by_id = (template for template in templates if template.id == name)
    by_alias = (template for template in templates if name in template.aliases)
    return next(by_id, None) or next(by_alias, None)


def _of_template(name: str, backend: Backend, template: Template) -> Found:
    alias = name if name in template.aliases else next(iter(template.aliases), "")
    return Found(backend=backend, template=template, id=template.id, alias=alias)
