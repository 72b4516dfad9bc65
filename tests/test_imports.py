"""Imports follow the request: edge, core and agent never import one another (docs/architecture.md).

The source is read and not imported, so that an import inside a function or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = {
    "sandgate": ROOT / "client/sandgate",
    "sandgate_agent": ROOT / "agent/sandgate_agent",
    "sandgate_api": ROOT / "protos/gen/sandgate_api",
    "sandgate_bundle": ROOT / "agent/sandgate_bundle",
    "sandgate_core": ROOT / "core/sandgate_core",
    "sandgate_edge": ROOT / "edge/sandgate_edge",
    "sandgate_errors": ROOT / "plugins/api/sandgate_errors",
    "sandgate_plugin_api": ROOT / "plugins/api/sandgate_plugin_api",
    "sandgate_tracing": ROOT / "core/sandgate_tracing",
    **{folder.name: folder for folder in (ROOT / "plugins").glob("*/sandgate_plugin_*") if folder.parent.name != "api"},
    **{folder.name: folder for folder in (ROOT / "examples").glob("*/sandgate_plugin_*")},
}
PLUGINS = [name for name in PACKAGES if name.startswith("sandgate_plugin_") and name != "sandgate_plugin_api"]

#: Which of our own packages each may import besides itself.
OWN = {
    "sandgate": {"sandgate_api", "sandgate_errors", "sandgate_plugin_api", "sandgate_tracing"},
    "sandgate_agent": {"sandgate_api", "sandgate_errors"},
    "sandgate_api": set(),
    # It looks for the packages that it copies by their names.
    "sandgate_bundle": {"sandgate_errors"},
    "sandgate_core": {"sandgate_api", "sandgate_errors", "sandgate_plugin_api", "sandgate_tracing"},
    "sandgate_edge": {"sandgate_api", "sandgate_errors", "sandgate_tracing", "sandgate_plugin_api"},
    "sandgate_errors": set(),
    "sandgate_plugin_api": {"sandgate_api", "sandgate_errors"},
    "sandgate_tracing": {"sandgate_errors"},
    **{name: {"sandgate_api", "sandgate_bundle", "sandgate_errors", "sandgate_plugin_api"} for name in PLUGINS},
}

#: Where a plugin has the agent's services in its own process, as nothing of ours is in its sandboxes: one folder, and no other.
OUTSIDE = "plugins/opensandbox/sandgate_plugin_opensandbox/by_execd/"

#: What only the suite that every backend passes may import: it is part of the contract, and run by tests alone.
SUITE = {"grpc", "pytest", "pytest_asyncio", "sandgate_api"}

#: What a package that goes into every sandbox, or into every plugin author's environment, may import from others.
FOREIGN = {
    "sandgate_agent": {"grpc", "grpc_health", "google.protobuf"},
    "sandgate_api": {"grpc", "google.protobuf"},
    "sandgate_bundle": set(),
    "sandgate_errors": {"grpc"},
    "sandgate_plugin_api": {"packaging", "pluggy", *SUITE},
}

#: Runs in the sandbox, as the program that becomes the agent without another start of the interpreter.
EXCEPTIONS = {
    ("plugins/docker/sandgate_plugin_docker/enter.py", "sandgate_agent.__main__.main"),
    *(
        ("plugins/docker/sandgate_plugin_docker/enter.py", f"sandgate_agent.furnishing.{name}")
        for name in ("SHELL", "accounts_with_user", "furnish", "profile_around")
    ),
    ("plugins/opensandbox/sandgate_plugin_opensandbox/enter.py", "sandgate_agent.__main__.main"),
    ("plugins/opensandbox/sandgate_plugin_opensandbox/enter.py", "sandgate_agent.doorway.Door"),
    ("plugins/opensandbox/sandgate_plugin_opensandbox/enter.py", "sandgate_agent.doorway.run_beside"),
    ("plugins/opensandbox/sandgate_plugin_opensandbox/enter.py", "sandgate_agent.furnishing.furnish"),
    ("plugins/process/sandgate_plugin_process/enter.py", "sandgate_agent.__main__.main"),
}


def imported_by(file: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, relative imports left out: they stay inside the package."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            # `from google import protobuf` says no less than `import google.protobuf`.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*.py")):
        place = str(file.relative_to(ROOT))
        for name in imported_by(file):
            outside = place.startswith(OUTSIDE) and is_below(name, {"sandgate_agent"})
            if not outside and (place, name) not in EXCEPTIONS:
                yield place, name


def is_below(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_the_parts_it_may_know(package: str) -> None:
    others = PACKAGES.keys() - OWN[package] - {package}
    wrong = [
        f"{file} imports {name}" for file, name in imports_of(PACKAGES[package]) if name.partition(".")[0] in others
    ]
    assert wrong == []


@pytest.mark.parametrize("package", FOREIGN)
def test_package_with_few_dependencies_keeps_to_them(package: str) -> None:
    known = FOREIGN[package] | OWN[package] | {package}
    wrong = [
        f"{file} imports {name}"
        for file, name in imports_of(PACKAGES[package])
        if name.partition(".")[0] not in sys.stdlib_module_names and not is_below(name, known)
    ]
    assert wrong == []


def test_only_the_suite_for_backends_needs_more_than_a_plugin_does() -> None:
    outside = [
        f"{file} imports {name}"
        for file, name in imports_of(PACKAGES["sandgate_plugin_api"])
        if "/testsuite/" not in file and is_below(name, SUITE)
    ]
    assert outside == []


def test_connect_protocol_needs_no_transport() -> None:
    """Bytes in, events out: the protocol can be tested without a server and used under another."""
    forbidden = {"aiohttp", "grpc", "asyncio"}
    folder = PACKAGES["sandgate_edge"] / "connect"
    assert folder.is_dir()
    wrong = [f"{file} imports {name}" for file, name in imports_of(folder) if name.partition(".")[0] in forbidden]
    assert wrong == []


def test_agent_loads_nothing_but_its_dependencies() -> None:
    """What the source cannot show: the modules that are really there once the agent's server is imported."""
    program = (
        "import sys; before = set(sys.modules); import sandgate_agent.server;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name for name in done.stdout.split() if name.lstrip("_") not in sys.stdlib_module_names}
    ours = {"sandgate_agent", "sandgate_api", "sandgate_errors"}
    # cython_runtime is made by grpc's extension module; grpc itself looks for grpc_tools, which only developers have.
    theirs = {"grpc", "grpc_health", "google", "typing_extensions", "cython_runtime", "grpc_tools"}
    assert {name for name in loaded if not name.startswith("_")} - ours - theirs == set()


def test_agent_loads_nothing_that_would_only_make_its_start_longer() -> None:
    """Beyond what its libraries load anyway: each of these brings others along, and every sandbox waits for them."""
    code = (
        "import sys, asyncio, dataclasses, hmac, json, logging, grpc.aio, google.protobuf.internal.builder;"
        "before = set(sys.modules); import sandgate_agent.server;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    dear = {"pathlib", "urllib.parse", "ipaddress", "random", "secrets", "tempfile", "zipfile", "email", "http"}
    assert dear.isdisjoint(done.stdout.split())


def test_every_package_is_looked_at() -> None:
    """A new top-level package must take its place in the rules above."""
    found = {file.parent.name for file in ROOT.glob("*/sandgate*/__init__.py")}
    found |= {file.parent.name for file in ROOT.glob("*/*/sandgate*/__init__.py")} - {"sandgate_testing"}
    assert found == PACKAGES.keys()
