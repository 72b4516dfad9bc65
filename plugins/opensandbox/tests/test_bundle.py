"""The agent is put into sandboxes that have nothing of it, once for each file system."""

from __future__ import annotations

import pytest

from sandgate_errors import Internal


@pytest.fixture(scope="module")
def server(start_server):
    """Nothing is mounted."""
    with start_server() as server:
        yield server


async def test_bundle_is_put_there_once_for_each_file_system(make_gateway, run):
    """A sandbox that comes from a snapshot has it, and another on the same files needs a start only."""
    gateway = make_gateway(agent_mount=False)
    async with gateway.backend() as backend:
        placement = await gateway.create(backend)
        code, output = await run(
            placement, "ls -ld /run/sandgate/bundle /run/sandgate; ls /run/sandgate; echo x > kept"
        )
        assert code == 0
        assert "tar.gz" not in output
        assert output.count("drwxr-xr-x") == 2
        handle = await backend.pause(placement.handle, memory=False)
        again = await backend.resume(handle)
        stamp = "stat -c %Y /run/sandgate/bundle.name; cat /home/user/kept"
        first, second = await run(again, stamp), await run(again, stamp)
        assert first == second
        assert first[1].endswith("x\n")
        await backend.destroy(again.handle)


async def test_image_that_cannot_run_anything_is_told_so(make_gateway, images, server):
    """One without a shell: nothing of OpenSandbox runs in it either, and nobody waits for that."""
    gateway = make_gateway(agent_mount=False, templates={"base": {"image": images.empty()}})
    async with gateway.backend() as backend:
        request = await gateway.request(backend)
        with pytest.raises(Internal) as error:
            await backend.create(request, backend.reserve(request))
        assert "/" not in error.value.message
        assert not await backend.survey()
    assert server.sandboxes() == []
