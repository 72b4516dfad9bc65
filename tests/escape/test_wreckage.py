"""Root that wrecks its sandbox: that is its right, and nobody else's loss."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from e2b import AuthenticationException, Sandbox, SandboxException

from sandgate_testing.gateway import wait_until

WRECKAGE = {
    "all files": "rm -rf --no-preserve-root / 2>/dev/null",
    "what the gateway put there": "rm -rf /run/sandgate; mv /run/sandgate /run/other; mkdir -p /run/sandgate/meet",
    "all processes": "kill -9 -1",
    "as many processes as there can be": "f() { f | f & }; f; sleep 2",
    "the accounts": "rm -f /etc/passwd /etc/group /etc/nsswitch.conf; ln -s /proc/self/mem /etc/passwd",
    "links instead of folders": "rm -rf /tmp /home; ln -s /proc/1/root /tmp; ln -s /run/sandgate/bundle /home",
}


@pytest.mark.parametrize("what", WRECKAGE)
def test_wrecked_sandbox_harms_nobody_else_and_can_be_ended(what, target, neighbour: Sandbox) -> None:
    bundle = next((target.state_dir / "backends/docker").glob("portable-*"))
    before = _sizes(bundle)
    wrecked = Sandbox.create(timeout=600, **target.sdk_options)
    with suppress(SandboxException, AuthenticationException):
        wrecked.commands.run(WRECKAGE[what], user="root", timeout=20)
    assert neighbour.commands.run("echo unharmed").stdout == "unharmed\n"
    with suppress(SandboxException, AuthenticationException):
        wrecked.commands.run("true", timeout=20)
    box = target.boxes().get(wrecked.sandbox_id)
    wrecked.kill()
    assert wrecked.sandbox_id not in target.boxes()
    if box is not None:
        wait_until(lambda: not box.processes())
    assert _sizes(bundle) == before
    fresh = Sandbox.create(timeout=600, **target.sdk_options)
    assert fresh.commands.run("echo fresh").stdout == "fresh\n"
    fresh.kill()


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
