"""The suite's options. A plugin of pytest by entry point, because pytest reads no conftest of a package in time."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]

_SUITE = "sandgate_plugin_api.testsuite"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sandgate", "the sandgate backend under test (--pyargs sandgate_plugin_api.testsuite)")
    group.addoption("--backend", metavar="NAME", help="the backend to test, by the name that it registers")
    group.addoption("--backend-config", metavar="FILE", type=Path, help="a gateway's configuration file (TOML)")


def pytest_configure(config: pytest.Config) -> None:
    """Without a backend the suite has no tests, which must not look like a success."""
    named = [argument for argument in config.invocation_params.args if str(argument).startswith(_SUITE)]
    if named and config.getoption("--backend") is None:
        raise pytest.UsageError(f"{_SUITE} needs --backend NAME: the backend to test")
