"""Several backends in one core: which of them makes a sandbox, and what a template brings with it (C6, C24)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from sandgate_core.server import run_core
from sandgate_errors import CapabilityMissing, DeadlineExceeded, NotFound, Unavailable
from sandgate_plugin_api import Capability, Resources, Template
from tests.core.conftest import Running, World

RESOURCES = Resources(cpu_count=1, memory_mb=64, disk_size_mb=64)


@pytest.fixture
async def second(deployment, make_backend, folder):
    """Another backend: lists `base` too, and `own`; finds images by reference."""
    (folder / "2").mkdir()
    world = World(folder / "2")

    class ImageBackend(make_backend):
        name = "images"
        capabilities = frozenset({Capability.PAUSE})
        finding = None

        async def templates(self):
            return [Template(id=name, aliases=(f"{name}-alias",), resources=RESOURCES) for name in ("base", "own")]

        async def find_template(self, name):
            if self.finding is not None:
                await self.finding(name)
            if name.startswith("registry/"):
                raise NotFound(f"there is no image '{name}'")
            if ":" in name:
                return Template(id=name, resources=RESOURCES, envs={"FROM": "image", "SAME": "image"})
            return await super().find_template(name)

    yield ImageBackend(world)
    await world.close()


@pytest.fixture
def with_both(deployment, second):
    @asynccontextmanager
    async def start(**changes):
        backends = {"images": second, "local": deployment.backend}
        async with run_core(deployment.settings(**changes), backends) as core, AsyncExitStack() as stack:
            yield Running(core.targets[0], core.first_key_created, stack)

    return start


async def test_default_backend_decides_first_and_the_others_in_order(with_both):
    async with with_both() as core:
        assert (await core.owner.create(template_id="base")).backend == "local"
        assert (await core.owner.create(template_id="own")).backend == "images"
        assert (await core.owner.create(template_id="own-alias")).alias == "own-alias"
        # What only one of them has is found where it is.
        assert (await core.owner.create(template_id="default-image")).backend == "local"
        assert (await core.owner.create(template_id="base-alias")).backend == "images"


async def test_what_cannot_be_listed_is_found_by_name(with_both, second):
    async with with_both() as core:
        box = await core.owner.create(template_id="python:3.12", envs={"SAME": "create"})
        assert (box.backend, box.template_id) == ("images", "python:3.12")
        # Those of the create win.
        assert dict(second.world.boxes[box.id].agent.inits[0].envs) == {"FROM": "image", "SAME": "create"}
        assert await core.owner.ids(template="python:3.12") == [box.id]
        assert (await core.owner.call("FindTemplate", name="python:3.12")).template_id == "python:3.12"
        with pytest.raises(NotFound, match="there is no image 'registry/x'"):
            await core.owner.create(template_id="registry/x")
        with pytest.raises(NotFound, match="template 'nothing' not found"):
            await core.owner.create(template_id="nothing")


async def test_listing_sandboxes_looks_for_no_image(with_both, second):
    async def fail(_):
        raise AssertionError("a list must not fetch anything")

    second.finding = fail
    async with with_both() as core:
        assert await core.owner.ids(template="python:3.12") == []


async def test_all_templates_are_listed_once_with_their_use(with_both):
    async with with_both() as core:
        await core.owner.create(template_id="own")
        await core.owner.create(template_id="own")
        listed = {item.id: item for item in (await core.owner.call("ListTemplates")).templates}
        assert {(item.id, item.backend) for item in listed.values()} == {("base", "local"), ("own", "images")}
        assert (listed["own"].spawn_count, listed["base"].spawn_count) == (2, 0)
        assert listed["own"].HasField("last_spawned_at")
        assert not listed["base"].HasField("last_spawned_at")
        assert listed["own"].found_at == (await core.owner.call("ListTemplates")).templates[1].found_at


async def test_each_backend_is_held_to_its_own_capabilities(with_both):
    async with with_both() as core:
        assert await core.owner.create(template_id="base", allow_internet_access=False)
        with pytest.raises(CapabilityMissing, match="'images'"):
            await core.owner.create(template_id="own", allow_internet_access=False)


async def test_backend_that_does_not_answer_hides_only_what_is_its(with_both, deployment, second, monkeypatch):
    monkeypatch.setattr("sandgate_core.templates._LISTING_PATIENCE", 0.2)

    async def hang():
        await asyncio.Event().wait()

    monkeypatch.setattr(second, "templates", hang)
    async with with_both() as core:
        assert (await core.owner.create(template_id="base")).backend == "local"
        # Whether that backend has it is not known.
        with pytest.raises(Unavailable, match="'images'"):
            await core.owner.create(template_id="own")
        assert [item.id for item in (await core.owner.call("ListTemplates")).templates] == ["base"]


async def test_looking_for_a_template_counts_into_the_time_of_the_create(with_both, second):
    async def hang(_):
        await asyncio.Event().wait()

    second.finding = hang
    async with with_both(create_timeout=0.3) as core:
        with pytest.raises(Unavailable, match="in time"):
            await core.owner.create(template_id="python:3.12")

    async def slow(_):
        await asyncio.sleep(0.3)

    async def stay(_):
        await asyncio.Event().wait()

    second.finding, second.created = slow, stay
    async with with_both(create_timeout=2) as core:
        with pytest.raises(DeadlineExceeded, match="2 seconds"):
            await core.owner.create(template_id="python:3.12")
    assert not second.world.boxes


async def test_sandboxes_of_both_are_found_again(with_both, second, deployment):
    async with with_both() as core:
        boxes = {(await core.owner.create(template_id=name)).id for name in ("base", "own")}
    async with with_both() as core:
        assert set(await core.owner.ids()) == boxes
        for box in boxes:
            assert (await core.internal.call("Locate", id=box)).agent.target
