"""A sandbox from its create to its end, on a real server."""

from __future__ import annotations


async def test_sandbox_runs_commands_of_both_accounts(gateway, backend, run):
    placement = await gateway.create(backend)
    assert await run(placement, "id -un; pwd; echo problem >&2; exit 3") == (3, "user\n/home/user\nproblem\n")
    assert await run(placement, "id -un; touch /etc/mine", user="root") == (0, "root\n")
    assert await run(placement, "sudo -n id -un") == (0, "root\n")
    await backend.destroy(placement.handle)
    assert await backend.locate(placement.handle) is None
