"""The way to an agent: what becomes of those who hold it when it is given up. No server is asked for any of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from pathlib import Path

import aiohttp
import pytest

from sandgate_plugin_opensandbox.server import Endpoint
from sandgate_plugin_opensandbox.tunnels import Tunnel


# At once would be too early: what asyncio has accepted and not yet begun it forgets when its server is closed.
@pytest.mark.parametrize("steps", range(2, 6), ids=lambda steps: f"{steps} turns of the loop")
async def test_tunnel_that_is_closed_hangs_up_on_everybody_and_the_log_stays_empty(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections at every stage: one that waits for the sandbox to be found, and ones that have come just now."""
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    asked = asyncio.Event()

    async def nowhere() -> Endpoint:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    with tempfile.TemporaryDirectory(prefix="sgt-") as folder, caplog.at_level(logging.WARNING):
        path = Path(folder, "agent")
        async with aiohttp.ClientSession() as session:
            tunnel = Tunnel(session, nowhere, server_id="s", path=path, token="t")
            await tunnel.open()
            ends = [await asyncio.open_unix_connection(path)]
            await asked.wait()
            ends += [await asyncio.open_unix_connection(path) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            await tunnel.close()
            async with asyncio.timeout(10):
                for reader, writer in ends:
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
                    writer.close()
                    with contextlib.suppress(ConnectionResetError):
                        await writer.wait_closed()
        assert not path.exists()
    assert faults == []
    assert caplog.messages == []
