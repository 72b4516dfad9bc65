"""What a client may write into a create: metadata that only labels, and the name of what is made."""

from __future__ import annotations

import pytest

from sandgate_errors import AlreadyExists, InvalidArgument
from sandgate_plugin_api.backend import Backend
from sandgate_plugin_api.testsuite.box import made, request_for
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio

_METADATA = {
    "": "",
    "a=b,c": "line\nline",
    "quote'\"$(id)`id`": "\\",
    "é" * 300: "x" * 20_000,
    "nothing": "\0",
    "sandgate.gateway": "another",
}


async def test_metadata_is_never_a_reason_to_fail(deployment: Deployment, backend: Backend) -> None:
    """It is the client's own text, and may be any."""
    async with made(deployment, backend, metadata=_METADATA) as box:
        assert (await box.run("echo works")).text() == "works"
        assert [survivor.sandbox_id for survivor in await backend.survey()] == [box.request.sandbox_id]


async def test_name_that_cannot_be_one_is_refused_or_left(deployment: Deployment, backend: Backend) -> None:
    """Refused before the sandbox is admitted, or what comes of it is a whole one."""
    for name in ("../up", "a b", "-rf", "a\0b", "é", "x" * 5000):
        request = await request_for(deployment, backend, name=name)
        try:
            reserved = backend.reserve(request)
        except InvalidArgument:
            continue
        try:
            placement = await backend.create(request, reserved)
        except InvalidArgument:
            pytest.fail(f"{name[:20]!a}: reserve() is to refuse a name that cannot be one, and create() did")
        await backend.destroy(placement.handle)
    assert list(await backend.survey()) == []


async def test_name_that_is_taken_is_refused_and_its_sandbox_stays(deployment: Deployment, backend: Backend) -> None:
    name = f"suite-{deployment.new_id()}"
    async with made(deployment, backend, name=name) as first:
        second = await request_for(deployment, backend, name=name)
        reserved = backend.reserve(second)
        try:
            placement = await backend.create(second, reserved)
        except AlreadyExists:
            # As the core does for whatever has failed.
            await backend.destroy(reserved)
        else:
            # A backend without names has left it.
            assert sorted(survivor.sandbox_id for survivor in await backend.survey()) == sorted(
                (first.request.sandbox_id, second.sandbox_id)
            )
            await backend.destroy(placement.handle)
        assert (await first.run("echo still here")).text() == "still here"
        assert [survivor.sandbox_id for survivor in await backend.survey()] == [first.request.sandbox_id]
    # It is free again.
    async with made(deployment, backend, name=name) as third:
        assert (await third.run("echo works")).text() == "works"
