"""The documents stay true: every key, method and dependency is in its table, and nothing else is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import click
import e2b
import pytest
from e2b.sandbox_async.commands.command import Commands as AsyncCommands
from e2b.sandbox_async.commands.pty import Pty as AsyncPty
from e2b.sandbox_async.filesystem.filesystem import Filesystem as AsyncFilesystem
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem

from sandgate import config, serve
from sandgate.cli import cli

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
COMPATIBILITY = (ROOT / "docs/compatibility.md").read_text()
README = (ROOT / "README.md").read_text()

#: No methods but properties, constants and the doors to the other tables.
NOT_METHODS = {
    "commands", "connection_config", "default_mcp_template", "default_sandbox_timeout", "default_template",
    "envd_api_url", "envd_direct_url", "files", "git", "mcp_port", "pty", "sandbox_domain", "sandbox_id",
    "traffic_access_token",
}  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"^\|[-| ]+\|$", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


KEYS = {row[0].strip("`"): row for row in rows(CONFIGURATION.partition("## Variables")[0])[1:]}
FLAGS = {
    option.name: option.opts[0]
    for option in cli.commands["serve"].params
    if isinstance(option, click.Option) and option.name not in {"config", "isolation"}
}


def test_every_key_is_in_the_table_and_nothing_else():
    assert KEYS.keys() == config.Settings.model_fields.keys()


@pytest.mark.parametrize("key", sorted(config.Settings.model_fields))
def test_a_key_is_documented_with_its_variable_flag_and_default(key):
    _, variable, flag, default, meaning = KEYS[key]
    assert variable == ("" if key == "backends" else f"`SANDGATE_{key.upper()}`")
    assert flag == (f"`{FLAGS[key]}`" if key in FLAGS else "")
    field = config.Settings.model_fields[key]
    if isinstance(field.default, str | int):
        assert default == f"`{field.default}`"
    assert len(meaning) > 10
    for choice in get_args(field.annotation):
        if isinstance(choice, str):
            assert f"`{choice}`" in meaning


def test_every_flag_is_a_key():
    assert FLAGS.keys() <= config.Settings.model_fields.keys()


def test_flags_say_the_default_that_is_used():
    """Help texts are written by hand, so that help needs no settings loaded."""
    for option in cli.commands["serve"].params:
        default = config.Settings.model_fields[option.name].default if option.name in FLAGS else None
        if isinstance(default, str | int):
            assert f"({default})" in option.help, option.name


def test_variables_that_are_no_keys_are_in_their_table():
    section = CONFIGURATION.partition("## Variables")[2].partition("\n## ")[0]
    assert {row[0].strip("`") for row in rows(section)[1:]} == config.ENV_ONLY.keys()


def test_the_example_is_valid(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", CONFIGURATION, re.DOTALL)
    (path := tmp_path / "example.toml").write_text(example)
    assert config.load({}, environment={}, config=path).settings.workers == 2


@pytest.mark.parametrize(
    ("owner", "prefix"),
    [
        (e2b.Sandbox, ""), (e2b.AsyncSandbox, ""), (Commands, "commands."), (AsyncCommands, "commands."),
        (Pty, "pty."), (AsyncPty, "pty."), (Filesystem, "files."), (AsyncFilesystem, "files."),
    ],
)  # fmt: skip
def test_every_method_of_the_sdk_is_in_the_table(owner, prefix):
    named = {row[0].strip("`") for row in rows(COMPATIBILITY)}
    methods = {prefix + name for name in dir(owner) if not name.startswith("_") and name not in NOT_METHODS}
    assert methods - named == set()


@pytest.mark.parametrize("row", rows(COMPATIBILITY), ids=lambda row: row[0].strip("`"))
def test_every_row_of_compatibility_has_a_state_and_a_proof_that_exists(row):
    if row[2] == "state":
        return
    assert row[2] in {"works", "in part", "not yet"}
    # `mcp` is an argument that the row is about.
    names = set(re.findall(r"`(\w+)`", row[3])) - {"mcp"}
    assert names
    assert [name for name in names if not _proofs_named(name)] == []


def test_prose_of_compatibility_names_tests_that_exist():
    for name in set(re.findall(r"`(test_\w+)`", COMPATIBILITY)) - {"test_"}:
        assert _proofs_named(name), name


def _proofs_named(name: str) -> bool:
    if (rule := re.fullmatch(r"K(\d+)", name)) is not None:
        # One of ROCK's: with both its sides in a table of probes, or in the docstring of a test.
        files = (ROOT / "plugins/rock/tests").glob("test_*.py")
        probe = rf'^@(rule|same)\(\s*{rule[1]},|^    """(K\d+, )*K{rule[1]}\b'
        return any(re.search(probe, file.read_text(), re.MULTILINE) for file in files)
    if name.startswith("test_"):
        files = (ROOT / "tests").rglob("test_*.py")
        return any(re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE) for file in files)
    return f'    "{name}",' in (ROOT / "tests/journeys/test_journey.py").read_text()


def test_every_dependency_is_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["postgresql"]]
    for group in project["dependency-groups"].values():
        wanted += [entry for entry in group if isinstance(entry, str)]
    text = (ROOT / "docs/dependencies.md").read_text()
    missing = [name for entry in wanted if (name := re.match(r"[\w.-]+", entry)[0]) not in text]
    assert missing == []


def test_readme_names_every_command():
    for name, command in cli.commands.items():
        assert f"`sandgate {name}" in README
        for below in getattr(command, "commands", {}):
            assert re.search(rf"`sandgate {name} .*{below}", README), f"{name} {below}"


def test_unit_for_systemd_leaves_sandboxes_alone_and_waits_as_long_as_the_gateway_may_take():
    lines = (ROOT / "docs/sandgate.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if line and line[0] not in "#[")
    assert unit["KillMode"] == "process"
    assert float(unit["TimeoutStopSec"]) > serve._EDGE_GRACE + max(serve._CORE_GRACE.values())
    _, command, *arguments = unit["ExecStart"].split()
    # Raises where there is no such option; runs nothing.
    cli.commands[command].make_context(command, arguments)
