"""The example on a real gateway: two backends, creates by weight, and one that goes on when the other fails."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_errors import FailedPrecondition
from sandgate_testing.gateway import Gateway, GatewayFailed

ROOT = Path(__file__).resolve().parents[1]

#: A second backend of the same kind under another name, and a third that is always full.
MORE = """
from sandgate_errors import ResourceExhausted
from sandgate_plugin_api import hookimpl
from sandgate_plugin_process.backend import ProcessBackend


class Second(ProcessBackend):
    name = "second"


class Full(ProcessBackend):
    name = "full"

    async def create(self, request, handle):
        raise ResourceExhausted("no room here")


@hookimpl
def sandgate_register_backends(registrar):
    registrar.add(Second)
    registrar.add(Full)
"""
TABLES = "".join(f'[backends.{name}]\nisolation = "none"\nwarm = 0\n' for name in ("process", "second", "full"))


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The example's distribution, and one with the other backends, as they lie in a folder of the import path."""
    (folder := tmp_path / "installed").mkdir()
    shutil.copytree(ROOT / "sandgate_plugin_weighted", folder / "sandgate_plugin_weighted")
    (folder / "more_backends.py").write_text(MORE)
    for name, entry in (("weighted", "sandgate_plugin_weighted:plugin"), ("more", "more_backends")):
        (info := folder / f"sandgate_plugin_{name}-0.1.0.dist-info").mkdir()
        required = "Requires-Dist: sandgate-plugin-api~=1.0\n"
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sandgate-plugin-{name}\nVersion: 0.1.0\n{required}"
        )
        (info / "entry_points.txt").write_text(f"[sandgate.plugins]\n{name} = {entry}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(str(folder))
        yield folder
    sys.modules.pop("sandgate_plugin_weighted", None)
    sys.modules.pop("sandgate_plugin_weighted.shares", None)


@pytest.fixture
def gateway(installed: Path, tmp_path: Path) -> Iterator[Gateway]:
    (config := tmp_path / "gateway.toml").write_text(
        TABLES + "[plugins.weighted.templates]\nbase = {process = 3, second = 1}\n" + '"*" = {full = 1, second = 0}\n'
    )
    gateway = Gateway(isolation="none", options=("--config", str(config)))
    try:
        gateway.start()
        yield gateway
        gateway.stop()
        assert gateway.remains() == []
    finally:
        gateway.discard()


def backends_of(gateway: Gateway) -> Counter[str]:
    program = Path(sys.executable).parent / "sandgate"
    command = [str(program), "sandbox", "list", "--json", "--state-dir", str(gateway.state_dir)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return Counter(sandbox["backend"] for sandbox in json.loads(done.stdout))


def test_creates_go_by_weight(gateway: Gateway) -> None:
    for _ in range(8):
        gateway.create_sandbox(templateID="base")
    assert backends_of(gateway) == {"process": 6, "second": 2}


def test_create_goes_on_where_a_backend_is_full(installed: Path, tmp_path: Path) -> None:
    (config := tmp_path / "gateway.toml").write_text(
        TABLES + "[plugins.weighted.templates]\nbase = {full = 5, second = 1}\n"
    )
    gateway = Gateway(isolation="none", options=("--config", str(config)))
    try:
        gateway.start()
        for _ in range(3):
            gateway.create_sandbox(templateID="base")
        assert backends_of(gateway) == {"second": 3}
        assert "a create goes on with another backend" in gateway.log()
        missing = gateway.rest("POST", "/v2/sandboxes", {"templateID": "none of them has it"})
        assert missing.status == 404
        gateway.stop()
    finally:
        gateway.discard()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("templates = 3", "'templates' is not a table"),
        ("shares = {}", "there is no setting 'shares'"),
        ("templates = {base = {process = -1}}", "not a number from 0 up"),
        ("templates = {base = {process = 0}}", "every weight for 'base' is 0"),
        ("templates = {base = {}}", "has no table of weights"),
        ("templates = {base = {nowhere = 1}}", "backend 'nowhere', which is not configured"),
    ],
)
def test_settings_that_cannot_be_meant_are_one_line(installed: Path, tmp_path: Path, table: str, said: str) -> None:
    (config := tmp_path / "gateway.toml").write_text(f"{TABLES}[plugins.weighted]\n{table}\n")
    gateway = Gateway(isolation="none", options=("--config", str(config)))
    try:
        with pytest.raises(GatewayFailed, match=said):
            gateway.start()
    finally:
        gateway.discard()


def test_turns_are_spread_and_the_others_follow_by_weight(installed: Path) -> None:
    from sandgate_plugin_weighted.shares import Shares

    shares = Shares({"base": {"a": 3.0, "b": 1.0, "c": 0.0}})
    orders = [shares.order("base") for _ in range(8)]
    assert [order[0] for order in orders] == ["a", "a", "b", "a"] * 2
    assert set(orders) == {("a", "b", "c"), ("b", "a", "c")}
    assert shares.order("other") == ()
    with pytest.raises(FailedPrecondition):
        Shares.read({"templates": {"base": {"a": float("nan")}}})


def test_it_is_installed_as_any_plugin_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sandgate.plugins"] == {"weighted": "sandgate_plugin_weighted:plugin"}
    assert "sandgate-plugin-api~=1.0" in project["dependencies"]
    assert importlib.metadata.version("sandgate-plugin-api")
