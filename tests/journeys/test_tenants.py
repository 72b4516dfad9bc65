"""Teams of one gateway, set up with the command line and used by the SDK's own routes (S12, C57)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sandgate_testing.gateway import Gateway


@pytest.fixture
def command(gateway: Gateway) -> Any:
    """Runs ``sandgate`` on the gateway's state directory."""

    def run(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sandgate", *words, "--state-dir", str(gateway.state_dir)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def as_key(gateway: Gateway, key: str, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return gateway.call(method, path, data, headers={"X-API-KEY": key, "Content-Type": "application/json"})


def test_team_has_what_its_limits_allow_and_no_other_team_sees_it(gateway: Gateway, command: Any) -> None:
    command("teams", "create", "lab", "--name", "The Lab", "--max-sandboxes", "1", "--max-life", "60")
    key = command("keys", "create", "--team", "lab", "--name", "ci").strip()
    made = as_key(gateway, key, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
    assert made.status == 201, made
    name = made.json()["sandboxID"]
    try:
        refused = as_key(gateway, key, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
        assert (refused.status, refused.headers["ratelimit-limit"]) == (429, "1")
        assert "retry-after" in refused.headers
        too_long = as_key(gateway, key, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 61})
        assert too_long.status == 400
        # S12: another team's sandbox does not exist, on any route.
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/timeout", {"timeout": 60}),
            ("POST", "/refreshes", {}),
            ("POST", "/connect", {"timeout": 60}),
        ):
            assert as_key(gateway, gateway.api_key, method, f"/sandboxes/{name}{path}", body).status == 404, path
        listed = as_key(gateway, gateway.api_key, "GET", "/v2/sandboxes").json()
        assert name not in [sandbox["sandboxID"] for sandbox in listed]
    finally:
        assert as_key(gateway, key, "DELETE", f"/sandboxes/{name}").status == 204


def test_limits_are_changed_one_by_one_and_taken_away(command: Any) -> None:
    command("teams", "create", "changing", "--max-cpus", "8", "--create-rate", "5")
    command("teams", "set", "changing", "--max-cpus", "none", "--max-memory", "4096")
    (team,) = [team for team in json.loads(command("teams", "list", "--json")) if team["id"] == "changing"]
    assert team["limits"] == {"max_memory_mb": "4096", "creates_per_minute": "5"}
    assert "changing" in command("teams", "list")
    assert "no team" in command("teams", "set", "nobody", "--max-cpus", "1", status=1)
    assert "neither a whole number" in command("teams", "set", "changing", "--max-cpus", "-1", status=2)
    assert "name what is to be changed" in command("teams", "set", "changing", status=2)
    assert "already" in command("teams", "create", "changing", status=1)


def test_audit_tells_who_did_what(gateway: Gateway, command: Any) -> None:
    command("teams", "create", "audited")
    key = command("keys", "create", "--team", "audited", "--name", "ci").strip()
    made = as_key(gateway, key, "POST", "/v2/sandboxes", {"templateID": "base"})
    name = made.json()["sandboxID"]
    assert as_key(gateway, key, "DELETE", f"/sandboxes/{name}").status == 204
    shown = json.loads(command("audit", "--sandbox", name, "--since", "1h", "--json"))
    assert [(entry["action"], entry["team"], entry["key_name"], entry["outcome"]) for entry in shown] == [
        ("sandbox.kill", "audited", "ci", "OK"),
        ("sandbox.create", "audited", "ci", "OK"),
    ]
    assert shown[1]["request_id"] == made.headers["x-request-id"]
    assert "sandbox.kill" in command("audit", "--team", "audited", "--action", "sandbox", "--limit", "1")
    assert "no time" in command("audit", "--since", "yesterday", status=2)
