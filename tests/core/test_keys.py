"""API keys: made, recognised, revoked; the first one; what is stored."""

from __future__ import annotations

import re

import pytest

from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unauthenticated


async def test_made_key_works_until_it_is_revoked(deployment, folder):
    async with deployment.core() as core:
        internal = core.internal
        answer = await internal.call("CreateKey", name="ci", owner="team", create_team=True)
        assert re.fullmatch(r"e2b_[0-9a-f]{40}", answer.secret)
        assert answer.secret.startswith(answer.key.prefix)
        assert (answer.key.name, answer.key.owner) == ("ci", "team")
        client = core.client(("api-key", answer.secret))
        await client.call("List")
        assert answer.key.id in [key.id for key in (await internal.call("ListKeys")).keys]
    async with deployment.core() as core:
        client, internal = core.client(("api-key", answer.secret)), core.internal
        await client.call("List")
        await internal.call("RevokeKey", id=answer.key.id)
        with pytest.raises(Unauthenticated):
            await client.call("List")
        assert answer.key.id not in [key.id for key in (await internal.call("ListKeys")).keys]
        with pytest.raises(NotFound):
            await internal.call("RevokeKey", id=answer.key.id)
    async with deployment.core() as core:
        with pytest.raises(Unauthenticated):
            await core.client(("api-key", answer.secret)).call("List")


async def test_no_secret_is_stored(deployment, folder):
    async with deployment.core() as core:
        secret = (await core.internal.call("CreateKey", name="x")).secret
        made = await core.owner.create(secure=True)
    stored = b"".join(path.read_bytes() for path in folder.glob("sandgate.db*"))
    for table in ("sandboxes", "transitions", "api_keys", "meta"):
        stored += repr(await deployment.sql(f"SELECT * FROM {table}")).encode()
    assert made.id.encode() in stored
    for text in (secret, core_key(), made.access_token, deployment.settings().seed.get_secret_value()):
        assert text.encode() not in stored


def core_key() -> str:
    return "e2b_" + "0123456789" * 4


@pytest.mark.parametrize(
    "fields", [{"owner": "a b"}, {"owner": "x" * 65}, {"owner": "-x"}, {"name": "x" * 101}, {"name": "a\nb"}]
)
async def test_bad_name_or_owner_is_refused(core, fields):
    with pytest.raises(InvalidArgument):
        await core.internal.call("CreateKey", **fields)


async def test_unknown_key_cannot_be_revoked(core):
    with pytest.raises(NotFound):
        await core.internal.call("RevokeKey", id="nobody")


async def test_given_key_is_added_once_and_again_beside_others(deployment):
    async with deployment.core() as core:
        assert core.first_key_created
    async with deployment.core() as core:
        assert not core.first_key_created
    other = "e2b_" + "ab" * 20
    async with deployment.core(first_key=other) as core:
        assert core.first_key_created
        await core.owner.call("List")
        await core.client(("api-key", other)).call("List")


async def test_candidate_is_added_to_an_empty_store_only(deployment):
    candidate, later = "e2b_" + "ab" * 20, "e2b_" + "cd" * 20
    async with deployment.core(first_key=candidate, first_key_given=False) as core:
        assert core.first_key_created
        await core.client(("api-key", candidate)).call("List")
    async with deployment.core(first_key=later, first_key_given=False) as core:
        assert not core.first_key_created
        with pytest.raises(Unauthenticated):
            await core.client(("api-key", later)).call("List")


async def test_without_a_first_key_none_is_made(deployment):
    async with deployment.core(first_key=None, first_key_given=False) as core:
        assert not core.first_key_created
        assert not (await core.internal.call("ListKeys")).keys


async def test_revoked_key_does_not_come_back_by_being_given_again(deployment):
    async with deployment.core() as core:
        (key,) = (await core.internal.call("ListKeys")).keys
        assert key.name == "first"
        await core.internal.call("RevokeKey", id=key.id)
    with pytest.raises(FailedPrecondition, match="has been revoked"):
        async with deployment.core():
            pass
    # As a mere candidate it is no error, and no key either: the store is not empty.
    async with deployment.core(first_key_given=False) as core:
        assert not core.first_key_created
        with pytest.raises(Unauthenticated):
            await core.owner.call("List")


@pytest.mark.parametrize("key", ["", "e2b_", "e2b_" + "A" * 40, "e2b_" + "a" * 39, "x" * 44])
async def test_malformed_first_key_stops_the_start(deployment, key):
    with pytest.raises(FailedPrecondition, match="40 lower-case hexadecimal digits"):
        async with deployment.core(first_key=key):
            pass


async def test_last_use_of_a_key_is_kept(deployment):
    async with deployment.core() as core:
        secret = (await core.internal.call("CreateKey", name="x")).secret
        (unused,) = [key for key in (await core.internal.call("ListKeys")).keys if key.name == "x"]
        assert not unused.HasField("last_used_at")
        client = core.client(("api-key", secret))
        await client.call("List")
        (used,) = [key for key in (await core.internal.call("ListKeys")).keys if key.name == "x"]
        assert used.last_used_at.ToMicroseconds() >= used.created_at.ToMicroseconds()
        await client.call("List")
    async with deployment.core() as core:
        # Once a minute: the second call within it changed nothing.
        assert used in (await core.internal.call("ListKeys")).keys


async def test_key_is_renamed_and_one_team_has_no_say_over_anothers(core):
    key = (await core.internal.call("CreateKey", name="old", owner="a", create_team=True)).key
    for method, fields in (("RenameKey", {"name": "x"}), ("RevokeKey", {})):
        with pytest.raises(NotFound):
            await core.internal.call(method, id=key.id, owner="b", **fields)
        with pytest.raises(PermissionDenied):
            await core.owner.call(method, id=key.id, **fields)
    assert (await core.internal.call("RenameKey", id=key.id, name="new", owner="a")).key.name == "new"
    assert [key.name for key in (await core.internal.call("ListKeys", owner="a")).keys] == ["new"]
    with pytest.raises(InvalidArgument):
        await core.internal.call("RenameKey", id=key.id, name="a\nb")
