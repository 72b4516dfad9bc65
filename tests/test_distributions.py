"""What somebody installs who has no clone: the wheels hold everything that the packages need, and nothing else.

An editable install, as developers and the rest of this suite have it, would hide a file that is missing from them.
"""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Folder of the project, and where its packages lie: the folders that are the top level of its wheel.
PROJECTS = {
    "sandgate": (ROOT, ["protos/gen", "core", "edge", "agent", "client"]),
    "sandgate-plugin-api": (ROOT / "plugins/api", ["."]),
    "sandgate-plugin-process": (ROOT / "plugins/process", ["."]),
    "sandgate-plugin-rock": (ROOT / "plugins/rock", ["."]),
}


def tracked_below(folder: Path) -> list[Path]:
    command = ["git", "ls-files", "-z", "--", "."]
    listing = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60).stdout
    return [path for name in listing.decode().split("\0") if name and (path := folder / name).is_file()]


def packaged_files(roots: list[Path]) -> set[str]:
    """Tracked files inside our packages, by their path from the import root."""
    names = (str(path.relative_to(root)) for root in roots for path in tracked_below(root))
    return {name for name in names if name.startswith("sandgate")}


@pytest.fixture(scope="module", params=PROJECTS)
def project(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def wheel(project: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=PROJECTS[project][0], capture_output=True, check=True, timeout=100)
    (built,) = out.iterdir()
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_wheel_holds_every_file_of_its_packages(project: str, wheel: zipfile.ZipFile) -> None:
    folder, roots = PROJECTS[project]
    missing = packaged_files([folder / root for root in roots]) - set(wheel.namelist())
    assert missing == set()


def test_wheel_holds_nothing_else(project: str, wheel: zipfile.ZipFile) -> None:
    folder, roots = PROJECTS[project]
    known = {name.partition("/")[0] for name in packaged_files([folder / root for root in roots])}
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops - known if not top.endswith(".dist-info")} == set()


def test_wheel_says_who_it_is(project: str, wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == project
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    # Tools of development must not reach somebody who only wants to run it.
    required = " ".join(each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each)
    assert not any(tool in required for tool in ("pytest", "ruff", "mypy", "e2b"))


def test_wheel_announces_what_it_starts(project: str, wheel: zipfile.ZipFile) -> None:
    announced = "".join(wheel.read(n).decode() for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    expected = {
        "sandgate-plugin-api": "",
        "sandgate": "sandgate = sandgate.cli:main",
        "sandgate-plugin-process": "[sandgate.plugins]\nprocess = sandgate_plugin_process",
        "sandgate-plugin-rock": "[sandgate.plugins]\nrock = sandgate_plugin_rock:plugin",
    }
    assert expected[project] in announced
