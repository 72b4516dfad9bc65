"""Finding the sandbox that a signed URL is for, when nothing else names it (behaviour.md S8, S11)."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

import pytest

from sandgate_core.token_search import TokenSearch
from sandgate_core.tokens import Tokens
from sandgate_errors import PermissionDenied, Unauthenticated


def hashed(token: str) -> dict[str, bytes]:
    return {"before": b"a:", "after": b":z", "sha256": hashlib.sha256(b"a:" + token.encode() + b":z").digest()}


async def test_each_token_finds_its_own_sandbox(core: Any) -> None:
    boxes = [await core.owner.create(secure=True) for _ in range(3)]
    for box in boxes:
        assert (await core.internal.call("FindByTokenHash", **hashed(box.access_token))).id == box.id


@pytest.mark.parametrize("changed", ["before", "after", "sha256"])
async def test_anything_else_finds_nothing(core: Any, changed: str) -> None:
    box = await core.owner.create(secure=True)
    for value in (b"", b"x" * 32, b"x" * 100_000):
        with pytest.raises(Unauthenticated, match=r"^invalid signature$"):
            await core.internal.call("FindByTokenHash", **{**hashed(box.access_token), changed: value})


async def test_sandboxes_that_are_open_or_gone_are_not_found(core: Any) -> None:
    """An unsecured sandbox has no token: the empty one must not open it."""
    await core.owner.create(secure=False)
    with pytest.raises(Unauthenticated):
        await core.internal.call("FindByTokenHash", **hashed(""))
    box = await core.owner.create(secure=True)
    await core.owner.call("Kill", id=box.id)
    with pytest.raises(Unauthenticated):
        await core.internal.call("FindByTokenHash", **hashed(box.access_token))


async def test_only_the_gateway_itself_may_search(core: Any) -> None:
    box = await core.owner.create(secure=True)
    with pytest.raises(PermissionDenied):
        await core.owner.call("FindByTokenHash", **hashed(box.access_token))


@dataclass
class Candidate:
    """What the search reads of a record."""

    id: str
    token_version: int = 1


async def test_a_search_lets_others_run_between_its_slices() -> None:
    """However many are made up at once: none holds the loop for the length of a search."""
    tokens = Tokens(b"seed" * 8)
    search = TokenSearch(tokens)
    candidates: Any = [Candidate(f"i{number:020d}") for number in range(5000)]
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    watching = asyncio.create_task(other())
    try:
        with pytest.raises(Unauthenticated):
            await search.find(candidates, before=b"", after=b"", sha256=b"x" * 32)
        assert turns >= 5000 // 128
        last = tokens.token_of(candidates[-1].id, version=1)
        assert await search.find(candidates, **hashed(last)) == candidates[-1].id
    finally:
        watching.cancel()


async def test_cancelled_search_leaves_its_turn_to_the_next() -> None:
    search = TokenSearch(Tokens(b"seed" * 8))
    candidates: Any = [Candidate(f"i{number:020d}") for number in range(5000)]
    searching = asyncio.create_task(search.find(candidates, before=b"", after=b"", sha256=b"x" * 32))
    await asyncio.sleep(0)
    searching.cancel()
    with pytest.raises(Unauthenticated):
        await search.find(candidates, before=b"", after=b"", sha256=b"x" * 32)
    assert searching.cancelled()
