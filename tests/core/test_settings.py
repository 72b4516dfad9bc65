"""The settings line: what is refused, in one line, without repeating a value."""

from __future__ import annotations

import json

import pytest

from sandgate_core.settings import Settings
from sandgate_errors import InvalidArgument

GOOD = {
    "state_dir": "/s",
    "runtime_dir": "/r",
    "default_backend": "process",
    "internal_token": "t" * 16,
    "seed": "5e" * 16,
    "envd_version": "0.6.13",
}


def parse(**changes) -> Settings:
    return Settings.parse(json.dumps({**GOOD, **changes}))


def test_smallest_line_has_the_documented_defaults():
    settings = parse()
    assert settings.targets == ["unix:/r/core.sock"]
    assert settings.backend_tables == {"process": {}}
    assert (settings.on_exit, settings.database, settings.first_key, settings.log_level) == ("keep", None, None, "info")
    assert (settings.max_timeout, settings.create_timeout) == (86_400, 60)


def test_every_field_of_the_documented_table_is_known():
    assert parse(
        database="postgresql://h/d",
        listen=["unix:/x", "127.0.0.1:0"],
        backends={"docker": {"a": 1}},
        first_key="e2b_" + "0" * 40,
        first_key_given=True,
        on_exit="kill",
        max_timeout=5,
        create_timeout=5,
        log_level="debug",
    ).backend_tables == {"process": {}, "docker": {"a": 1}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("colour", "red"),
        ("seed", "zz" * 16),
        ("seed", "ab"),
        ("seed", None),
        ("internal_token", "short"),
        ("envd_version", "latest"),
        ("envd_version", "0.6.13\n"),
        ("envd_version", "0.0.9"),  # V1
        ("envd_version", "0.06.1"),
        ("on_exit", "maybe"),
        ("max_timeout", 0),
        ("max_timeout", float("inf")),
        ("max_timeout", float("nan")),
        ("create_timeout", 0),
        ("listen", []),
        ("listen", "unix:/x"),
        ("backends", {"process": None}),
        ("log_level", "loud"),
    ],
)
def test_bad_value_is_refused_by_the_name_of_its_field_and_not_repeated(field, value):
    with pytest.raises(InvalidArgument, match=field) as refusal:
        parse(**{field: value})
    assert "\n" not in refusal.value.message
    assert len(str(value)) < 4 or str(value) not in refusal.value.message


@pytest.mark.parametrize("line", ["", "{", "[]", "null", "5", b"\xff", '{"seed": "'])
def test_what_is_no_object_is_refused(line):
    with pytest.raises(InvalidArgument):
        Settings.parse(line)


def test_secrets_do_not_show_in_its_text():
    settings = parse(first_key="e2b_" + "0" * 40, database="postgresql://u:password@h/d")
    for secret in (GOOD["seed"], GOOD["internal_token"], "e2b_", "password"):
        assert secret not in repr(settings)
