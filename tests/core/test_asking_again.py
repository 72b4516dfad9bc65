"""What the core tells a caller who may ask again: when, and whether that is any use (errors.md 2.1, rest.md 1.4)."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import sandgate_core
from sandgate_api.core.v1 import teams_pb2
from sandgate_core.admission import CreateSpec
from sandgate_core.callers import Caller
from sandgate_core.records import PauseMode
from sandgate_errors import ResourceExhausted, SandboxUnreachable, Unavailable
from sandgate_plugin_api import Capability
from sandgate_testing.postgres import PostgresServer
from sandgate_testing.requirements import need

pytestmark = pytest.mark.timeout(120)
CAPACITY = "sandbox_capacity_unavailable"


async def done(_):
    return None


def refusing(error):
    async def refuse(_):
        raise error

    return refuse


def test_every_limit_of_the_core_says_when_or_that_it_is_no_use():
    """A 429 without either would be asked again at once, three times, by one of the SDKs."""
    for path in Path(sandgate_core.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id == "ResourceExhausted":
                told = {keyword.arg for keyword in call.keywords}
                assert told & {"retry_after", "should_retry"}, f"{path}:{call.lineno}"


class TestMachineWithoutRoom:
    @pytest.mark.parametrize(("told", "expected"), [(None, 10), (3, 3)])
    async def test_is_no_quota_at_a_create(self, core, backend, world, told, expected):
        backend.created = refusing(ResourceExhausted("no room", retry_after=told))
        with pytest.raises(Unavailable, match="no room") as refusal:
            await core.owner.create()
        assert (refusal.value.error_code, refusal.value.retry_after) == (CAPACITY, expected)
        assert refusal.value.should_retry is True
        assert not world.boxes

    async def test_is_none_at_a_resume_either_and_the_sandbox_stays_paused(self, sandboxes, backend):
        backend.capabilities = backend.capabilities | {Capability.PAUSE}
        caller = Caller(owner="default")
        made = await sandboxes.create(CreateSpec(template="base", timeout=300_000_000), caller)
        await sandboxes.pause(made.id, caller)
        backend.resuming = refusing(ResourceExhausted("no room"))
        with pytest.raises(Unavailable, match="no room") as refusal:
            await sandboxes.connect(made.id, caller, timeout=300_000_000)
        assert (refusal.value.error_code, refusal.value.should_retry) == (CAPACITY, True)
        assert (await sandboxes.questions.get(made.id, caller)).pause_mode is PauseMode.FULL
        backend.resuming = done
        assert (await sandboxes.connect(made.id, caller, timeout=300_000_000))[1]


class TestBackendThatIsAway:
    @pytest.mark.parametrize(
        ("error", "may"),
        [
            (Unavailable("the engine does not answer", retry_after=5), True),
            (Unavailable("the engine is being taken down", retry_after=5, should_retry=False), False),
            (SandboxUnreachable("the sandbox has ended at once", retry_after=5), None),
        ],
    )
    async def test_create_may_be_repeated_where_nothing_was_begun(self, core, backend, error, may):
        backend.creating = refusing(error)
        with pytest.raises(type(error)) as refusal:
            await core.owner.create()
        assert (refusal.value.should_retry, refusal.value.retry_after) == (may, 5)

    async def test_kill_says_when_to_ask_again_and_is_done_then(self, core, backend, world):
        made = await core.owner.create()
        backend.destroying = refusing(Unavailable("the engine does not answer"))
        with pytest.raises(Unavailable) as refusal:
            await core.owner.call("Kill", id=made.id)
        assert refusal.value.retry_after == 5
        assert refusal.value.should_retry is None
        assert await core.owner.ids() == []
        backend.destroying = done
        await core.owner.call("Kill", id=made.id)
        assert world.boxes == {}


async def test_team_that_may_create_nothing_is_not_told_to_wait(core):
    await core.internal.call("CreateTeam", id="none", limits=teams_pb2.TeamLimits(creates_per_minute=0))
    key = await core.internal.call("CreateKey", name="none", owner="none")
    with pytest.raises(ResourceExhausted) as refusal:
        await core.client(("api-key", key.secret)).create()
    assert (refusal.value.should_retry, refusal.value.retry_after, refusal.value.limit) == (False, None, 0)


@pytest.fixture
def mortal():
    """A PostgreSQL server of this test alone."""
    need("postgres")
    with PostgresServer.running() as server:
        yield server


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_database_that_is_away_is_unavailable_and_no_fault(deployment, mortal):
    deployment = replace(deployment, database=await mortal.new_database())
    async with deployment.core() as core:
        made = await core.owner.create()
        mortal.end()
        for method, fields in (("Kill", {"id": made.id}), ("Create", {"template_id": "base"}), ("List", {})):
            with pytest.raises(Unavailable) as refusal:
                await core.owner.call(method, **fields)
            assert refusal.value.retry_after
        # What is in memory is answered from there.
        assert (await core.owner.call("Get", id=made.id)).sandbox.id == made.id
