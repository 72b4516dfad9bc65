"""A create that is repeated with its idempotency key (rest.md 1.4): one sandbox, whatever became of the first attempt."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from sandgate_core.store import Store
from sandgate_errors import Conflict, Internal, Unavailable

pytestmark = pytest.mark.timeout(120)


async def settled(create, *, unknown=False):
    """The first answer of a create that is not "under way" or, where ``unknown``, the refusal that nobody knows."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await create()
            except Conflict as error:
                if unknown and error.error_code == "idempotency_outcome_unknown":
                    return error
            except Unavailable:
                pass  # a machine that stood still for longer than the lease
            await asyncio.sleep(0.1)


async def cut_off(deployment, sandbox_id):
    """The sandbox's row is what a core leaves that was killed while it made it (``test_crashes.py`` kills one)."""
    await deployment.sql(
        "UPDATE sandboxes SET state = 'creating', started_at = NULL, end_at = NULL WHERE id = :id", id=sandbox_id
    )


class TestFailedAttempt:
    async def test_leaves_its_key_though_what_it_made_cannot_be_freed_yet(self, deployment, core, backend):
        async def refuse(_):
            raise Unavailable("the engine does not answer")

        backend.created = backend.destroying = refuse
        with pytest.raises(Unavailable):
            await core.owner.create(idempotency_key="k-1")
        backend.created = lambda _: asyncio.sleep(0)
        made = await core.owner.create(idempotency_key="k-1")
        assert (await core.owner.create(idempotency_key="k-1")).id == made.id
        # The first one is still there, to be freed, and nobody is shown it.
        states = await deployment.sql("SELECT state, idempotency_key FROM sandboxes ORDER BY state")
        assert states == [("creating", None), ("running", "k-1")]
        assert await core.owner.ids() == [made.id]
        backend.destroying = lambda _: asyncio.sleep(0)

    async def test_leaves_its_key_at_the_start_of_a_core_that_cannot_free_it_either(self, deployment, backend, world):
        async def refuse(_):
            raise Unavailable("the engine does not answer")

        async with deployment.core() as core:
            first = await core.owner.create(idempotency_key="k-1")
        await cut_off(deployment, first.id)
        backend.destroying = refuse
        async with deployment.core() as core:
            second = await core.owner.create(idempotency_key="k-1")
            assert second.id != first.id
            assert await core.owner.ids() == [second.id]
            backend.destroying = lambda _: asyncio.sleep(0)


class TestLostAnswerOfTheStore:
    @pytest.fixture
    def losing(self, monkeypatch):
        """The next new record is written, and the answer to that is lost."""
        add = Store.add

        async def lost(store, record, **options):
            monkeypatch.setattr(Store, "add", add)
            await add(store, record, **options)
            raise OperationalError("INSERT", {}, ConnectionResetError("connection lost"))

        monkeypatch.setattr(Store, "add", lost)

    async def test_leaves_no_record_and_the_key_to_the_next_attempt(self, deployment, core, world, losing):
        with pytest.raises((Internal, Unavailable)):
            await core.owner.create(idempotency_key="k-1")
        made = await settled(lambda: core.owner.create(idempotency_key="k-1"))
        assert await deployment.sql("SELECT id, state FROM sandboxes") == [(made.id, "running")]
        assert set(world.boxes) == {made.id}


class TestCoreThatIsAway:
    @pytest.fixture
    async def living(self, hosts):
        async with hosts[1].core(lease=2.0) as core:
            yield core

    @pytest.fixture
    async def lost(self, hosts, living):
        """A create with the key ``k-1`` that was under way on a core that has died."""
        async with hosts[0].core(lease=2.0) as dying:
            made = await dying.owner.create(idempotency_key="k-1")
        await cut_off(hosts[0], made.id)
        return made.id

    async def test_its_create_is_said_to_be_unknown_while_its_sandboxes_are_bound_to_it(self, hosts, living, lost):
        refusal = await settled(lambda: living.owner.create(idempotency_key="k-1"), unknown=True)
        assert refusal.error_code == "idempotency_outcome_unknown"
        assert (hosts[0].folder / "node").read_text().strip() in refusal.message
        assert (refusal.should_retry, refusal.retry_after) == (True, 10)
        # Another key, or none, is another create.
        assert (await settled(lambda: living.owner.create(idempotency_key="k-2"))).id != lost

    async def test_its_create_is_decided_when_it_is_back(self, hosts, living, lost):
        async with hosts[0].core(lease=2.0):
            made = await settled(lambda: living.owner.create(idempotency_key="k-1"))
            assert made.id != lost
            assert (await living.owner.create(idempotency_key="k-1")).id == made.id
        assert await hosts[0].sql("SELECT state FROM sandboxes WHERE id = :id", id=lost) == [("failed",)]


class TestCoreThatIsTakenOver:
    @pytest.fixture
    def hosts(self, hosts):
        for host in hosts:
            host.backend.host_bound = False
        return hosts

    async def test_its_create_is_made_anew_once_what_it_left_is_freed(self, hosts):
        first, second = hosts
        async with first.core(lease=2.0) as core:
            made = await core.owner.create(idempotency_key="k-1")
        await cut_off(first, made.id)
        async with second.core(lease=2.0) as living:
            fresh = await settled(lambda: living.owner.create(idempotency_key="k-1"))
            assert fresh.id != made.id
            assert await first.sql("SELECT state FROM sandboxes WHERE id = :id", id=made.id) == [("failed",)]
        assert set(first.world.boxes) == {fresh.id}
