"""No method blocks the event loop: all sandboxes of a gateway share it."""

from __future__ import annotations

import pytest

from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.testsuite.box import made
from sandgate_plugin_api.testsuite.deployment import Deployment
from sandgate_plugin_api.testsuite.pulse import Pulse

pytestmark = pytest.mark.asyncio

#: Seconds beyond what the machine itself does: far more than a careful backend needs, and less than anybody bears.
_MOST = 0.5


async def test_event_loop_goes_on_in_all_that_a_sandbox_goes_through(deployment: Deployment, backend: Backend) -> None:
    async with Pulse.taken() as pulse:
        await backend.templates()
        await backend.find_template("no-such-template-9f2c71")
        async with made(deployment, backend, init=False) as box:
            await backend.locate(box.handle)
            await backend.survey()
            await backend.usage(box.handle)
            await backend.address(box.handle)
            handle = box.handle
            if Capability.SNAPSHOT in backend.capabilities:
                await backend.delete_snapshot(await backend.snapshot(handle, snapshot_id=deployment.new_id()))
            for memory, capability in ((True, Capability.PAUSE), (False, Capability.PAUSE_FILESYSTEM)):
                if capability in backend.capabilities:
                    handle = (await backend.resume(await backend.pause(handle, memory=memory))).handle
            await backend.destroy(handle)
    assert pulse.loop < _MOST + 2 * pulse.thread, f"a call held up the event loop for {pulse.loop:.1f} s"
