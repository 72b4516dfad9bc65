"""Two cores on one PostgreSQL: any answers for all, each change happens once, and what a dead one had is taken over.

Both run in this process on state directories of their own. What needs a core that is killed or stopped for real stands in
``tests/journeys/test_two_gateways.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import AsyncExitStack

import asyncpg
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandgate_api.core.v1 import peers_pb2, peers_pb2_grpc, sandboxes_pb2, teams_pb2
from sandgate_core import clock, locking
from sandgate_core.lease import Lease
from sandgate_core.recovery import Recovery
from sandgate_core.roster import Roster
from sandgate_core.routing import ANYWHERE, ROUTED, Routing
from sandgate_core.tokens import Tokens
from sandgate_errors import (
    Conflict,
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
    SandboxNotFound,
    SandgateError,
    Unauthenticated,
    Unavailable,
)
from sandgate_errors.grpc import from_status
from sandgate_plugin_api import Capability

SEED = "5e" * 32
TOKENS = Tokens(bytes.fromhex(SEED))


@pytest.fixture
async def pair(hosts):
    """Two cores that serve."""
    async with hosts[0].core() as first, hosts[1].core() as second:
        yield first, second


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(number * 1_000_000))
    return duration


async def outcome(call):
    try:
        return await call
    except SandgateError as error:
        return error


async def health(core) -> int:
    stub = health_pb2_grpc.HealthStub(core.internal.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def states(host, sandbox_id) -> list[str]:
    found = await host.sql("SELECT to_state FROM transitions WHERE sandbox_id = :id ORDER BY revision", id=sandbox_id)
    return [state for (state,) in found]


async def owner_of(host, sandbox_id) -> str:
    ((core,),) = await host.sql("SELECT core FROM sandboxes WHERE id = :id", id=sandbox_id)
    return core


async def lives(host) -> bool:
    ((end,),) = await host.sql("SELECT lease_end FROM cores WHERE id = :id", id=node_of(host))
    return end > clock.now()


def node_of(host) -> str:
    return (host.folder / "node").read_text().strip()


def test_every_method_says_whether_it_belongs_to_one_core():
    service = sandboxes_pb2.DESCRIPTOR.services_by_name["SandboxService"]
    methods = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert methods == ROUTED.keys() | ANYWHERE
    assert not ROUTED.keys() & ANYWHERE
    for method in service.methods:
        field = ROUTED.get(f"/{service.full_name}/{method.name}")
        assert field is None or field in method.input_type.fields_by_name


class TestAnyCore:
    async def test_answers_for_a_sandbox_of_another(self, hosts, pair):
        first, second = pair
        made = await first.owner.create(metadata={"a": "b"}, secure=True)
        assert await owner_of(hosts[0], made.id) == node_of(hosts[0])
        assert (await second.owner.call("Get", id=made.id)).sandbox == made
        end = (await second.owner.call("SetTimeout", id=made.id, timeout=seconds(900))).end_at
        assert (await first.owner.call("Get", id=made.id)).sandbox.end_at == end
        events = (await second.owner.call("GetEvents", id=made.id)).events
        assert [event.to_state for event in events] == ["creating", "running"]
        await second.owner.call("Kill", id=made.id)
        for core in pair:
            with pytest.raises(SandboxNotFound):
                await core.owner.call("Get", id=made.id)
            with pytest.raises(SandboxNotFound):
                await core.owner.call("Kill", id=made.id)
        assert await states(hosts[0], made.id) == ["creating", "running", "killing", "killed"]
        assert not hosts[0].world.boxes

    async def test_passes_errors_on_as_they_are(self, pair):
        first, second = pair
        made = await first.owner.create()
        direct = await outcome(first.owner.call("Connect", id=made.id, timeout=seconds(0)))
        passed = await outcome(second.owner.call("Connect", id=made.id, timeout=seconds(0)))
        assert (type(passed), passed.message) == (type(direct), direct.message)

    async def test_hides_sandboxes_of_another_team_wherever_they_are(self, pair):
        """S12"""
        made = await pair[0].owner.create()
        secret = (await pair[0].internal.call("CreateKey", name="x", owner="other", create_team=True)).secret
        for core in pair:
            stranger = core.client(("api-key", secret))
            for method, fields in (("Get", {}), ("Kill", {}), ("SetTimeout", {"timeout": seconds(5)}), ("Pause", {})):
                with pytest.raises(SandboxNotFound):
                    await stranger.call(method, id=made.id, **fields)
            assert await stranger.ids() == []
            with pytest.raises(PermissionDenied):
                await stranger.call("Locate", id=made.id)

    async def test_lists_all_in_one_order_and_pages(self, pair):
        """C17 to C23"""
        made = [(await pair[number % 2].owner.create(metadata={"n": str(number)})).id for number in range(7)]
        for core in pair:
            assert await core.owner.ids() == made[::-1]
            assert await core.owner.ids(order=sandboxes_pb2.ORDER_ASC) == made
            assert await core.owner.ids(metadata={"n": "3"}) == [made[3]]
            assert await core.owner.ids(all=True) == made[::-1]
        found, token = [], ""
        for core in (*pair, *pair):
            page = await core.owner.call("List", page_size=2, page_token=token)
            assert page.total_running == 7
            found += [sandbox.id for sandbox in page.sandboxes]
            token = page.next_page_token
        assert (found, token) == (made[::-1], "")

    async def test_finds_metadata_of_sandboxes_elsewhere_exactly(self, pair):
        """C19"""
        pairs = {"n": "77", 'x"n': "7", "ä, ": '{"n": "78"', "\\": '\\", "n": "79', "": "", "z": "\0\U0001f600"}
        first, second = pair
        made = await first.owner.create(metadata=pairs)
        for key, value in pairs.items():
            assert await second.owner.ids(metadata={key: value}) == [made.id], key
        assert await second.owner.ids(metadata=pairs) == [made.id]
        for wanted in (
            {"n": "7"},
            {"n": "78"},
            {"n": "79"},
            {"n": "770"},
            {"N": "77"},
            {"x": "7"},
            {"n": "77", "m": ""},
        ):
            assert await second.owner.ids(metadata=wanted) == [], wanted

    async def test_finds_the_sandbox_of_a_signature(self, pair):
        """S8"""
        first, second = pair
        made = await first.owner.create(secure=True)
        wanted = hashlib.sha256(b"a:" + made.access_token.encode() + b":b").digest()
        fields = {"before": b"a:", "after": b":b", "sha256": wanted}
        assert (await second.internal.call("FindByTokenHash", **fields)).id == made.id
        with pytest.raises(Unauthenticated):
            await second.internal.call("FindByTokenHash", **{**fields, "after": b":c"})

    async def test_shows_what_a_sandbox_of_another_used(self, pair):
        first, second = pair
        made = [(await core.owner.create()).id for core in pair]
        async with asyncio.timeout(30):
            for core in (first, second):
                while True:
                    answer = await core.owner.call("GetMetrics", ids=[*made, "iunknown"])
                    found = {item.id: len(item.samples) for item in answer.sandboxes}
                    if all(found.get(name) for name in made):
                        break
                    await asyncio.sleep(0.1)
                assert found.keys() == set(made)

    async def test_notes_a_call_that_it_passes_on_and_its_owner_does_not(self, hosts, pair):
        first, second = pair
        made = await first.owner.create()
        await second.owner.call("Kill", id=made.id)
        for core in pair:
            await core.internal.call("ListAudit")
        noted = await hosts[0].sql("SELECT action, key_name, outcome FROM audit WHERE subject = :id", id=made.id)
        assert sorted(noted) == [("sandbox.create", "first", "OK"), ("sandbox.kill", "first", "OK")]


class TestDataPlane:
    async def test_question_of_the_edge_stays_the_edges_whichever_core_is_asked(self, pair):
        made = await pair[0].owner.create()
        for core in pair:
            with pytest.raises(PermissionDenied):
                await core.owner.call("Locate", id=made.id)
            with pytest.raises(PermissionDenied):
                await core.owner.call("NoteActivity", id=made.id, activity=1)
            await core.internal.call("NoteActivity", id=made.id, activity=1)

    async def test_locate_names_the_relay_of_the_owner_and_a_token_for_this_sandbox_alone(self, pair):
        first, second = pair
        made, other = await first.owner.create(), await first.owner.create()
        assert not (await first.internal.call("Locate", id=made.id)).agent.relay
        agent = (await second.internal.call("Locate", id=made.id)).agent
        assert (agent.relay, agent.target) == (True, first.target)
        async with grpc.aio.insecure_channel(agent.target) as channel:
            proof = (("relay-token", agent.token),)
            assert await echo(channel, (*proof, ("sandbox-id", made.id))) == b"x"
            for metadata in (
                (*proof, ("sandbox-id", other.id)),
                (*proof, ("sandbox-id", made.id), ("sandbox-id", other.id)),
                (*proof, ("sandbox-id", made.id), ("api-key", "e2b_" + "0" * 40)),
                proof,
                (("relay-token", "wrong"), ("sandbox-id", made.id)),
            ):
                with pytest.raises(Unauthenticated):
                    await echo(channel, metadata)
        holder = first.client(("relay-token", agent.token), ("sandbox-id", made.id))
        for method in ("Get", "Kill", "Locate"):
            with pytest.raises(Unauthenticated):
                await holder.call(method, id=made.id)

    async def test_relay_of_any_core_reaches_the_agent(self, hosts, pair):
        first, second = pair
        made = await first.owner.create()
        metadata = (*second.owner.credentials, ("sandbox-id", made.id), ("acting-user-bin", b"root"))
        assert await echo(second.owner.channel, metadata) == b"x"
        seen = dict(hosts[0].world.boxes[made.id].agent.calls[-1]["metadata"])
        assert seen["acting-user-bin"] == b"root"
        assert not seen.keys() & {
            "api-key",
            "relay-token",
            "peer-token",
            "peer-team-bin",
            "peer-internal",
            "internal-token",
        }

    async def test_relay_of_another_core_hides_what_another_team_has(self, pair):
        first, second = pair
        made = await first.owner.create()
        secret = (await first.internal.call("CreateKey", name="x", owner="other", create_team=True)).secret
        with pytest.raises(SandboxNotFound):
            await echo(second.owner.channel, (("api-key", secret), ("sandbox-id", made.id)))

    async def test_open_locate_stream_leaves_what_is_elsewhere_to_the_call(self, pair):
        first, second = pair
        made = await first.owner.create()
        stub = second.internal
        stream = stub._sandboxes.LocateStream(metadata=stub.credentials)
        await stream.write(sandboxes_pb2.LocateStreamRequest(ids=[made.id]))
        (answer,) = (await stream.read()).answers
        assert not answer.HasField("sandbox")
        stream.cancel()


async def echo(channel, metadata) -> bytes:
    call = channel.stream_stream("/sandgate_api.envd.v1.Test/Echo")(metadata=metadata)
    try:
        await call.write(b"x")
        await call.done_writing()
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise from_status(await call.code(), await call.details(), tuple(await call.trailing_metadata()))
        return answer
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code(), error.details(), tuple(error.trailing_metadata())) from None


class TestBetweenCores:
    @pytest.mark.parametrize(
        "credentials",
        [
            (("peer-token", "wrong"),),
            (("peer-team-bin", b"default"),),
            (("peer-internal", "true"),),
            (("peer-internal", "true"), ("internal-token", "internal-token-of-the-tests")),
            (("peer-token", TOKENS.between_cores), ("internal-token", "internal-token-of-the-tests")),
            (("peer-token", TOKENS.between_cores), ("peer-token", TOKENS.between_cores)),
            (("peer-token", TOKENS.fingerprint),),
        ],
    )
    async def test_only_the_credential_of_cores_passes(self, pair, credentials):
        with pytest.raises(Unauthenticated):
            await pair[0].client(*credentials).call("List")

    async def test_no_other_caller_may_use_their_service(self, pair):
        for client in (pair[0].owner, pair[0].internal):
            stub = peers_pb2_grpc.PeerServiceStub(client.channel)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.Refresh(peers_pb2.RefreshRequest(), metadata=client.credentials)
            assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED

    async def test_call_that_was_passed_on_is_not_passed_on_again(self, pair):
        first, second = pair
        made = await first.owner.create()
        lost = second.client(("peer-token", TOKENS.between_cores))
        with pytest.raises(Unavailable) as refusal:
            await lost.call("Kill", id=made.id)
        assert (refusal.value.should_retry, refusal.value.retry_after) == (True, 1)
        assert await first.owner.ids() == [made.id]


class TestSnapshotThatOneCoreKeeps:
    """Of a backend that is bound to its host: only the core there can make a sandbox from it."""

    @pytest.fixture
    def hosts(self, hosts, make_backend):
        class CopyingBackend(make_backend):
            capabilities = make_backend.capabilities | {Capability.SNAPSHOT}

            async def snapshot(self, handle, *, snapshot_id):
                return {"snapshot_id": snapshot_id}

            async def delete_snapshot(self, snapshot):
                pass

        for host in hosts:
            host.backend = CopyingBackend(host.world)
        return hosts

    async def test_is_started_from_by_any(self, hosts, pair):
        first, second = pair
        box = await first.owner.create()
        kept = (await first.owner.call("CreateSnapshot", id=box.id, name="kept")).snapshot
        for number, name in enumerate((kept.id, "kept", "default/kept:default")):
            made = await second.owner.create(template_id=name, idempotency_key=f"k-{number}")
            assert made.template_id == kept.id
            assert await owner_of(hosts[0], made.id) == node_of(hosts[0])
            assert (await second.owner.create(template_id=name, idempotency_key=f"k-{number}")).id == made.id
        assert {request.snapshot["snapshot_id"] for request in hosts[0].backend.requests[1:]} == {kept.id}
        assert hosts[1].backend.requests == []
        entry = (await second.internal.call("ListAudit", action="sandbox.create")).entries[0]
        assert entry.subject == made.id

    @pytest.fixture
    def answered(self, monkeypatch) -> set[str]:
        """What was made elsewhere for calls whose answer was sent: from then on their caller's, even if it has just left."""
        answered: set[str] = set()
        created = Routing._created

        async def noted(*arguments, **named):
            answer = await created(*arguments, **named)
            asyncio.current_task().add_done_callback(
                lambda ended: None if ended.cancelling() else answered.add(answer.sandbox.id)
            )
            return answer

        monkeypatch.setattr(Routing, "_created", noted)
        return answered

    async def test_is_not_started_from_for_nobody(self, hosts, pair, until, answered):
        """C12: callers leave before they are answered, at any moment."""
        first, second = pair
        client = second.owner
        box = await first.owner.create()
        await first.owner.call("CreateSnapshot", id=box.id, name="kept")
        for _ in range(25):
            creating = asyncio.create_task(client.create(template_id="kept"))
            await asyncio.sleep(random.random() * 0.06)
            creating.cancel()
            await asyncio.wait({creating})
        await until(lambda: set(hosts[0].world.boxes) == {box.id} | answered)
        assert set(await client.ids()) == {box.id} | answered

    async def test_is_taken_back_when_it_is_cut_off_while_its_answer_is_being_sent(
        self, hosts, pair, until, monkeypatch
    ):
        """C12"""
        first, second = pair
        box = await first.owner.create()
        await first.owner.call("CreateSnapshot", id=box.id, name="kept")
        created = Routing._created

        async def cut_off(*arguments, **named):
            answer = await created(*arguments, **named)
            # As gRPC does when the caller goes away; the handler has returned by then.
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            return answer

        monkeypatch.setattr(Routing, "_created", cut_off)
        creating = asyncio.create_task(second.owner.create(template_id="kept"))
        world = hosts[0].world
        await until(lambda: world.destroyed and set(world.boxes) == {box.id})
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)

    async def test_says_whose_it_is_while_that_core_is_away(self, hosts):
        async with hosts[1].core() as second:
            async with hosts[0].core() as first:
                box = await first.owner.create()
                await first.owner.call("CreateSnapshot", id=box.id, name="kept")
            with pytest.raises(Unavailable, match=node_of(hosts[0])) as refusal:
                await second.owner.create(template_id="kept")
            assert (refusal.value.should_retry, refusal.value.retry_after) == (True, 10)


class TestOnce:
    async def test_idempotency_key_makes_one_sandbox_whoever_is_asked(self, hosts, pair):
        calls = [pair[number % 2].owner.create(idempotency_key="k-1") for number in range(12)]
        outcomes = await asyncio.gather(*map(outcome, calls))
        made = {item.id for item in outcomes if not isinstance(item, SandgateError)}
        assert len(made) == 1
        assert all(isinstance(item, Conflict) for item in outcomes if isinstance(item, SandgateError))
        for core in pair:
            assert (await core.owner.create(idempotency_key="k-1")).id in made
        assert set(hosts[0].world.boxes) == made

    async def test_deadline_moved_by_one_core_fires_once_at_the_other(self, hosts, pair, until):
        first, second = pair
        made = await first.owner.create(timeout=300)
        await second.owner.call("SetTimeout", id=made.id, timeout=seconds(1))
        await until(lambda: not hosts[0].world.boxes)
        async with asyncio.timeout(20):
            while await second.owner.ids():  # noqa: ASYNC110 - the record follows the box
                await asyncio.sleep(0.01)
        assert await states(hosts[0], made.id) == ["creating", "running", "killing", "killed"]
        assert hosts[0].world.destroyed == [made.id]

    async def test_storm_from_both_sides_ends_in_one_defined_state(self, hosts, pair):
        """C35 to C37, C39, C59"""
        for host in hosts:
            host.backend.capabilities = frozenset({Capability.PAUSE})
        for round_number in range(4):
            made = await pair[round_number % 2].owner.create()
            calls = []
            for _ in range(6):
                for core in pair:
                    calls += [
                        core.owner.call("Pause", id=made.id),
                        core.owner.call("Connect", id=made.id, timeout=seconds(60)),
                    ]
            kill = round_number > 1
            if kill:
                calls += [core.owner.call("Kill", id=made.id) for core in pair]
            outcomes = await asyncio.gather(*map(outcome, calls))
            assert not [
                item for item in outcomes if isinstance(item, SandgateError) and item.__class__ is SandgateError
            ]
            history = await states(hosts[0], made.id)
            assert history[-1] in ({"killed"} if kill else {"running", "paused"})
            if kill:
                assert sum(not isinstance(item, SandgateError) for item in outcomes[-2:]) == 1
                assert history.count("killing") == history.count("killed") == 1
                assert made.id not in hosts[0].world.boxes
            else:
                found = [(await core.owner.call("Get", id=made.id)).sandbox.state for core in pair]
                assert found[0] == found[1]

    async def test_quota_of_a_team_holds_over_both(self, hosts, pair):
        """C57"""
        first, second = pair
        await first.internal.call("UpdateTeam", id="default", limits=teams_pb2.TeamLimits(max_sandboxes=3))
        outcomes = await asyncio.gather(*(outcome(pair[number % 2].owner.create()) for number in range(12)))
        made = [item.id for item in outcomes if not isinstance(item, SandgateError)]
        assert len(made) == len(hosts[0].world.boxes) == 3
        assert all(isinstance(item, ResourceExhausted) for item in outcomes if isinstance(item, SandgateError))
        await second.owner.call("Kill", id=made[0])
        await first.owner.create()
        with pytest.raises(ResourceExhausted):
            await second.owner.create()

    async def test_rate_of_creates_is_one_for_both(self, pair):
        await pair[1].internal.call("UpdateTeam", id="default", limits=teams_pb2.TeamLimits(creates_per_minute=4))
        outcomes = await asyncio.gather(*(outcome(pair[number % 2].owner.create()) for number in range(10)))
        refused = [item for item in outcomes if isinstance(item, ResourceExhausted)]
        assert len(refused) == 6
        assert all(0 < item.retry_after <= 60 for item in refused)


class TestKeysAndTeams:
    async def test_revoked_key_is_refused_by_the_other_core_at_the_next_call(self, pair):
        first, second = pair
        for _ in range(10):
            made = await first.internal.call("CreateKey", name="x", owner="lab", create_team=True)
            user = second.client(("api-key", made.secret))
            await user.call("List")
            await first.internal.call("RevokeKey", id=made.key.id)
            with pytest.raises(Unauthenticated):
                await user.call("List")

    async def test_each_manages_what_the_other_made(self, pair):
        first, second = pair
        await first.internal.call("CreateTeam", id="lab")
        made = await second.internal.call("CreateKey", name="x", owner="lab", create_team=True)
        await first.internal.call("RenameKey", id=made.key.id, name="y")
        assert [key.name for key in (await second.internal.call("ListKeys", owner="lab")).keys] == ["y"]
        outcomes = await asyncio.gather(*(outcome(core.internal.call("CreateTeam", id="same")) for core in pair))
        assert sum(isinstance(item, SandgateError) for item in outcomes) == 1

    async def test_changes_of_different_limits_at_both_do_not_undo_one_another(self, pair):
        first, second = pair
        await first.internal.call("UpdateTeam", id="default", name="One")
        await second.internal.call("UpdateTeam", id="default", limits=teams_pb2.TeamLimits(max_cpus=7))
        for core in pair:
            (team,) = (await core.internal.call("ListTeams")).teams
            assert (team.name, team.limits.max_cpus) == ("One", 7)


class TestComingAndGoing:
    async def test_start_leaves_alone_what_belongs_to_another_core(self, hosts, until):
        async with hosts[0].core() as first:
            made = [(await first.owner.create()).id for _ in range(3)]
            await hosts[0].world.make("istranger")
            async with hosts[1].core() as second:
                await until(lambda: "istranger" not in hosts[0].world.boxes)
                assert set(await second.owner.ids()) == set(hosts[0].world.boxes) == set(made)

    async def test_sandboxes_of_a_host_wait_for_its_core(self, hosts):
        async with hosts[1].core(lease=1) as second:
            async with hosts[0].core() as first:
                made = await first.owner.create(timeout=300)
            for method, fields in (
                ("Kill", {}),
                ("Connect", {"timeout": seconds(9)}),
                ("SetTimeout", {"timeout": seconds(9)}),
            ):
                with pytest.raises(Unavailable, match=f"core {node_of(hosts[0])} on .* is away") as refusal:
                    await second.owner.call(method, id=made.id, **fields)
                assert refusal.value.retry_after
            with pytest.raises(Unavailable, match="is away"):
                await echo(second.owner.channel, (*second.owner.credentials, ("sandbox-id", made.id)))
            assert await second.owner.ids() == [made.id]
            await asyncio.sleep(1.5)  # longer than a lease: nothing is taken
            assert await owner_of(hosts[0], made.id) == node_of(hosts[0])
            async with hosts[0].core() as first:
                await second.owner.call("Kill", id=made.id)
                assert await first.owner.ids() == []
        assert not hosts[0].world.boxes

    async def test_sandboxes_that_are_bound_to_no_host_are_taken_over_with_their_deadlines(
        self, hosts, until, monkeypatch
    ):
        for host in hosts:
            host.backend.host_bound = False
        take_up, asked = Recovery.take_up, asyncio.Event()

        async def later(recovery, lives):
            await asked.wait()
            return await take_up(recovery, lives)

        async with hosts[1].core(lease=1) as second:
            async with hosts[0].core() as first:
                made = await first.owner.create(timeout=300)
                short = await first.owner.create(timeout=2)
                monkeypatch.setattr(Recovery, "take_up", later)
            with pytest.raises(Unavailable, match="taken over"):
                await second.owner.call("SetTimeout", id=made.id, timeout=seconds(60))
            asked.set()
            await until(lambda: short.id not in hosts[0].world.boxes)
            end = (await second.owner.call("SetTimeout", id=made.id, timeout=seconds(60))).end_at
            assert await echo(second.owner.channel, (*second.owner.credentials, ("sandbox-id", made.id))) == b"x"
            assert await owner_of(hosts[0], made.id) == node_of(hosts[1])
            async with hosts[0].core() as first:
                assert (await first.owner.call("Get", id=made.id)).sandbox.end_at == end
                await first.owner.call("Kill", id=made.id)
        assert await states(hosts[0], made.id) == ["creating", "running", "killing", "killed"]
        assert await states(hosts[0], short.id) == ["creating", "running", "killing", "killed"]

    async def test_core_without_its_lease_refuses_to_act_and_forgets_what_was_taken(self, hosts, until, monkeypatch):
        for host in hosts:
            host.backend.host_bound = False
        cut = asyncio.Event()
        silent: set[str] = set()
        renew = Roster.renew

        async def delayed(roster, **options):
            if roster._node in silent:
                await cut.wait()
            return await renew(roster, **options)

        monkeypatch.setattr(Roster, "renew", delayed)
        async with hosts[0].core(lease=1.5) as first, hosts[1].core(lease=1.5):
            made = await first.owner.create(timeout=300)
            short = await first.owner.create(timeout=3)
            silent.add(node_of(hosts[0]))
            async with asyncio.timeout(30):
                while await owner_of(hosts[0], made.id) != node_of(hosts[1]):  # noqa: ASYNC110 - the other core's event
                    await asyncio.sleep(0.05)
            for method in ("Get", "List", "Kill"):
                with pytest.raises(Unavailable, match="lost touch with its database"):
                    await first.owner.call(method, **({} if method == "List" else {"id": made.id}))
            assert await health(first) == health_pb2.HealthCheckResponse.NOT_SERVING
            # Its own deadline passes, and it does nothing about it.
            await until(lambda: short.id not in hosts[0].world.boxes)
            silent.clear()
            cut.set()
            async with asyncio.timeout(30):
                while isinstance(await outcome(first.owner.call("List")), SandgateError):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            assert await first.owner.ids() == [made.id]
            async with asyncio.timeout(30):
                while await health(first) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            await first.owner.call("SetTimeout", id=made.id, timeout=seconds(77))
            await first.owner.call("Kill", id=made.id)
        assert await states(hosts[0], made.id) == ["creating", "running", "killing", "killed"]
        assert await states(hosts[0], short.id) == ["creating", "running", "killing", "killed"]
        assert sorted(hosts[0].world.destroyed) == sorted([made.id, short.id])

    async def test_what_is_taken_over_from_in_the_middle_of_being_taken_over_is_forgotten_too(self, hosts, until):
        """And what was measured of it is its new core's, not to be cleared away by the old one."""
        for host in hosts:
            host.backend.host_bound = False
        reached, go_on = asyncio.Event(), asyncio.Event()

        class Slow:
            """Between the store's word and the first look at the sandbox."""

            def __init__(self, backend):
                self.locate_as_before = backend.locate

            async def locate(self, handle):
                reached.set()
                await go_on.wait()
                return await self.locate_as_before(handle)

        async with hosts[0].core() as first:
            made = await first.owner.create()
        hosts[1].backend.locate = Slow(hosts[1].backend).locate
        async with hosts[1].core(lease=1) as second:
            async with asyncio.timeout(20):
                await reached.wait()
            third = "n" + "0" * 12
            alive = clock.now() + 3600 * clock.MICROSECONDS
            await hosts[0].sql(
                "INSERT INTO cores (id, address, host, boot, lease_end) VALUES (:id, 'unix:/x', 'h', 'b', :end)",
                id=third,
                end=alive,
            )
            await hosts[0].sql("UPDATE sandboxes SET core = :core", core=third)
            # As when this core had been away for longer than its lease.
            await hosts[0].sql("UPDATE cores SET lease_end = 0 WHERE id = :id", id=node_of(hosts[1]))
            await hosts[0].sql(
                "INSERT INTO measurements (sandbox_id, at, samples) VALUES (:id, 1, :samples)", id=made.id, samples=b""
            )
            async with asyncio.timeout(20):
                while isinstance(await outcome(second.owner.call("List")), SandgateError) or not await lives(hosts[1]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            go_on.set()
            with pytest.raises(Unavailable, match="does not answer"):
                await second.owner.call("SetTimeout", id=made.id, timeout=seconds(9))
        assert await hosts[0].sql("SELECT at FROM measurements WHERE sandbox_id = :id", id=made.id) == [(1,)]
        assert made.id in hosts[0].world.boxes

    async def test_create_whose_sandbox_is_taken_over_in_the_middle_leaves_nothing(self, hosts, monkeypatch, until):
        for host in hosts:
            host.backend.host_bound = False
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hang(_):
            reached.set()
            await go_on.wait()

        hosts[0].backend.created = hang
        async with hosts[1].core() as second, hosts[0].core() as first:
            creating = asyncio.create_task(outcome(first.owner.create()))
            await reached.wait()
            ((name,),) = await hosts[0].sql("SELECT id FROM sandboxes")
            # As when the core had been away for longer than its lease.
            await hosts[0].sql("UPDATE sandboxes SET core = :core", core=node_of(hosts[1]))
            go_on.set()
            assert isinstance(await creating, SandgateError)
            await until(lambda: not hosts[0].world.boxes)
            assert await second.owner.ids() == await first.owner.ids() == []
        assert name in hosts[0].world.destroyed

    async def test_another_seed_is_refused_while_other_cores_live(self, hosts):
        async with hosts[0].core():
            with pytest.raises(FailedPrecondition, match="same SANDGATE_SEED") as refusal:
                async with hosts[1].core(seed="a0" * 32):
                    pass
        assert "\n" not in refusal.value.message

    async def test_copied_state_directory_is_refused(self, hosts, monkeypatch):
        monkeypatch.setattr(locking, "_PATIENCE", 0.2)
        async with hosts[0].core() as first:
            (hosts[1].folder / "node").write_text(f"{node_of(hosts[0])}\n")
            with pytest.raises(FailedPrecondition, match="same node id"):
                async with hosts[1].core():
                    pass
            await first.owner.call("List")

    async def test_core_of_the_time_of_one_core_per_database_keeps_out_and_is_kept_out(self, hosts, monkeypatch):
        monkeypatch.setattr(locking, "_PATIENCE", 0.2)
        connection = await asyncpg.connect(hosts[0].database)
        try:
            async with hosts[0].core():
                pass  # so that the schema is this version's
            await connection.execute(f"SELECT pg_advisory_lock({locking._ADVISORY})")
            with pytest.raises(FailedPrecondition, match="another core uses this database alone"):
                async with hosts[0].core():
                    pass
            await connection.execute(f"SELECT pg_advisory_unlock({locking._ADVISORY})")
            async with hosts[0].core(), hosts[1].core():
                assert not await connection.fetchval(f"SELECT pg_try_advisory_lock({locking._ADVISORY})")
        finally:
            await connection.close()

    async def test_cores_that_start_together_on_an_empty_database_agree(self, hosts):
        async with AsyncExitStack() as stack:
            first, second = await asyncio.gather(*(stack.enter_async_context(host.core()) for host in hosts))
            made = await first.owner.create()
            assert await second.owner.ids() == [made.id]
            assert first.first_key_created != second.first_key_created


class TestLease:
    def test_it_is_not_held_before_it_was_renewed_nor_after_its_time(self):
        lease = Lease(10)
        with pytest.raises(Unavailable):
            lease.check()
        lease.renewed(asked_at=lease.clock() - 9)
        lease.check()
        lease.renewed(asked_at=lease.clock() - 11)
        with pytest.raises(Unavailable):
            lease.check()
        lease.renewed(asked_at=lease.clock())
        lease.given_back()
        assert not lease.held
