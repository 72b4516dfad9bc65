"""Policy hooks on a real gateway: one plugin with every hook, named in the configuration, seen from outside."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sandgate_testing.gateway import Gateway, GatewayFailed, wait_until

HOUSE = (Path(__file__).parent / "house.py").read_text()
pytestmark = pytest.mark.xdist_group("plugins")


@pytest.fixture(scope="module")
def house(shared: Callable[..., Gateway]) -> Gateway:
    return shared(HOUSE, distribution="dist-house", entry="house", config='[plugins.house]\ngreeting = "hello"\n')


def notes(gateway: Gateway) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (gateway.state_dir / "plugins/house/notes").read_text().splitlines()]


def agent(gateway: Gateway, sandbox: str, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
    given = {"E2b-Sandbox-Id": sandbox, "X-Access-Token": gateway.api_key, **headers}
    return gateway.call(method, path, body, headers=given)


def run(gateway: Gateway, sandbox: str, command: str, **fields: object) -> list[dict[str, Any]]:
    """The JSON of every frame of a command's stream."""
    message = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}, **fields}
    content = json.dumps(message).encode()
    framed = struct.pack(">BI", 0, len(content)) + content
    answer = agent(
        gateway, sandbox, "POST", "/process.Process/Start", framed, **{"Content-Type": "application/connect+json"}
    )
    frames, rest = [], answer.body
    while rest:
        _, size = struct.unpack(">BI", rest[:5])
        frames.append(json.loads(rest[5 : 5 + size]))
        rest = rest[5 + size :]
    return frames


def life(gateway: Gateway, sandbox: str) -> float:
    detail = gateway.rest("GET", f"/sandboxes/{sandbox}").json()
    end, start = (datetime.fromisoformat(detail[name]) for name in ("endAt", "startedAt"))
    return (end - start).total_seconds()


def test_create_is_amended_refused_and_described(house: Gateway) -> None:
    made = house.create_sandbox(templateID="house", timeout=61, secure=False)
    assert made["clientID"] == "house"
    assert made["asked"] == "house"
    assert made["envdVersion"] == "0.3.0", "a plugin's default for a key that nobody has set"
    assert made["envdAccessToken"] == house.api_key
    assert life(house, made["sandboxID"]) == pytest.approx(120, abs=1)
    refused = house.rest("POST", "/v2/sandboxes", {"templateID": "forbidden"})
    assert (refused.status, refused.json()["message"]) == (403, "the house does not make these")
    refused = house.rest("POST", "/v2/sandboxes", {"templateID": "base", "mcp": {"x": {}}})
    assert (refused.status, refused.json()["message"]) == (400, "the house has no mcp")
    # An amended body is checked like a client's own.
    wrapped = house.rest("POST", "/v2/sandboxes", {"inner": {"templateID": "base", "timeout": "soon"}})
    assert (wrapped.status, wrapped.json()["message"]) == (400, "timeout must be an integer")


def test_policy_may_ask_which_templates_a_backend_lists(house: Gateway) -> None:
    made = house.rest("POST", "/v2/sandboxes", {"templateID": "first of process"})
    assert (made.status, made.json()["templateID"]) == (201, "base")
    refused = house.rest("POST", "/v2/sandboxes", {"templateID": "first of nowhere"})
    assert (refused.status, refused.json()["message"]) == (404, "there is no backend 'nowhere'")


def test_key_is_checked_before_a_plugin_refuses(house: Gateway) -> None:
    wrong = {"X-API-Key": "e2b_" + "0" * 40}
    assert house.rest("POST", "/sandboxes/iabc/pause", {}, headers=wrong).status == 401
    refused = house.rest("POST", "/sandboxes/iabc/pause", {})
    assert (refused.status, refused.json()["message"]) == (501, "the house does not pause")


@pytest.mark.parametrize("template", ["broken", "wrong type", "thief", "elsewhere"])
def test_fault_of_a_hook_names_the_plugin_and_the_gateway_goes_on(house: Gateway, template: str) -> None:
    failed = house.rest("POST", "/v2/sandboxes", {"templateID": template})
    assert failed.status == 500
    assert "sandgate_create_request" in failed.json()["message"]
    assert "secret text" not in failed.body.decode()
    if template in {"broken", "wrong type"}:
        assert "dist-house" in failed.json()["message"]
    assert failed.headers["should-retry"] == "false"
    assert house.create_sandbox()["clientID"] == "house"
    # The log passes through another process, so it may come after the answer.
    wait_until(lambda: "sandgate_create_request" in house.log())


def test_reply_that_is_no_json_is_the_plugins_fault(house: Gateway) -> None:
    failed = house.rest("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"odd": "1"}})
    assert failed.status == 500
    assert "sandgate_describe" in failed.json()["message"]
    # Nobody knows of the sandbox, so it is gone (C12).
    assert house.rest("GET", "/v2/sandboxes?metadata=odd%3D1").json() == []


def test_lists_are_filtered_amended_and_refused(house: Gateway) -> None:
    for each in house.rest("GET", "/v2/sandboxes").json():
        house.rest("DELETE", f"/sandboxes/{each['sandboxID']}")
    ids = [house.create_sandbox(metadata=metadata)["sandboxID"] for metadata in ({"kind": "a"}, {"hidden": "yes"})]
    listed = house.rest("GET", "/v2/sandboxes")
    assert [item["sandboxID"] for item in listed.json()] == ids[:1]
    assert [item["seen"] for item in listed.json()] == ["listed"]
    assert listed.headers["x-total-running"] == "1"
    assert [item["sandboxID"] for item in house.rest("GET", "/v2/sandboxes?short=a").json()] == ids[:1]
    assert house.rest("GET", "/v2/sandboxes?short=b").json() == []
    assert house.rest("GET", "/v2/sandboxes?metadata=refused%3D1").status == 400


def test_data_plane_is_shaped_both_ways(house: Gateway) -> None:
    """No port header (K2), the API key as token, messages and answers changed, errors mapped."""
    sandbox = house.create_sandbox()["sandboxID"]
    frames = run(house, sandbox, "echo out $FROM_HOOK $HOUSE")
    output = "".join(frame["event"]["data"]["stdout"] for frame in frames if "data" in frame.get("event", {}))
    assert base64.b64decode(output) == b"OUT YES YES\n"
    assert run(house, sandbox, "cat", stdin=True)[-1]["error"]["code"] == "unimplemented"
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhello\r\n--b--\r\n'
    posted = agent(
        house, sandbox, "POST", "/files?path=a/./b", form, **{"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert posted.status == 200
    assert [item["by"] for item in posted.json()] == ["house"]
    assert posted.json()[0]["path"].endswith("/a/b")
    assert agent(house, sandbox, "GET", "/files?path=a/b").body == b"hello"
    missing = agent(house, sandbox, "GET", "/files?path=none")
    assert (missing.status, missing.json()["message"]) == (400, "the house says: no such file")
    assert agent(house, sandbox, "GET", "/files?path=a/b&username=root").status == 400
    wrong = agent(house, sandbox, "GET", "/files?path=a/b", **{"X-Access-Token": "e2b_" + "0" * 40})
    assert wrong.status == 401


def test_use_of_a_sandbox_extends_its_life_and_questions_do_not(house: Gateway) -> None:
    """Sliding life (K9), rounded (K8, K11)."""
    sandbox = house.create_sandbox(timeout=600, metadata={"sliding": "1"})["sandboxID"]
    assert house.rest("POST", f"/sandboxes/{sandbox}/timeout", {"timeout": 1}).status == 204
    assert life(house, sandbox) < 65
    house.rest("GET", f"/sandboxes/{sandbox}")
    agent(house, sandbox, "GET", "/health", **{"E2b-Sandbox-Port": "49983"})
    assert life(house, sandbox) < 65
    run(house, sandbox, "true")
    assert wait_until(lambda: life(house, sandbox) > 500, patience=30)
    assert {"activity": "command", "sandbox": sandbox} in notes(house)


def changes_of(gateway: Gateway, sandbox: str) -> list[tuple[str | None, str]]:
    return [(each["came_from"], each["to"]) for each in notes(gateway) if "to" in each and each["sandbox"] == sandbox]


def test_every_change_is_observed_in_order(house: Gateway) -> None:
    sandbox = house.create_sandbox()["sandboxID"]
    assert house.rest("DELETE", f"/sandboxes/{sandbox}").status == 204
    changes = wait_until(lambda: found if len(found := changes_of(house, sandbox)) == 4 else None)
    assert changes == [(None, "creating"), ("creating", "running"), ("running", "killing"), ("killing", "killed")]


def test_installed_plugin_that_nobody_names_changes_nothing(
    install: Callable[..., None], plugged: Callable[..., Gateway], tmp_path: Path
) -> None:
    install("dist-house", HOUSE, entry="house")
    (config := tmp_path / "gateway.toml").write_text("")
    gateway = plugged(config)
    assert gateway.create_sandbox()["clientID"] == "sandgate"
    gateway.stop()


def test_profile_is_a_plugin_named_on_the_command_line(
    install: Callable[..., None], plugged: Callable[..., Gateway], tmp_path: Path
) -> None:
    install("dist-house", HOUSE, entry="house")
    (config := tmp_path / "gateway.toml").write_text('envd_version = "0.5.0"\n')
    gateway = plugged(config, "--profile", "house")
    assert gateway.create_sandbox()["clientID"] == "house"
    # What the operator has set wins over a plugin's default.
    assert gateway.create_sandbox()["envdVersion"] == "0.5.0"
    gateway.stop()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('plugins = ["nothing"]', "there is no plugin 'nothing'"),
        ("[plugins.house]\nvolume = 3", "house has no setting 'volume'"),
        ('plugins = ["process"]', "has no policy hooks"),
    ],
)
def test_plugin_that_cannot_be_used_is_one_line_at_the_start(
    install: Callable[..., None], plugged: Callable[..., Gateway], tmp_path: Path, config: str, said: str
) -> None:
    install("dist-house", HOUSE, entry="house")
    (file := tmp_path / "gateway.toml").write_text(config)
    with pytest.raises(GatewayFailed, match=said):
        plugged(file)
