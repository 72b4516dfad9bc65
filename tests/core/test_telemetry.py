"""What the core shows to Prometheus, and to nobody unless asked."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandgate_errors import FailedPrecondition, NotFound


@pytest.fixture
def address(reserve_port):
    return f"127.0.0.1:{reserve_port()}"


@pytest.fixture
def database():
    """SQLite: none of this is about the store."""


async def scrape(address):
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}, text


async def test_sandboxes_calls_and_errors_are_counted(deployment, address):
    async with deployment.core(metrics_listen=address) as core:
        made = await core.owner.create()
        await core.owner.create()
        with pytest.raises(NotFound):
            await core.owner.call("Kill", id="i" + "0" * 20)
        series, text = await scrape(address)
        create, kill = ("method", "SandboxService/Create"), ("method", "SandboxService/Kill")
        assert series["sandgate_sandboxes", ("backend", "local"), ("state", "running")] == 2
        assert series["sandgate_core_calls_total", create, ("outcome", "OK")] == 2
        assert series["sandgate_core_calls_total", kill, ("outcome", "NOT_FOUND")] == 1
        assert series["sandgate_core_call_seconds_count", create] == 2
        assert series["sandgate_core_relay_streams",] == 0
        assert series["process_open_fds",] > 0
        assert made.id not in text
        await core.owner.call("Kill", id=made.id)
        series, _ = await scrape(address)
        assert series["sandgate_sandboxes", ("backend", "local"), ("state", "running")] == 1


async def test_relayed_calls_are_one_series_whatever_they_are_called(deployment, address):
    async with deployment.core(metrics_listen=address) as core:
        made = await core.owner.create()
        client = core.client(("api-key", "e2b_" + "0123456789" * 4), ("sandbox-id", made.id))
        for name in ("Hang", *(f"Unknown{number}" for number in range(5))):
            call = client.channel.stream_stream(f"/sandgate_api.envd.v1.Test/{name}")(metadata=client.credentials)
            if name == "Hang":
                assert await call.read() == b"started"
                series, _ = await scrape(address)
                assert series["sandgate_core_relay_streams",] == 1
            call.cancel()
        _, text = await scrape(address)
        assert "Unknown" not in text


async def test_address_that_is_taken_stops_the_start_in_one_line(deployment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match=f"cannot show metrics on {address}") as refusal:
            async with deployment.core(metrics_listen=address):
                pass
    assert "\n" not in refusal.value.message
