"""The audit: what is noted, with whom and which outcome, and for how long."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_core import audit as module
from sandgate_core import clock
from sandgate_core.audit import ACTIONS
from sandgate_core.store import Store
from sandgate_errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated


async def entries(core, **filters):
    return (await core.internal.call("ListAudit", **filters)).entries


def summary(found):
    return [(entry.action, entry.subject, entry.outcome) for entry in reversed(found)]


async def test_every_change_is_noted_with_who_asked_and_what_came_of_it(core):
    made = await core.owner.create()
    await core.owner.call("SetTimeout", id=made.id, timeout=Duration(seconds=60))
    await core.owner.call("List")
    await core.owner.call("Kill", id=made.id)
    with pytest.raises(NotFound):
        await core.owner.call("Kill", id=made.id)
    found = await entries(core)
    assert summary(found) == [
        ("sandbox.create", made.id, "OK"),
        ("sandbox.timeout", made.id, "OK"),
        ("sandbox.kill", made.id, "OK"),
        ("sandbox.kill", made.id, "NOT_FOUND"),
    ]
    assert {(entry.team, entry.key_name, bool(entry.key_id)) for entry in found} == {("default", "first", True)}
    assert all(entry.request_id for entry in found)
    assert all(abs(entry.time.ToMicroseconds() - clock.now()) < 60 * clock.MICROSECONDS for entry in found)


async def test_keys_and_teams_are_noted_too(core):
    await core.internal.call("CreateTeam", id="lab")
    key = (await core.internal.call("CreateKey", name="x", owner="lab")).key
    await core.internal.call("RenameKey", id=key.id, name="y")
    await core.internal.call("RevokeKey", id=key.id)
    found = await entries(core)
    assert summary(found) == [
        ("team.create", "lab", "OK"),
        ("key.create", key.id, "OK"),
        ("key.rename", key.id, "OK"),
        ("key.revoke", key.id, "OK"),
    ]
    assert {(entry.team, entry.key_id) for entry in found} == {("", "")}


async def test_reader_waits_for_entries_that_are_being_written(core, monkeypatch):
    begun, write = asyncio.Event(), Store.add_audit

    async def slow(store, rows):
        begun.set()
        await asyncio.sleep(0.2)
        await write(store, rows)

    monkeypatch.setattr(Store, "add_audit", slow)
    await core.internal.call("CreateTeam", id="lab")
    async with asyncio.timeout(20):
        await begun.wait()
    assert summary(await entries(core)) == [("team.create", "lab", "OK")]


async def test_request_id_is_the_callers(core):
    client = core.client(("internal-token", "internal-token-of-the-tests"), ("request-id", "r-1"))
    made = await client.create()
    assert [entry.subject for entry in await entries(core, request_id="r-1")] == [made.id]


async def test_cancelled_call_is_noted(core, backend):
    async def hang(_):
        await asyncio.Event().wait()

    backend.creating = hang
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await core.owner.create()
    async with asyncio.timeout(20):
        while not (found := await entries(core)):  # noqa: ASYNC110 - another process would look the same way
            await asyncio.sleep(0.02)
    assert summary(found) == [("sandbox.create", "", "CANCELLED")]


async def test_nobody_without_a_key_writes_into_the_audit(core):
    with pytest.raises(Unauthenticated):
        await core.client(("api-key", "e2b_" + "f" * 40)).create()
    assert not await entries(core)


async def test_hostile_subject_is_cut_and_made_printable(core):
    with pytest.raises(InvalidArgument):
        await core.owner.call("Kill", id="a\0\n\x1b[31m" + "x" * 10_000)
    ((_, subject, outcome),) = summary(await entries(core))
    assert (subject[:5], len(subject), outcome) == ("a???[", 64, "INVALID_ARGUMENT")


async def test_filters_and_pages(core):
    for number in range(3):
        await core.internal.call("CreateTeam", id=f"t{number}")
    secret = (await core.internal.call("CreateKey", name="ci", owner="t1")).secret
    made = await core.client(("api-key", secret)).create()
    for filters, subjects in (
        ({"team": "t1"}, [made.id]),
        ({"key": "ci"}, [made.id]),
        ({"action": "team"}, ["t2", "t1", "t0"]),
        ({"action": "team.create", "subject": "t1"}, ["t1"]),
        ({"action": "tea"}, []),
        ({"action": "%"}, []),
        ({"outcome": "NOT_FOUND"}, []),
    ):
        assert [entry.subject for entry in await entries(core, **filters)] == subjects, filters
    first = await entries(core, limit=2, action="team")
    assert [entry.subject for entry in await entries(core, limit=2, action="team", before=first[-1].id)] == ["t0"]
    middle = first[-1].time
    assert [entry.subject for entry in await entries(core, action="team", since=middle)] == ["t2", "t1"]
    assert [entry.subject for entry in await entries(core, action="team", until=middle)] == ["t0"]
    with pytest.raises(InvalidArgument):
        await entries(core, limit=1001)
    with pytest.raises(PermissionDenied):
        await core.owner.call("ListAudit")


async def test_entries_outlive_the_core_and_are_forgotten_by_age(deployment):
    async with deployment.core() as core:
        await core.internal.call("CreateTeam", id="old")
        await core.internal.call("CreateTeam", id="young")
    # All that were noted are written when the core stops.
    assert len(await deployment.sql("SELECT * FROM audit")) == 2
    aged = clock.now() - 2 * 24 * 3600 * clock.MICROSECONDS
    await deployment.sql("UPDATE audit SET at = :at WHERE subject = 'old'", at=aged)
    async with deployment.core(audit_days=3) as core:
        assert len(await entries(core)) == 2
    async with deployment.core(audit_days=1) as core:
        async with asyncio.timeout(20):
            while len(found := await entries(core)) != 1:  # noqa: ASYNC110 - another process would look the same way
                await asyncio.sleep(0.02)
        assert found[0].subject == "young"


async def test_entries_wait_for_a_store_that_fails_and_then_go_to_the_log(deployment, monkeypatch, capsys):
    monkeypatch.setattr(module, "_RETRY", 0.01)
    monkeypatch.setattr(module, "_WAITING", 3)

    async def fail(*_):
        raise OSError("disk")

    async with deployment.core() as core:
        with monkeypatch.context() as patch:
            patch.setattr("sandgate_core.store.Store.add_audit", fail)
            for number in range(4):
                await core.internal.call("CreateTeam", id=f"t{number}")
                await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            while not (found := await entries(core)):  # noqa: ASYNC110 - another process would look the same way
                await asyncio.sleep(0.02)
        assert [entry.subject for entry in found] == ["t3"]
    assert "could not be stored" in capsys.readouterr().out


def test_every_method_that_changes_something_is_noted():
    from sandgate_api.core.v1 import keys_pb2, sandboxes_pb2, teams_pb2

    # Note: what somebody does in a sandbox is no change of it, and comes by the thousand.
    reading = ("Get", "List", "Locate", "Find", "Note")
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in (keys_pb2, sandboxes_pb2, teams_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.name.startswith(reading)
    }
    assert methods == ACTIONS.keys()
