"""``TeamService``: teams and their limits, for the gateway's own command line; a key may ask about its own team."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import teams_pb2, teams_pb2_grpc
from sandgate_core import clock
from sandgate_core.callers import current
from sandgate_core.teams import Limits, Team, Teams

__all__ = ["TeamService"]

_COUNTS = ("max_sandboxes", "max_cpus", "max_memory_mb", "creates_per_minute")


class TeamService(teams_pb2_grpc.TeamServiceServicer):
    """protobuf <-> :class:`sandgate_core.teams.Teams`."""

    def __init__(self, teams: Teams) -> None:
        self._teams = teams

    async def CreateTeam(self, request: teams_pb2.CreateTeamRequest, context: Any) -> teams_pb2.CreateTeamResponse:  # noqa: N802
        current().must_be_internal()
        team = await self._teams.create(request.id, name=request.name, limits=_limits_of(request.limits))
        return teams_pb2.CreateTeamResponse(team=_message_of(team))

    async def ListTeams(self, request: teams_pb2.ListTeamsRequest, context: Any) -> teams_pb2.ListTeamsResponse:  # noqa: N802
        caller = current()
        teams = (team for team in self._teams.list() if caller.sees(team.id))
        return teams_pb2.ListTeamsResponse(teams=map(_message_of, teams))

    async def UpdateTeam(self, request: teams_pb2.UpdateTeamRequest, context: Any) -> teams_pb2.UpdateTeamResponse:  # noqa: N802
        current().must_be_internal()
        team = await self._teams.change(
            request.id,
            name=request.name if request.HasField("name") else None,
            limits=_limits_of(request.limits) if request.HasField("limits") else None,
        )
        return teams_pb2.UpdateTeamResponse(team=_message_of(team))


def _limits_of(message: teams_pb2.TeamLimits) -> Limits:
    counts = {name: getattr(message, name) for name in _COUNTS if message.HasField(name)}  # type: ignore[arg-type]
    life = message.max_life
    microseconds = int(life.seconds) * clock.MICROSECONDS + int(life.nanos) // 1_000
    return Limits(**counts, max_life=microseconds if message.HasField("max_life") else None)


def _message_of(team: Team) -> teams_pb2.Team:
    created = Timestamp()
    created.FromMicroseconds(team.created_at)
    limits = teams_pb2.TeamLimits(**{name: getattr(team.limits, name) for name in _COUNTS})
    if team.limits.max_life is not None:
        life = Duration()
        life.FromMicroseconds(team.limits.max_life)
        limits.max_life.CopyFrom(life)
    return teams_pb2.Team(id=team.id, name=team.name, created_at=created, limits=limits)
