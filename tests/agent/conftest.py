"""A real agent process for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandgate_testing.agent_process import Agent, an_agent


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with an_agent("same") as running:
        yield running


@pytest.fixture(params=["same", "switch", "nested"])
async def any_agent(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    """Once for each identity."""
    async with an_agent(request.param) as running:
        yield running


@pytest.fixture
async def switching() -> AsyncIterator[Agent]:
    async with an_agent("switch") as running:
        yield running
