"""The table ``[plugins.rock]``, the file of clients' keys, and what the profile remembers over a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandgate_errors import FailedPrecondition, ResourceExhausted
from sandgate_plugin_api import AgentRequest
from sandgate_plugin_rock import RockPlugin
from sandgate_plugin_rock.commands import Places
from sandgate_plugin_rock.keys import Keys
from sandgate_plugin_rock.settings import RockSettings
from sandgate_testing.gateway import Gateway, GatewayFailed
from sandgate_testing.sides import Side, changes

pytestmark = pytest.mark.xdist_group("rock")

OURS = "e2b_" + "0" * 40


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"volume": 3}, "there is no setting 'volume'"),
        ({"keys_file": "relative"}, "an absolute path"),
        ({"keys_file": 3}, "an absolute path"),
        ({"at_deadline": "stay"}, "'kill' or 'stop'"),
        ({"at_deadline": ["kill"]}, "'kill' or 'stop'"),
        ({"address": "here"}, "an IP address"),
        ({"max_commands": 0}, "from 1 up"),
        ({"max_commands": True}, "from 1 up"),
        ({"max_commands": "6"}, "from 1 up"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(FailedPrecondition, match=said):
        RockSettings.read(table)


def test_profile_without_settings_has_the_numbers_of_the_contract() -> None:
    """K1, K24, K25, K30, K32"""
    assert RockSettings.read({}) == RockSettings()
    assert RockSettings().max_commands == 1024
    assert RockSettings().at_deadline == "kill"
    defaults = RockPlugin().sandgate_defaults()
    assert defaults["envd_version"] == "0.3.0"
    assert defaults["max_rpc_request_bytes"] == 2**20
    assert defaults["max_upload_files"] == 256
    assert (defaults["max_list_depth"], defaults["max_list_entries"]) == (100, 10_000)


def test_gateway_says_in_one_line_what_is_wrong(make: Callable[..., Gateway]) -> None:
    with pytest.raises(GatewayFailed, match="plugin 'rock': there is no setting 'volume'"):
        make(rock=True, table="volume = 3")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


@pytest.mark.parametrize("text", ["one", "a b c", f"mine {OURS}\nmine {OURS}"])
def test_line_that_is_no_pair_is_refused_without_naming_a_key(file: Path, text: str) -> None:
    file.write_text(f"# keys\n\n{text}\n")
    with pytest.raises(FailedPrecondition, match=r"line [34]") as caught:
        Keys(file)
    assert not {"one", "mine", OURS} & set(caught.value.message.split())


def test_file_that_others_can_read_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(FailedPrecondition, match="chmod 600"):
        Keys(file)


def test_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe x")
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        Keys(file)
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        Keys(file.with_name("none"))


def test_keys_are_read_again_when_the_file_has_changed(file: Path) -> None:
    keys = Keys(file)
    assert keys.ours("mine") == "mine"
    file.write_text(f"mine {OURS}\n")
    assert keys.ours("mine") == OURS
    assert keys.ours("other") == "other"
    # Half written: what was read before holds.
    file.write_text("mine")
    assert keys.ours("mine") == OURS
    file.unlink()
    assert keys.ours("mine") == OURS
    file.touch(mode=0o600)
    assert keys.ours("mine") == "mine"


def request() -> AgentRequest:
    return AgentRequest(route="POST /process.Process/Start", named_by="headers")


def test_place_of_a_command_that_nobody_saw_end_is_free_after_its_limit() -> None:
    """K25, K26"""
    now = [0.0]
    places = Places(2, clock=lambda: now[0])
    first, second = request(), request()
    places.take(first, limit=10)
    places.take(second, limit=60)
    with pytest.raises(ResourceExhausted, match="2 commands"):
        places.take(request(), limit=10)
    now[0] = 16
    third = request()
    places.take(third, limit=60)
    with pytest.raises(ResourceExhausted):
        places.take(request(), limit=10)
    places.free(second)
    places.free(second)
    places.free(first)
    places.take(request(), limit=10)


def test_sandbox_may_stop_at_its_deadline_and_keep_its_files(make: Callable[..., Gateway]) -> None:
    """K10, K15, K18, K35: stopped, not deleted."""
    side = Side(make(rock=True, table='at_deadline = "stop"\naddress = "192.0.2.7"'), is_rock=True)
    made = side.create()
    assert side.detail(made)["metadata"]["e2b.agents.kruise.io/sandbox-ip"] == "192.0.2.7"
    # The use is told beside the request; it comes too late to put the end off.
    assert side.upload(made, "kept").status == 200
    assert side.set_timeout(made, 0).status == 204
    assert changes(lambda: side.detail(made)["state"] == "paused", patience=30)
    assert side.agent(made, "GET", "/health").status == 502
    assert side.agent(made, "GET", "/files?path=kept").status == 404
    # 409 while it is on its way.
    assert changes(lambda: side.set_timeout(made, 60).status == 404, patience=30)
    assert side.gateway.rest("POST", f"/sandboxes/{made['sandboxID']}/connect", {"timeout": 60}).status == 201
    assert side.agent(made, "GET", "/files?path=kept").body == b"x"
    # Used again, it lives as long as the create asked for.
    assert changes(lambda: side.life(made) >= 300, patience=15)
    assert side.kill(made) == 204


def test_life_that_was_set_later_survives_a_restart(make: Callable[..., Gateway]) -> None:
    """K9"""
    gateway = make(rock=True, config='on_exit = "keep"')
    side = Side(gateway, is_rock=True)
    made, other = side.create(timeout=600), side.create(timeout=600)
    assert side.set_timeout(made, 60).status == 204
    folder = gateway.state_dir / "plugins" / "rock" / "lives"
    assert [path.name for path in folder.iterdir()] == [made["sandboxID"]]
    old = gateway.child("sandgate_core")
    assert old is not None
    gateway.kill_core()
    assert changes(lambda: gateway.child("sandgate_core") not in {None, old}, patience=30)
    assert changes(lambda: gateway.rest("GET", f"/sandboxes/{made['sandboxID']}").status == 200, patience=30)
    before = side.end_of(made)
    time.sleep(0.1)
    side.start(made, "true")
    assert changes(lambda: side.end_of(made) > before, patience=15)
    assert (side.end_of(made) - before).total_seconds() < 60
    assert side.kill(made) == side.kill(other) == 204
    # What was remembered of it goes with it.
    assert changes(lambda: not list(folder.iterdir()), patience=15)


def test_what_the_operator_has_set_wins(make: Callable[..., Gateway]) -> None:
    side = Side(make(rock=True, config="max_upload_files = 3"), is_rock=True)
    made = side.create()
    assert side.upload(made, "a", "b", "c").status == 200
    assert side.upload(made, "a", "b", "c", "d").status == 400
