"""Lifecycle: create, get, kill, timeouts, connect, locate, and the races between them."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.admission import CreateSpec
from sandgate_core.callers import Caller
from sandgate_core.listing import Query
from sandgate_core.sandboxes import Sandboxes
from sandgate_core.states import State
from sandgate_core.store import Store
from sandgate_errors import (
    CapabilityMissing,
    Conflict,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SandboxNotFound,
    Unauthenticated,
    Unavailable,
)


def duration(seconds: float) -> Duration:
    made = Duration()
    made.FromMicroseconds(round(seconds * 1_000_000))
    return made


def end_of(sandbox) -> float:
    return sandbox.end_at.ToMicroseconds() / 1e6


async def records_of(deployment):
    """Every record of the database, ended ones included: id to state."""
    return dict(await deployment.sql("SELECT id, state FROM sandboxes"))


class TestCreate:
    async def test_answers_with_what_was_asked_for_and_tells_the_agent(self, core, world):
        made = await core.owner.create(
            metadata={"a": "b"}, envs={"X": "1"}, secure=True, allow_internet_access=False, timeout=60
        )
        assert made.id[0] == "i"
        assert len(made.id) == 21
        assert made.template_id == "base"
        assert made.state == sandboxes_pb2.SANDBOX_STATE_RUNNING
        assert dict(made.metadata) == {"a": "b"}
        assert made.on_timeout == sandboxes_pb2.ON_TIMEOUT_KILL
        assert not made.allow_internet_access
        assert made.envd_version == "0.6.13"
        assert (made.resources.cpu_count, made.resources.memory_mb, made.resources.disk_size_mb) == (2, 512, 1024)
        (init,) = world.boxes[made.id].agent.inits
        assert (init.sandbox_id, init.template_id, dict(init.envs)) == (made.id, "base", {"X": "1"})
        # C3: usable when the reply comes; C23: in the list as well.
        located = await core.internal.call("Locate", id=made.id)
        # Asked before every request, so it carries nothing that a client can make large.
        assert located.sandbox == sandboxes_pb2.Sandbox(id=made.id, state=made.state, access_token=made.access_token)
        assert located.agent.target == world.boxes[made.id].placement.agent.target
        assert await core.owner.ids() == [made.id]

    async def test_life_counts_from_readiness_and_not_from_the_request(self, core, backend):
        # C7
        async def slow(_):
            await asyncio.sleep(0.4)

        backend.creating = slow
        asked = time.time()
        made = await core.owner.create(timeout=10)
        assert made.started_at.ToMicroseconds() / 1e6 >= asked + 0.4
        assert made.end_at.ToMicroseconds() - made.started_at.ToMicroseconds() == 10_000_000

    async def test_template_may_be_named_by_an_alias(self, core):
        made = await core.owner.create(template_id="default-image")
        assert (made.template_id, made.alias) == ("base", "default-image")

    @pytest.mark.parametrize(
        ("fields", "error", "text"),
        [
            ({"template_id": "nope"}, NotFound, "template 'nope' not found"),
            ({"template_id": ""}, InvalidArgument, "template"),
            ({"template_id": "x" * 10_000}, InvalidArgument, "256"),
            ({"timeout": 0}, InvalidArgument, "at least one second"),
            ({"timeout": -5}, InvalidArgument, "at least one second"),
            ({"timeout": 0.999}, InvalidArgument, "at least one second"),
            ({"timeout": 86_401}, InvalidArgument, "at most 86400"),
            ({"timeout": 9e10}, InvalidArgument, "at most 86400"),
            ({"on_timeout": sandboxes_pb2.ON_TIMEOUT_PAUSE}, CapabilityMissing, "'local' does not offer pause"),
            ({"auto_resume": True}, CapabilityMissing, "'local' does not offer pause"),
            ({"on_timeout": 7}, InvalidArgument, "on_timeout"),
            # C8
            ({"pause_memory": False}, InvalidArgument, "autoPause"),
            (
                {"pause_memory": False, "on_timeout": sandboxes_pb2.ON_TIMEOUT_PAUSE, "auto_resume": True},
                InvalidArgument,
                "autoResume",
            ),
            (
                {"pause_memory": False, "on_timeout": sandboxes_pb2.ON_TIMEOUT_PAUSE},
                CapabilityMissing,
                "filesystem-only pause",
            ),
            # R11
            ({"network": sandboxes_pb2.NetworkRules(allow_public_traffic=False)}, InvalidArgument, "secured"),
            (
                {"network": sandboxes_pb2.NetworkRules(deny_out=["10.0.0.0/8"])},
                CapabilityMissing,
                "'local' does not offer network rules",
            ),
            ({"envs": {"A=B": "1"}}, InvalidArgument, "environment variable"),
            ({"envs": {"A": "\0"}}, InvalidArgument, "NUL"),
            ({"metadata": {str(n): "" for n in range(257)}}, InvalidArgument, "metadata .* 256 pairs"),
            # Bytes, not characters.
            ({"metadata": {"a": "é" * 32_768}}, InvalidArgument, "metadata .* 65536 bytes"),
            ({"metadata": {"k" * 65_537: ""}}, InvalidArgument, "metadata .* 65536 bytes"),
            ({"envs": {"A": "x" * 131_070}}, InvalidArgument, "envs.* 131071 bytes as name=value"),
            ({"envs": {f"A{n}": "x" * 131_000 for n in range(9)}}, InvalidArgument, "envs.* 1048576 bytes in all"),
            ({"envs": {f"A{n}": "" for n in range(100_000)}}, InvalidArgument, "envs.* 1048576 bytes in all"),
        ],
    )
    async def test_bad_request_is_refused_before_anything_is_made(self, core, world, fields, error, text):
        with pytest.raises(error, match=text):
            await core.owner.create(**fields)
        assert not world.boxes
        assert not world.destroyed

    async def test_metadata_and_variables_up_to_their_limits_pass(self, core, world):
        metadata = {f"{n:03}": "é" * 126 + "a" for n in range(256)}
        assert sum(len((key + value).encode()) for key, value in metadata.items()) == 65_536
        envs = {"A": "x" * 131_069, **{f"B{n}": "x" * 65_000 for n in range(13)}}
        made = await core.owner.create(metadata=metadata, envs=envs)
        assert dict(made.metadata) == metadata
        (init,) = world.boxes[made.id].agent.inits
        assert dict(init.envs) == envs

    async def test_network_rules_that_ask_for_nothing_count_as_none(self, core):
        for rules in (sandboxes_pb2.NetworkRules(), sandboxes_pb2.NetworkRules(allow_public_traffic=True)):
            made = await core.owner.create(network=rules)
            assert not made.HasField("network")

    @pytest.mark.parametrize("error", [InvalidArgument("no such image"), Unavailable("busy"), Internal("no shell")])
    async def test_backend_error_reaches_the_caller_and_leaves_nothing(self, core, backend, world, deployment, error):
        async def refuse(_):
            raise error

        backend.created = refuse
        with pytest.raises(type(error), match=error.message):
            await core.owner.create()
        assert not world.boxes
        assert set((await records_of(deployment)).values()) == {"failed"}
        assert await core.owner.ids() == []

    async def test_fault_of_a_plugin_is_internal_and_its_text_stays_inside(self, core, backend, world):
        # C12
        async def fault(_):
            raise ValueError("secret path")

        backend.created = fault
        with pytest.raises(Internal, match=r"^internal error, reference [0-9a-f]{12}$"):
            await core.owner.create()
        assert not world.boxes

    async def test_backend_that_cancels_itself_is_a_fault_and_not_the_callers_cancellation(self, core, backend, world):
        async def fault(_):
            raise asyncio.CancelledError

        backend.created = fault
        with pytest.raises(Internal, match="'local' cancelled its own create"):
            await core.owner.create()
        assert not world.boxes

    async def test_agent_that_refuses_init_fails_the_create(self, core, backend, world):
        async def fault(sandbox_id):
            world.boxes[sandbox_id].agent.token = "another"

        backend.created = fault
        with pytest.raises(Internal, match="its agent does not answer"):
            await core.owner.create()
        assert not world.boxes

    async def test_backend_that_never_returns_is_given_up_and_freed(self, deployment, backend, world):
        async def hang(_):
            await asyncio.Event().wait()

        backend.created = hang
        async with deployment.core(create_timeout=2) as core:
            with pytest.raises(DeadlineExceeded, match="2 seconds"):
                await core.owner.create()
            assert not world.boxes

    @pytest.mark.parametrize("point", ["creating", "created", "init"])
    async def test_cancelled_create_leaves_nothing(self, core, backend, world, deployment, until, point):
        reached, never = asyncio.Event(), asyncio.Event()

        async def stay(sandbox_id=""):
            reached.set()
            await never.wait()

        async def prepare(sandbox_id):
            world.boxes[sandbox_id].agent.initialized = stay

        if point == "init":
            backend.created = prepare
        else:
            setattr(backend, point, stay)
        call = asyncio.create_task(core.owner.create())
        await reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: bool(world.destroyed))
        assert not world.boxes
        await until(lambda: True)
        for _ in range(200):
            if set((await records_of(deployment)).values()) == {"failed"}:
                break
            await asyncio.sleep(0.01)
        assert set((await records_of(deployment)).values()) == {"failed"}

    async def test_create_cancelled_at_any_moment_leaves_nothing(self, sandboxes, world, until):
        caller, spec = Caller(owner="o"), CreateSpec(template="base", timeout=60_000_000)
        for moment in range(40):
            call = asyncio.create_task(sandboxes.create(spec, caller))
            await asyncio.sleep(moment * 0.0005)
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                await sandboxes.kill(call.result().id, caller)
        await until(lambda: not world.boxes)
        assert (await sandboxes.questions.list(Query(), caller)).records == []

    async def test_create_that_is_cut_off_while_its_answer_is_being_sent_is_taken_back(
        self, core, world, until, monkeypatch
    ):
        # C12
        create = Sandboxes.create

        async def cut_off(*arguments):
            made = await create(*arguments)
            # As gRPC does when the caller goes away; the handler has returned by then.
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            return made

        monkeypatch.setattr(Sandboxes, "create", cut_off)
        creating = asyncio.create_task(core.owner.create())
        await until(lambda: world.destroyed and not world.boxes)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)

    async def test_many_at_once(self, core, world):
        owner = core.owner
        made = await asyncio.gather(*(owner.create(metadata={"n": str(n)}) for n in range(20)))
        assert len({sandbox.id for sandbox in made}) == 20
        assert set(await owner.ids()) == set(world.boxes)


class TestKill:
    async def test_ends_it_for_good(self, core, world):
        # C34, C38, R4
        owner, internal = core.owner, core.internal
        made = await owner.create()
        await owner.call("Kill", id=made.id)
        assert not world.boxes
        assert await owner.ids() == []
        for method, fields in {
            "Get": {},
            "Kill": {},
            "SetTimeout": {"timeout": duration(5)},
            "Connect": {"timeout": duration(5)},
        }.items():
            with pytest.raises(SandboxNotFound, match=rf'Sandbox "{made.id}" doesn\'t exist or you don\'t have access'):
                await owner.call(method, id=made.id, **fields)
        with pytest.raises(SandboxNotFound):
            await internal.call("Locate", id=made.id)

    async def test_is_gone_for_every_question_before_it_is_destroyed(self, core, backend, world):
        # R14
        reached, go = asyncio.Event(), asyncio.Event()

        async def wait(_):
            reached.set()
            await go.wait()

        backend.destroying = wait
        made = await core.owner.create()
        kill = asyncio.create_task(core.owner.call("Kill", id=made.id))
        await reached.wait()
        assert made.id in world.boxes
        with pytest.raises(SandboxNotFound):
            await core.internal.call("Locate", id=made.id)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("Get", id=made.id)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("SetTimeout", id=made.id, timeout=duration(60))
        # C43
        with pytest.raises(Conflict):
            await core.owner.call("Connect", id=made.id, timeout=duration(60))
        assert await core.owner.ids() == []
        go.set()
        await kill

    async def test_kills_at_the_same_time_end_it_once(self, core, world):
        # C35
        made = await core.owner.create()
        owner = core.owner
        outcomes = await asyncio.gather(*(owner.call("Kill", id=made.id) for _ in range(8)), return_exceptions=True)
        assert all(not isinstance(o, Exception) or isinstance(o, SandboxNotFound) for o in outcomes)
        assert any(not isinstance(o, Exception) for o in outcomes)
        assert world.destroyed == [made.id]

    async def test_cancelled_kill_runs_to_its_end(self, core, backend, world, until):
        reached, go = asyncio.Event(), asyncio.Event()

        async def wait(_):
            reached.set()
            await go.wait()

        backend.destroying = wait
        made = await core.owner.create()
        kill = asyncio.create_task(core.owner.call("Kill", id=made.id))
        await reached.wait()
        kill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await kill
        go.set()
        await until(lambda: not world.boxes)

    async def test_waits_for_a_create_that_is_under_way(self, core, backend, world):
        # C37: never 204 and a sandbox left running
        reached, go = asyncio.Event(), asyncio.Event()
        names = []

        async def wait(sandbox_id):
            names.append(sandbox_id)
            reached.set()
            await go.wait()

        backend.created = wait
        create = asyncio.create_task(core.owner.create())
        await reached.wait()
        kill = asyncio.create_task(core.owner.call("Kill", id=names[0]))
        await asyncio.sleep(0.05)
        assert not kill.done()
        go.set()
        await asyncio.gather(create, kill)
        assert not world.boxes
        assert await core.owner.ids() == []

    async def test_failed_destroy_is_repeated_until_nothing_is_left(self, core, backend, world, until, deployment):
        attempts, requests = [], []

        async def fail_once(sandbox_id):
            attempts.append(sandbox_id)
            requests.append(structlog.contextvars.get_contextvars().get("request_id"))
            if len(attempts) == 1:
                raise OSError("busy")

        backend.destroying = fail_once
        made = await core.owner.create()
        with pytest.raises(Unavailable, match="keeps trying"):
            await core.owner.call("Kill", id=made.id)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("Get", id=made.id)
        assert (await records_of(deployment))[made.id] == "killing"
        await until(lambda: not world.boxes)
        assert len(attempts) == 2
        # The kill was answered long ago: what comes later is not logged as part of it.
        assert requests[0]
        assert requests[1] is None

    @pytest.mark.parametrize("written", ["", "../x", "I", "i" * 65, "a b", "ä", "-x", "i\n", "a_b", "a-b c"])
    async def test_malformed_id_is_refused_everywhere(self, core, written):
        # C16
        for client, method, fields in [
            (core.owner, "Get", {}),
            (core.owner, "Kill", {}),
            (core.owner, "SetTimeout", {"timeout": duration(5)}),
            (core.owner, "Connect", {"timeout": duration(5)}),
            (core.internal, "Locate", {}),
        ]:
            with pytest.raises(InvalidArgument, match=r"^Invalid sandbox ID$"):
                await client.call(method, id=written, **fields)

    async def test_id_may_carry_a_client_id(self, core):
        # C4
        made = await core.owner.create()
        assert (await core.owner.call("Get", id=f"{made.id}-local")).sandbox.id == made.id


class TestTimeout:
    async def test_sets_the_end_earlier_or_later(self, core):
        # C28
        made = await core.owner.create(timeout=300)
        for seconds in (600, 60):
            answer = await core.owner.call("SetTimeout", id=made.id, timeout=duration(seconds))
            assert abs(end_of(answer) - time.time() - seconds) < 10
            assert (await core.owner.call("Get", id=made.id)).sandbox.end_at == answer.end_at

    async def test_refresh_only_extends(self, core):
        # C32
        made = await core.owner.create(timeout=300)
        answer = await core.owner.call("SetTimeout", id=made.id, timeout=duration(10), extend_only=True)
        assert answer.end_at == made.end_at
        answer = await core.owner.call("SetTimeout", id=made.id, timeout=duration(600), extend_only=True)
        assert end_of(answer) > end_of(made)

    async def test_beyond_the_longest_life_is_cut_to_it(self, deployment):
        # C30
        async with deployment.core(max_timeout=600) as core:
            made = await core.owner.create(timeout=300)
            for seconds in (601, 3e11):
                answer = await core.owner.call("SetTimeout", id=made.id, timeout=duration(seconds))
                assert end_of(answer) - made.started_at.ToMicroseconds() / 1e6 == 600

    @pytest.mark.parametrize("seconds", [0, -100])
    async def test_zero_or_less_is_due_at_once(self, core, world, until, seconds):
        # C29
        made = await core.owner.create(timeout=300)
        await core.owner.call("SetTimeout", id=made.id, timeout=duration(seconds))
        await until(lambda: not world.boxes)

    async def test_missing_timeout_does_not_end_the_sandbox(self, core, world):
        made = await core.owner.create()
        with pytest.raises(InvalidArgument):
            await core.owner.call("SetTimeout", id=made.id)
        assert made.id in world.boxes

    async def test_sandbox_ends_at_its_deadline(self, core, world, until):
        # C33
        made = await core.owner.create(timeout=1)
        await until(lambda: not world.boxes)
        assert time.time() >= end_of(made)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("Get", id=made.id)

    async def test_extended_in_time_it_lives_on(self, core, world):
        made = await core.owner.create(timeout=3)
        await core.owner.call("SetTimeout", id=made.id, timeout=duration(60))
        await asyncio.sleep(3.2)
        assert made.id in world.boxes

    async def test_extended_while_its_end_is_being_acted_on_it_lives_on(self, sandboxes, world, until):
        caller = Caller(owner="o")
        made = await sandboxes.create(CreateSpec(template="base", timeout=60_000_000), caller)
        live = sandboxes._table.get(made.id)
        async with live.lock:
            extended = asyncio.create_task(
                sandboxes.set_timeout(made.id, caller, timeout=90_000_000, extend_only=False)
            )
            await asyncio.sleep(0.01)
            # The timer fires for the old end and queues behind the change that is waiting for the lock.
            sandboxes._expired(made.id)
            await asyncio.sleep(0.01)
        end = (await extended).end_at
        await sandboxes._errands.close(patience=20)
        assert made.id in world.boxes
        assert (await sandboxes.questions.get(made.id, caller)).end_at == end

    async def test_deadline_holds_where_the_store_fails_just_then_and_a_snapshot_had_not_been_put_right(
        self, sandboxes, world, until, monkeypatch
    ):
        monkeypatch.setattr("sandgate_core.lifetimes._RETRY", 50_000)
        made = await sandboxes.create(CreateSpec(template="base", timeout=1_000_000), Caller(owner="o"))
        live = sandboxes._table.get(made.id)
        async with live.lock:
            await sandboxes._table.move(live, State.SNAPSHOTTING, note="snapshot")
        failures = iter([OSError("disk"), OSError("disk")])
        move = Store.move

        async def fail(store, *arguments, **options):
            for failure in failures:
                raise failure
            await move(store, *arguments, **options)

        monkeypatch.setattr(Store, "move", fail)
        await until(lambda: not world.boxes)

    async def test_nothing_but_a_timeout_moves_the_end(self, core):
        made = await core.owner.create()
        for _ in range(5):
            await core.owner.call("Get", id=made.id)
            await core.internal.call("Locate", id=made.id)
            await core.owner.ids()
        assert (await core.owner.call("Get", id=made.id)).sandbox.end_at == made.end_at


class TestConnect:
    async def test_never_shortens_and_may_extend(self, core):
        # C42, C44
        made = await core.owner.create(timeout=300, secure=True)
        shorter = await core.owner.call("Connect", id=made.id, timeout=duration(60))
        assert not shorter.resumed
        assert shorter.sandbox == made
        longer = (await core.owner.call("Connect", id=made.id, timeout=duration(1200))).sandbox
        assert abs(end_of(longer) - time.time() - 1200) < 10

    @pytest.mark.parametrize("seconds", [86_401, 0, 0.5, -1])
    async def test_bad_timeout_is_told_before_existence(self, core, seconds):
        # C43
        with pytest.raises(InvalidArgument, match="timeout"):
            await core.owner.call("Connect", id="inobody", timeout=duration(seconds))


class TestCallers:
    @pytest.mark.parametrize(
        "credentials",
        [
            [],
            [("api-key", "e2b_" + "f" * 40)],
            [("api-key", "")],
            [("api-key", "x" * 5000)],
            [("internal-token", "wrong")],
            [("internal-token", "")],
        ],
    )
    async def test_missing_and_wrong_credentials_are_answered_alike(self, core, credentials):
        # S12
        for method in ("List", "ListKeys"):
            with pytest.raises(Unauthenticated, match=r"^the API key is missing or not valid$"):
                await core.client(*credentials).call(method)

    async def test_every_credential_given_must_be_right(self, core):
        (key,), (token,) = core.owner.credentials, core.internal.credentials
        wrong = ("api-key", "e2b_" + "f" * 40)
        for credentials in ([token, wrong], [("internal-token", "no"), key], [key, wrong]):
            with pytest.raises(Unauthenticated):
                await core.client(*credentials).call("List")

    async def test_sandbox_of_another_owner_does_not_exist(self, core, world):
        made = await core.owner.create()
        secret = (await core.internal.call("CreateKey", name="other", owner="other", create_team=True)).secret
        other = core.client(("api-key", secret))
        assert await other.ids() == []
        for method, fields in {
            "Get": {},
            "Kill": {},
            "SetTimeout": {"timeout": duration(5)},
            "Connect": {"timeout": duration(5)},
        }.items():
            with pytest.raises(SandboxNotFound):
                await other.call(method, id=made.id, **fields)
        assert made.id in world.boxes
        assert await core.internal.ids() == [made.id]

    async def test_only_the_gateway_may_locate_and_manage_keys(self, core):
        made = await core.owner.create()
        for method, fields in {
            "Locate": {"id": made.id},
            "CreateKey": {"name": "x"},
            "ListKeys": {},
            "RevokeKey": {"id": "x"},
        }.items():
            with pytest.raises(PermissionDenied):
                await core.owner.call(method, **fields)


class TestTokens:
    async def test_only_a_secured_sandbox_has_a_token_and_it_is_stable(self, core):
        # S9, S10, S11
        first, second = await core.owner.create(secure=True), await core.owner.create(secure=True)
        opened = await core.owner.create()
        assert opened.access_token == ""
        assert first.access_token
        assert first.access_token != second.access_token
        assert (await core.owner.call("Get", id=first.id)).sandbox.access_token == first.access_token
        assert (await core.internal.call("Locate", id=first.id)).sandbox.access_token == first.access_token


class TestLost:
    async def test_sandbox_that_died_is_unknown_once_somebody_noticed(self, core, world):
        made = await core.owner.create()
        await world.lose(made.id)
        with pytest.raises(SandboxNotFound):
            await core.internal.call("Locate", id=made.id, agent_lost=True)
        with pytest.raises(SandboxNotFound):
            await core.owner.call("Get", id=made.id)

    async def test_sandbox_that_is_there_is_answered_as_before(self, core):
        made = await core.owner.create()
        assert (await core.internal.call("Locate", id=made.id, agent_lost=True)).sandbox.id == made.id


async def test_history_keeps_the_last_hundred_changes(deployment):
    from dataclasses import replace

    from sandgate_core.records import SandboxRecord
    from sandgate_core.states import State
    from sandgate_plugin_api import Resources

    store = await Store.open(url=deployment.database, state_dir=deployment.folder)
    record = SandboxRecord(
        id="i1", owner="o", backend="b", template_id="t", alias="", state=State.CREATING, created_at=1, timeout=1,
        resources=Resources(cpu_count=1, memory_mb=1, disk_size_mb=1), handle={},
    )  # fmt: skip
    await store.add(record, note="create")
    for number in range(1, 151):
        after = replace(record, revision=number, state=State.PAUSED if number % 2 else State.RUNNING)
        await store.move(after, came_from=record.state, note=str(number))
        record = after
    history = await store.history("i1")
    assert [change.note for change in history] == [str(number) for number in range(51, 151)]
    await store.close()
