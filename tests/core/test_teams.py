"""Teams and quotas: who may have how much, and what a refusal says (C57)."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import teams_pb2
from sandgate_errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted


def limits(**values) -> teams_pb2.TeamLimits:
    life = values.pop("max_life", None)
    message = teams_pb2.TeamLimits(**values)
    if life is not None:
        message.max_life.FromSeconds(life)
    return message


async def set_limits(core, **values) -> None:
    await core.internal.call("UpdateTeam", id="default", limits=limits(**values))


async def test_team_is_made_listed_changed_and_kept(deployment):
    async with deployment.core() as core:
        made = (await core.internal.call("CreateTeam", id="lab", name="The Lab", limits=limits(max_cpus=4))).team
        with pytest.raises(AlreadyExists):
            await core.internal.call("CreateTeam", id="lab")
        changed = (await core.internal.call("UpdateTeam", id="lab", name="Lab")).team
        assert (changed.name, changed.limits) == ("Lab", made.limits)
        with pytest.raises(NotFound):
            await core.internal.call("UpdateTeam", id="nobody", name="x")
    async with deployment.core() as core:
        teams = (await core.internal.call("ListTeams")).teams
        assert changed in teams
        assert [team.id for team in teams] == ["default", "lab"]


async def test_key_for_an_unknown_team_is_refused_and_makes_none(core):
    with pytest.raises(NotFound, match="no team 'labb'"):
        await core.internal.call("CreateKey", name="x", owner="labb")
    assert [team.id for team in (await core.internal.call("ListTeams")).teams] == ["default"]
    assert [key.owner for key in (await core.internal.call("ListKeys")).keys] == ["default"]


async def test_first_key_of_all_is_for_a_team_that_there_always_is(deployment):
    async with deployment.core(first_key=None, first_key_given=False) as core:
        assert (await core.internal.call("CreateKey", name="x")).key.owner == "default"


async def test_key_for_a_new_team_makes_the_team_once(core):
    created = (core.internal.call("CreateKey", name=str(n), owner="new", create_team=True) for n in range(5))
    await asyncio.gather(*created)
    teams = (await core.internal.call("ListTeams")).teams
    assert [team.id for team in teams] == ["default", "new"]
    assert teams[1].limits == limits()


async def test_key_sees_its_own_team_and_changes_none(core):
    await core.internal.call("CreateTeam", id="other")
    assert [team.id for team in (await core.owner.call("ListTeams")).teams] == ["default"]
    with pytest.raises(PermissionDenied):
        await core.owner.call("CreateTeam", id="mine")
    with pytest.raises(PermissionDenied):
        await core.owner.call("UpdateTeam", id="default", limits=limits())


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"id": "a b"},
        {"id": "x" * 65},
        {"id": "t", "name": "a\nb"},
        {"id": "t", "limits": limits(max_cpus=-1)},
        {"id": "t", "limits": limits(max_sandboxes=2**31)},
        {"id": "t", "limits": limits(max_life=0)},
    ],
)
async def test_bad_team_is_refused(core, fields):
    with pytest.raises(InvalidArgument):
        await core.internal.call("CreateTeam", **fields)


async def test_of_many_creates_at_once_as_many_pass_as_the_quota_has_room_for(core):
    await set_limits(core, max_sandboxes=3)
    outcomes = await asyncio.gather(*(core.owner.create() for _ in range(8)), return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, ResourceExhausted)]
    assert len(refusals) == 5
    assert len(await core.owner.ids()) == 3
    assert (refusals[0].limit, refusals[0].should_retry) == (3, False)
    assert refusals[0].retry_after > 0


async def test_ended_and_failed_sandboxes_leave_their_place(core, backend):
    await set_limits(core, max_sandboxes=1)

    async def fail(_):
        raise OSError("no")

    backend.creating, fine = fail, backend.creating
    with pytest.raises(Exception, match="internal"):
        await core.owner.create()
    backend.creating = fine
    made = await core.owner.create()
    with pytest.raises(ResourceExhausted):
        await core.owner.create()
    await core.owner.call("Kill", id=made.id)
    await core.owner.create()


@pytest.mark.parametrize(("limit", "text"), [({"max_cpus": 5}, "5 CPUs"), ({"max_memory_mb": 1100}, "1100 MiB")])
async def test_resources_of_all_sandboxes_together_are_limited(core, limit, text):
    # One has 2 CPUs and 512 MiB.
    await set_limits(core, **limit)
    await core.owner.create()
    await core.owner.create()
    with pytest.raises(ResourceExhausted, match=text):
        await core.owner.create()


async def test_quota_of_one_team_does_not_bind_another(core):
    await set_limits(core, max_sandboxes=0)
    secret = (await core.internal.call("CreateKey", name="x", owner="other", create_team=True)).secret
    await core.client(("api-key", secret)).create()
    with pytest.raises(ResourceExhausted):
        await core.owner.create()


async def test_rate_of_creates_is_limited_and_says_when_the_next_is_due(core):
    await set_limits(core, creates_per_minute=2)
    await core.owner.create()
    await core.owner.create()
    with pytest.raises(ResourceExhausted, match="2 sandboxes a minute") as refusal:
        await core.owner.create()
    assert 0 < refusal.value.retry_after <= 30
    assert refusal.value.limit == 2
    await set_limits(core)
    await core.owner.create()


async def test_longest_life_of_a_team_bounds_create_connect_and_timeout(core):
    await set_limits(core, max_life=60)
    with pytest.raises(InvalidArgument, match="at most 60 seconds"):
        await core.owner.create(timeout=61)
    made = await core.owner.create(timeout=60)
    with pytest.raises(InvalidArgument, match="at most 60 seconds"):
        await core.owner.call("Connect", id=made.id, timeout=Duration(seconds=61))
    moved = await core.owner.call("SetTimeout", id=made.id, timeout=Duration(seconds=3600))
    assert moved.end_at.ToMicroseconds() - made.started_at.ToMicroseconds() <= 60_000_000


async def test_limits_hold_over_a_restart(deployment):
    async with deployment.core() as core:
        await set_limits(core, max_sandboxes=1)
        await core.owner.create()
    async with deployment.core() as core:
        with pytest.raises(ResourceExhausted):
            await core.owner.create()
