"""``sandgate doctor`` on settings that no machine is needed for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandgate.config import load
from sandgate.doctor import Check, _checks


def found(what: str, **flags: object) -> Check | None:
    """The first row of this name; what comes behind it is not tried."""
    return next((check for check in _checks(load(flags, environment={}).settings) if check.what == what), None)


@pytest.mark.parametrize(
    ("flags", "state", "text"),
    [
        ({}, "note", "set --core-address"),
        ({"core_address": "10.0.0.5:8701"}, "broken", "add --grpc-listen"),
        ({"core_address": "10.0.0.5:8701", "grpc_listen": "10.0.0.5:8702"}, "broken", "add --grpc-listen"),
        ({"core_address": "10.0.0.5:8701", "grpc_listen": "0.0.0.0:8701"}, "ok", "10.0.0.5:8701"),
        ({"core_address": "unix:/run/x", "grpc_listen": "unix:/run/x"}, "ok", "unix:/run/x"),
        ({"core_address": "unix:/run/x"}, "broken", "does not listen there"),
    ],
)
def test_address_for_other_cores_must_be_one_that_is_listened_on(
    tmp_path: Path, flags: dict[str, object], state: str, text: str
) -> None:
    check = found("core address", state_dir=str(tmp_path / "state"), database="postgresql://u@h/d", **flags)
    assert check is not None
    assert (check.state, text in check.how) == (state, True)


def test_core_alone_needs_no_address(tmp_path: Path) -> None:
    assert found("core address", state_dir=str(tmp_path / "state")) is None


@pytest.mark.parametrize(
    ("url", "state"),
    [
        ("sqlite:////srv/store.db", "ok"),
        ("postgresql://user:secret@host/name", "ok"),
        ("mysql://user:secret@host/name", "broken"),
        ("user:secret@host/name", "broken"),
    ],
)
def test_database_that_the_core_refuses_is_found_before_and_its_password_is_not_shown(
    tmp_path: Path, url: str, state: str
) -> None:
    check = found("database", state_dir=str(tmp_path / "state"), database=url)
    assert check is not None
    assert check.state == state
    assert "secret" not in check.how
