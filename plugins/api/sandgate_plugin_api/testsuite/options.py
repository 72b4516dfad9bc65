"""The suite's options. A plugin of pytest by entry point, because pytest reads no conftest of a package in time."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sandgate", "the sandgate backend under test (--pyargs sandgate_plugin_api.testsuite)")
    group.addoption("--backend", metavar="NAME", help="the backend to test, by the name that it registers")
    group.addoption("--backend-config", metavar="FILE", type=Path, help="a gateway's configuration file (TOML)")
