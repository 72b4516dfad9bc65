"""What a backend says about itself: its name, what it can, what it is made from, how it is configured."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.records import Template
from sandgate_plugin_api.testsuite.deployment import Deployment, Options

pytestmark = pytest.mark.asyncio


async def test_name_is_the_one_it_was_asked_for(backend: Backend, options: Options) -> None:
    assert backend.name == options.backend


async def test_capabilities_are_a_set_of_capability(backend: Backend) -> None:
    assert isinstance(backend.capabilities, frozenset)
    assert {type(capability) for capability in backend.capabilities} <= {Capability}
    assert isinstance(backend.host_bound, bool)


async def test_setting_that_does_not_exist_is_refused_by_name(deployment: Deployment) -> None:
    backend = deployment.construct(no_such_setting=1)
    try:
        with pytest.raises(FailedPrecondition, match="no_such_setting"):
            await backend.open()
    finally:
        await backend.close()


async def test_may_be_opened_and_closed_again_and_again(deployment: Deployment) -> None:
    for _ in range(3):
        async with deployment.backend() as backend:
            assert list(await backend.survey()) == []


async def test_listed_templates_are_whole_and_have_one_name_each(backend: Backend) -> None:
    templates = await backend.templates()
    assert all(isinstance(template, Template) for template in templates)
    names = [name for template in templates for name in (template.id, *template.aliases)]
    assert len(names) == len(set(names)), f"two templates share a name: {names}"
    for template in templates:
        assert template.id
        assert min(template.resources.cpu_count, template.resources.memory_mb, template.resources.disk_size_mb) > 0


async def test_template_is_found_by_each_of_its_names(deployment: Deployment, backend: Backend) -> None:
    chosen = await deployment.template(backend)
    for template in (chosen, *await backend.templates()):
        for name in (template.id, *template.aliases):
            assert await backend.find_template(name) == template, f"find_template({name!r})"


async def test_template_that_does_not_exist_is_not_found(backend: Backend) -> None:
    """Clients write these names: whatever they are, they lead to no template and to no fault."""
    for name in ("no-such-template-9f2c71", "", ".", "../base", "base/../base", "a b", "a\0b", "-x", "é", "x" * 5000):
        try:
            found = await backend.find_template(name)
        except (NotFound, InvalidArgument, Unavailable):
            # Unavailable: the name might be one of a registry that cannot be asked now.
            continue
        assert found is None, f"find_template({name!a})"


async def test_diagnose_gives_rows_for_doctor(backend: Backend, deployment: Deployment) -> None:
    assert not inspect.iscoroutinefunction(type(backend).diagnose)
    # It blocks, and doctor calls it where no event loop runs.
    for row in await asyncio.to_thread(type(backend).diagnose, deployment.options.settings):
        what, works, how = row
        assert isinstance(what, str)
        assert isinstance(works, bool)
        assert isinstance(how, str)
        assert "\n" not in what + how
