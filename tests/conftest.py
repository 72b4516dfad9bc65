"""Fixtures of the whole: one gateway for each worker, and gateways that a test may break.

They start what a user starts, `sandgate serve`, and see to it that nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.requirements import need


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolation",
        choices=["bubblewrap", "none"],
        default="bubblewrap",
        help="how gateways under test isolate sandboxes; never falls back to `none` by itself",
    )


@pytest.fixture(scope="session")
def isolation(request: pytest.FixtureRequest) -> str:
    chosen: str = request.config.getoption("--isolation")
    if chosen == "bubblewrap":
        need("bubblewrap")
    return chosen


@pytest.fixture(scope="session")
def gateway(isolation: str) -> Iterator[Gateway]:
    """A running gateway that all tests of one worker share. What they do to it must not show in its log."""
    gateway = Gateway(isolation=isolation)
    try:
        gateway.start()
        yield gateway
        log = gateway.log()
        gateway.stop()
        left = gateway.remains()
    finally:
        gateway.discard()
    assert left == []
    assert "Traceback" not in log, log
    assert gateway.api_key not in log, "the API key stands in the log"


@pytest.fixture
def make_gateway(isolation: str) -> Iterator[Callable[..., Gateway]]:
    """Gateways of a test's own, started by the test itself; keyword arguments as of :class:`Gateway`."""
    made: list[Gateway] = []

    def make(**options: object) -> Gateway:
        made.append(Gateway(isolation=isolation, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for gateway in made:
        gateway.discard()
