"""Teams: who owns keys and sandboxes, and how much each may have.

A team is what a key and a sandbox call their owner. One that a key was made for without setting it up has no limits.
Teams are held in memory (:mod:`sandgate_core.mirrored`), so that a create asks no disk about its limits.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sandgate_core import clock
from sandgate_core.mirrored import Mirrored
from sandgate_core.store import Store
from sandgate_errors import AlreadyExists, InvalidArgument, NotFound

__all__ = ["Limits", "Team", "Teams"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_LENGTH = 100
#: More than any machine has; what the columns of the store can hold.
_LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a team may have; None: as much as the deployment has."""

    #: Sandboxes that have not ended, paused ones included.
    max_sandboxes: int | None = None
    #: Of all its sandboxes together.
    max_cpus: int | None = None
    max_memory_mb: int | None = None
    #: Microseconds; the longest life of one sandbox.
    max_life: int | None = None
    creates_per_minute: int | None = None


@dataclass(frozen=True, kw_only=True)
class Team:
    """One team."""

    id: str
    name: str
    created_at: int
    limits: Limits = field(default_factory=Limits)


class Teams(Mirrored):
    """All of them."""

    def __init__(self, store: Store, *, changed: Callable[[], Awaitable[None]] | None = None) -> None:
        """``changed`` tells the other cores; None where there are none."""
        super().__init__(store, changed=changed)
        self._by_id: dict[str, Team] = {}

    async def _read(self) -> None:
        self._by_id = {team.id: team for team in map(_team_of, await self._store.teams())}

    def limits_of(self, team_id: str) -> Limits:
        team = self._by_id.get(team_id)
        return Limits() if team is None else team.limits

    def list(self) -> list[Team]:
        """Oldest first."""
        return sorted(self._by_id.values(), key=lambda team: (team.created_at, team.id))

    async def create(self, team_id: str, *, name: str, limits: Limits) -> Team:
        """Raises InvalidArgument, AlreadyExists."""
        _check_id(team_id)
        team = Team(id=team_id, name=_checked_name(name or team_id), created_at=clock.now(), limits=_checked(limits))
        async with self._changing():
            if team_id in self._by_id:
                raise AlreadyExists(f"there is a team '{team_id}' already")
            try:
                await self._store.add_team(_row_of(team))
            except AlreadyExists:
                # By another core, just now.
                await self._read()
                raise AlreadyExists(f"there is a team '{team_id}' already") from None
            self._by_id[team_id] = team
        return team

    async def ensure(self, team_id: str, *, create: bool) -> None:
        """There is a team of this id when this returns. Raises InvalidArgument, and NotFound unless it may ``create`` it."""
        _check_id(team_id)
        if team_id not in self._by_id and self._is_shared:
            await self.load()
        if team_id in self._by_id:
            return
        if not create:
            raise NotFound(f"there is no team '{team_id}'")
        with contextlib.suppress(AlreadyExists):
            await self.create(team_id, name="", limits=Limits())

    async def change(self, team_id: str, *, name: str | None, limits: Limits | None) -> Team:
        """Limits hold for what is made from now on; what is there stays. Raises NotFound, InvalidArgument."""
        async with self._changing():
            team = self._by_id.get(team_id)
            if team is None:
                raise NotFound(f"there is no team '{team_id[:64]}'")
            after = replace(
                team,
                name=team.name if name is None else _checked_name(name),
                limits=team.limits if limits is None else _checked(limits),
            )
            await self._store.change_team(_row_of(after))
            self._by_id[team_id] = after
        return after


def _check_id(team_id: str) -> None:
    if not _ID.fullmatch(team_id):
        raise InvalidArgument(
            "a team's id is 1 to 64 letters, digits, '.', '_', '@', '-', and starts with a letter or digit"
        )


def _checked_name(name: str) -> str:
    if not name or len(name) > _NAME_LENGTH or not name.isprintable():
        raise InvalidArgument(f"a team's name is 1 to {_NAME_LENGTH} printable characters")
    return name


def _checked(limits: Limits) -> Limits:
    for name, value in asdict(limits).items():
        bound = _LARGEST * clock.MICROSECONDS if name == "max_life" else _LARGEST
        if value is not None and not 0 <= value <= bound:
            raise InvalidArgument(f"{name} is out of range")
    if limits.max_life is not None and limits.max_life < clock.MICROSECONDS:
        raise InvalidArgument("max_life must be at least one second")
    return limits


def _row_of(team: Team) -> dict[str, object]:
    return {"id": team.id, "name": team.name, "created_at": team.created_at, **asdict(team.limits)}


def _team_of(row: dict[str, Any]) -> Team:
    limits = Limits(**{each.name: row[each.name] for each in fields(Limits)})
    return Team(id=row["id"], name=row["name"], created_at=row["created_at"], limits=limits)
