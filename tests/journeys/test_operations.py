"""What docs/operations.md tells an operator to do, done to a real gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandgate_edge.connect.envelope import pack
from sandgate_testing.gateway import Gateway, GatewayFailed
from sandgate_testing.leftovers import sandboxes_of

ROOT = Path(__file__).resolve().parents[2]
MakeGateway = Callable[..., Gateway]


@pytest.fixture
def kept(make_gateway: MakeGateway) -> Gateway:
    """A gateway whose sandboxes stay when it stops; killed by the test's end."""
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    return gateway


def said(gateway: Gateway, sandbox: dict[str, Any], text: str) -> bool:
    """Whether a command runs in a sandbox, with the token that its client has had from the beginning."""
    body = pack(0, json.dumps({"process": {"cmd": "/bin/echo", "args": [text]}}).encode())
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
        "Content-Type": "application/connect+json",
    }
    answer = gateway.call("POST", "/process.Process/Start", body, headers=headers)
    return answer.status == 200 and b'"exited":true' in answer.body


def backup_commands() -> str:
    section = (ROOT / "docs/operations.md").read_text().partition("## Back up and restore")[2]
    (commands,) = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    return commands


def test_backup_of_a_running_gateway_brings_it_back_after_a_crash(kept: Gateway, tmp_path: Path) -> None:
    if shutil.which("sqlite3") is None:
        pytest.skip("the command sqlite3 is not installed")
    before = kept.create_sandbox(metadata={"made": "before"})
    commands = backup_commands().replace("/var/lib/sandgate", str(kept.state_dir)).replace("/backup", str(tmp_path))
    subprocess.run(["/bin/sh", "-ec", commands], check=True, timeout=60)
    after = kept.create_sandbox(metadata={"made": "after"})
    assert len(sandboxes_of(kept.state_dir)) >= 2

    kept.stop(hard=True)
    for left in kept.state_dir.glob("sandgate.db*"):
        left.unlink()
    shutil.copy(tmp_path / "sandgate.db", kept.state_dir)
    shutil.copy(tmp_path / "seed", kept.state_dir)
    kept.start()

    listed = kept.rest("GET", "/v2/sandboxes").json()
    assert [sandbox["metadata"] for sandbox in listed] == [{"made": "before"}]
    assert said(kept, before, "still here")
    # What the machine has and the store does not know is destroyed.
    assert kept.rest("GET", f"/sandboxes/{after['sandboxID']}").status == 404
    assert after["sandboxID"] not in sandboxes_of(kept.state_dir)
    assert kept.rest("DELETE", f"/sandboxes/{before['sandboxID']}").status == 204


def test_internal_token_is_made_anew_when_its_file_is_missing(kept: Gateway) -> None:
    sandbox = kept.create_sandbox()
    file = kept.state_dir / "internal.token"
    old = file.read_text().strip()
    kept.stop()
    file.unlink()
    kept.start()
    new = file.read_text().strip()
    assert new != old
    assert file.stat().st_mode & 0o777 == 0o600
    for token, status in ((old, 401), (new, 200)):
        answer = kept.call("GET", "/api-keys", headers={"X-Admin-Token": token})
        assert answer.status == status, answer
    assert said(kept, sandbox, "unharmed")
    assert kept.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}").status == 204


def test_seed_changes_only_when_no_token_depends_on_it(kept: Gateway) -> None:
    sandbox = kept.create_sandbox()
    file = kept.state_dir / "seed"
    kept.stop()
    held = file.read_text()
    file.unlink()
    with pytest.raises(GatewayFailed, match="the seed is not the one that 1 protected sandboxes were made with"):
        kept.start()
    file.write_text(held)
    kept.start()
    assert said(kept, sandbox, "as before")
    assert kept.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}").status == 204

    kept.stop()
    file.unlink()
    kept.start()
    assert file.read_text() != held
    fresh = kept.create_sandbox()
    assert said(kept, fresh, "with the new one")
    assert kept.rest("DELETE", f"/sandboxes/{fresh['sandboxID']}").status == 204
