"""``sandgate teams``: teams of a running gateway and their limits, through the core's ``TeamService``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict

from sandgate.core_client import connected
from sandgate.tables import show_table, when
from sandgate_api.core.v1 import teams_pb2
from sandgate_errors import NotFound

__all__ = ["create", "show_all", "update"]

#: Option → field and column; `max_life` is a duration and stands apart.
_COUNTS = ("max_sandboxes", "max_cpus", "max_memory_mb", "creates_per_minute")


def create(state_dir: Path, team_id: str, *, name: str, limits: Mapping[str, int | None]) -> None:
    """Make a team; ``limits`` holds those that were given, None for one that is not to hold."""
    with connected(state_dir) as core:
        request = teams_pb2.CreateTeamRequest(id=team_id, name=name, limits=_changed(teams_pb2.TeamLimits(), limits))
        core.ask(core.teams.CreateTeam, request)
    click.echo(f"team {team_id} is made; a key for it: sandgate keys create --team {team_id}", err=True)


def update(state_dir: Path, team_id: str, *, name: str | None, limits: Mapping[str, int | None]) -> None:
    """Change what was given; the rest stays."""
    with connected(state_dir) as core:
        teams = core.ask(core.teams.ListTeams, teams_pb2.ListTeamsRequest()).teams
        team = next((team for team in teams if team.id == team_id), None)
        if team is None:
            raise NotFound(f"there is no team '{team_id}'")
        request = teams_pb2.UpdateTeamRequest(id=team_id, name=name, limits=_changed(team.limits, limits))
        core.ask(core.teams.UpdateTeam, request)
    click.echo(f"team {team_id} is changed", err=True)


def show_all(state_dir: Path, *, as_json: bool) -> None:
    """Print all teams with their limits."""
    with connected(state_dir) as core:
        teams = core.ask(core.teams.ListTeams, teams_pb2.ListTeamsRequest()).teams
    if as_json:
        items = [MessageToDict(team, preserving_proto_field_name=True) for team in teams]
        click.echo(json.dumps(items, indent=2, ensure_ascii=False))
        return
    rows = [(team.id, team.name, *_columns(team.limits), when(team.created_at)) for team in teams]
    headings = ("ID", "NAME", "SANDBOXES", "CPUS", "MEMORY MB", "PER MINUTE", "LIFE", "CREATED")
    show_table(headings, rows, nothing="no teams")


def _columns(limits: teams_pb2.TeamLimits) -> tuple[str, ...]:
    counts = [str(getattr(limits, name)) if limits.HasField(name) else "-" for name in _COUNTS]  # type: ignore[arg-type]
    return (*counts, f"{limits.max_life.seconds} s" if limits.HasField("max_life") else "-")


def _changed(before: teams_pb2.TeamLimits, changes: Mapping[str, int | None]) -> teams_pb2.TeamLimits:
    after = teams_pb2.TeamLimits()
    after.CopyFrom(before)
    for name, value in changes.items():
        if value is None:
            after.ClearField(name)  # type: ignore[arg-type]
        elif name == "max_life":
            after.max_life.FromSeconds(value)
        else:
            setattr(after, name, value)
    return after
