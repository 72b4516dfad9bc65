"""Network rules: what is accepted, what a backend is told, and how they are changed (behaviour.md C54, C55)."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core.egress import check_rules, egress_of, needed_for
from sandgate_core.records import NetworkRules
from sandgate_errors import (
    CapabilityMissing,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SandboxNotFound,
    Unavailable,
)
from sandgate_plugin_api import Capability, Egress

EVERYTHING = ("0.0.0.0/0", "::/0")


@pytest.mark.parametrize(
    ("allow", "deny", "internet", "named"),
    [
        ([], ["example.org"], True, "denyOut"),
        ([], ["*"], True, "denyOut"),
        ([], [""], True, "denyOut"),
        ([], ["1.2.3.4/33"], True, "denyOut"),
        ([], ["fe80::1%eth0"], True, "denyOut"),
        ([], ["1.2.3.4:80"], True, "denyOut"),
        (["example.org"], [], True, "0.0.0.0/0"),
        (["*.example.org"], ["10.0.0.0/8"], True, "0.0.0.0/0"),
        (["exa mple.org"], ["0.0.0.0/0"], True, "allowOut"),
        (["300.1.1.1"], ["0.0.0.0/0"], True, "allowOut"),
        (["http://example.org"], ["0.0.0.0/0"], True, "allowOut"),
        (["a.*.org"], ["0.0.0.0/0"], True, "allowOut"),
        (["x" * 64 + ".org"], ["0.0.0.0/0"], True, "allowOut"),
        (["1.1.1.1"] * 257, [], True, "allowOut .* 256"),
        ([], ["1.1.1.1"] * 257, True, "denyOut .* 256"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(allow, deny, internet, named):
    with pytest.raises(InvalidArgument, match=named):
        check_rules(allow=allow, deny=deny, internet=internet)


@pytest.mark.parametrize(
    ("allow", "deny", "internet"),
    [
        ([], [], True),
        (["1.1.1.1", "10.0.0.0/8", "2001:db8::/32"], [], True),
        (["example.org", "*.Example.ORG", "localhost"], ["0.0.0.0/0"], True),
        # The switch is the same as to deny all.
        (["example.org"], [], False),
        ([], ["10.0.0.1/8", "::1"], True),
    ],
)
def test_rules_that_can_be_kept_are_accepted(allow, deny, internet):
    check_rules(allow=allow, deny=deny, internet=internet)


@pytest.mark.parametrize(
    ("allow", "deny", "internet", "told", "needed"),
    [
        ((), (), True, Egress(), None),
        # To allow something where nothing is denied changes nothing.
        (("1.1.1.1",), (), True, Egress(), None),
        ((), (), False, Egress(internet=False), Capability.NO_INTERNET),
        ((), ("0.0.0.0/0",), True, Egress(internet=False), Capability.NO_INTERNET),
        ((), ("10.0.0.1/8",), True, Egress(deny=("10.0.0.0/8",)), Capability.NETWORK_RULES),
        (("1.1.1.1",), (), False, Egress(allow=("1.1.1.1/32",), deny=EVERYTHING), Capability.NETWORK_RULES),
        (
            ("Example.org.", "1.1.1.1"),
            ("0.0.0.0/0",),
            True,
            Egress(allow=("example.org", "1.1.1.1/32"), deny=EVERYTHING),
            Capability.NETWORK_RULES,
        ),
    ],
)
def test_backend_is_told_the_same_for_the_same_rules(allow, deny, internet, told, needed):
    found = egress_of(NetworkRules(allow_out=allow, deny_out=deny), internet=internet)
    assert found == told
    assert needed_for(found) is needed


@pytest.fixture
def backend(deployment, make_backend):
    """Notes the rules of its sandboxes; ``updating`` runs inside and may wait or raise."""

    class RulesBackend(make_backend):
        capabilities = make_backend.capabilities | {Capability.NETWORK_RULES, Capability.PAUSE}

        def __init__(self, world):
            super().__init__(world)
            self.rules = {}
            self.updating = _nothing

        async def create(self, request, handle):
            self.rules[request.sandbox_id] = request.egress
            assert request.allow_internet_access is request.egress.internet
            return await super().create(request, handle)

        async def update_egress(self, handle, egress):
            self._box(handle)
            await self.updating(egress)
            self.rules[handle["id"]] = egress

    deployment.backend = RulesBackend(deployment.world)
    return deployment.backend


async def _nothing(_):
    pass


@pytest.fixture
async def core(deployment, backend):
    async with deployment.core() as running:
        yield running


def rules(**fields):
    return sandboxes_pb2.NetworkRules(**fields)


async def test_rules_of_a_create_reach_the_backend_and_are_shown_as_written(core, backend):
    asked = rules(allow_out=["Example.org"], deny_out=["0.0.0.0/0"])
    box = await core.owner.create(network=asked)
    assert backend.rules[box.id] == Egress(allow=("example.org",), deny=EVERYTHING)
    assert (await core.owner.call("Get", id=box.id)).sandbox.network == asked
    with pytest.raises(InvalidArgument, match="denyOut"):
        await core.owner.create(network=rules(deny_out=["example.org"]))
    with pytest.raises(InvalidArgument, match=r"0\.0\.0\.0/0"):
        await core.owner.create(network=rules(allow_out=["example.org"]))


async def test_change_replaces_all_rules_and_keeps_who_may_come_in(core, backend, deployment):
    """What is left out is cleared (C55); rules about requests to ports are no part of it."""
    inward = {"allow_public_traffic": False, "mask_request_host": "host:${PORT}"}
    box = await core.owner.create(secure=True, network=rules(deny_out=["10.0.0.0/8"], **inward))
    await core.owner.call("UpdateNetwork", id=box.id, allow_out=["1.1.1.1"], deny_out=["0.0.0.0/0"])
    assert backend.rules[box.id] == Egress(allow=("1.1.1.1/32",), deny=EVERYTHING)
    shown = (await core.owner.call("Get", id=box.id)).sandbox
    assert shown.network == rules(allow_out=["1.1.1.1"], deny_out=["0.0.0.0/0"], **inward)
    await core.owner.call("UpdateNetwork", id=box.id, allow_internet_access=False)
    assert backend.rules[box.id] == Egress(internet=False)
    assert not (await core.owner.call("Get", id=box.id)).sandbox.allow_internet_access
    answer = await core.owner.call("UpdateNetwork", id=box.id)
    assert backend.rules[box.id] == Egress()
    assert answer.sandbox.allow_internet_access
    assert answer.sandbox.network == rules(**inward)
    assert await deployment.sql("SELECT COUNT(*) FROM sandboxes WHERE egress_pending") == [(0,)]


async def test_rules_of_a_paused_sandbox_can_be_changed_and_stay(core, backend):
    box = await core.owner.create()
    await core.owner.call("Pause", id=box.id)
    await core.owner.call("UpdateNetwork", id=box.id, deny_out=["10.0.0.0/8"])
    await core.owner.call("Connect", id=box.id, timeout=Duration(seconds=60))
    assert backend.rules[box.id] == Egress(deny=("10.0.0.0/8",))
    assert list((await core.owner.call("Get", id=box.id)).sandbox.network.deny_out) == ["10.0.0.0/8"]


async def test_bad_unknown_and_other_teams_changes_are_refused(core, backend, world):
    box = await core.owner.create()
    with pytest.raises(InvalidArgument):
        await core.owner.call("UpdateNetwork", id=box.id, deny_out=["example.org"])
    with pytest.raises(SandboxNotFound):
        await core.owner.call("UpdateNetwork", id="i" + "0" * 20)
    await world.lose(box.id)
    with pytest.raises(SandboxNotFound):
        await core.owner.call("UpdateNetwork", id=box.id, deny_out=["10.0.0.0/8"])
    assert await core.owner.ids() == []


async def test_backend_that_refuses_leaves_the_rules_as_they_were(core, backend):
    async def refuse(_):
        raise Unavailable("not now")

    box = await core.owner.create(network=rules(deny_out=["10.0.0.0/8"]))
    backend.updating = refuse
    with pytest.raises(Unavailable):
        await core.owner.call("UpdateNetwork", id=box.id)
    assert list((await core.owner.call("Get", id=box.id)).sandbox.network.deny_out) == ["10.0.0.0/8"]


async def test_change_that_a_crash_cut_off_is_made_at_the_next_start(deployment, backend, until):
    """As the store stands when the core goes down between its write and the backend's answer."""
    async with deployment.core() as core:
        box = await core.owner.create(network=rules(deny_out=["10.0.0.0/8"]))
    backend.rules[box.id] = Egress()
    await deployment.sql("UPDATE sandboxes SET egress_pending = TRUE")
    async with deployment.core() as core:
        await until(lambda: backend.rules[box.id] == Egress(deny=("10.0.0.0/8",)))
        await core.owner.call("Get", id=box.id)
    assert await deployment.sql("SELECT COUNT(*) FROM sandboxes WHERE egress_pending") == [(0,)]


async def test_the_same_in_other_words_needs_nothing_of_the_backend(deployment, make_backend):
    deployment.backend = make_backend(deployment.world)
    async with deployment.core() as core:
        box = await core.owner.create()
        answer = await core.owner.call("UpdateNetwork", id=box.id, allow_out=["1.1.1.1"])
        assert list(answer.sandbox.network.allow_out) == ["1.1.1.1"]
        with pytest.raises(CapabilityMissing, match="'local' does not offer network rules"):
            await core.owner.call("UpdateNetwork", id=box.id, deny_out=["10.0.0.0/8"])
        closed = await core.owner.create(network=rules(deny_out=["0.0.0.0/0"]))
        assert deployment.backend.requests[-1].egress == Egress(internet=False)
        assert not deployment.backend.requests[-1].allow_internet_access
        assert list((await core.owner.call("Get", id=closed.id)).sandbox.network.deny_out) == ["0.0.0.0/0"]


async def test_change_waits_for_what_is_under_way(core, backend, until):
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_):
        reached.set()
        await go_on.wait()

    box = await core.owner.create()
    backend.updating = hold
    first = asyncio.create_task(core.owner.call("UpdateNetwork", id=box.id, deny_out=["10.0.0.0/8"]))
    await reached.wait()
    backend.updating = _nothing
    second = asyncio.create_task(core.owner.call("UpdateNetwork", id=box.id, deny_out=["11.0.0.0/8"]))
    await asyncio.sleep(0.1)
    go_on.set()
    await first
    await second
    assert backend.rules[box.id] == Egress(deny=("11.0.0.0/8",))


class TestFork:
    """C50, as far as it is without a backend that offers it: what is refused, and in which order."""

    async def fork(self, client, sandbox_id, *, count=1, timeout=60):
        return await client.call("Fork", id=sandbox_id, count=count, timeout=Duration(seconds=timeout))

    @pytest.mark.parametrize("count", [0, -1, 101])
    async def test_count_is_looked_at_first(self, core, backend, count):
        with pytest.raises(InvalidArgument, match="1 to 100"):
            await self.fork(core.owner, "i" + "0" * 20, count=count)

    async def test_then_the_sandbox_its_state_and_its_backend(self, core, backend):
        with pytest.raises(InvalidArgument, match="timeout"):
            await self.fork(core.owner, "i" + "0" * 20, timeout=0)
        with pytest.raises(NotFound):
            await self.fork(core.owner, "i" + "0" * 20)
        box = await core.owner.create()
        with pytest.raises(CapabilityMissing, match="'local' does not offer fork"):
            await self.fork(core.owner, box.id, count=100)
        await core.owner.call("Pause", id=box.id)
        with pytest.raises(FailedPrecondition, match="paused"):
            await self.fork(core.owner, box.id)
