"""What a sandbox uses, as its control groups tell it: the same as its agent says, for as long as it runs (H3, C25)."""

import asyncio
import os
import signal
import threading
import time

import grpc
import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_errors import NotFound, Unavailable
from sandgate_plugin_api import Usage
from sandgate_plugin_process.boxes import Record, Shelf
from sandgate_plugin_process.grounds import Ground
from sandgate_plugin_process.usage import Meter

MIB = 2**20
#: Seconds of CPU time that BURN uses, however long that takes on a busy machine.
BURNT = 0.3
BURN = f"python3 -c 'import time\nwhile time.process_time() < {BURNT}: pass'"


@pytest.fixture(scope="module")
def ground() -> Ground:
    return Ground.find()


@pytest.fixture
def counted(ground: Ground) -> None:
    if not ground.counts:
        if "limits" in os.environ.get("SANDGATE_REQUIRE", ""):
            pytest.fail("there are no control groups that count memory and CPU time here")
        pytest.skip("no control groups that count memory and CPU time can be made here")


async def told_by_agent(placement) -> agent_pb2.MetricsResponse:
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        return await agent_pb2_grpc.AgentStub(channel).Metrics(
            agent_pb2.MetricsRequest(), metadata=(("agent-token", placement.agent.token),), timeout=30
        )


def record_of(gateway, placement) -> Record:
    record = Shelf(state=gateway.state, runtime=gateway.runtime).box(placement.handle["box"]).read()
    assert record is not None
    return record


@pytest.mark.parametrize("table", [{}, {"memory_mb": 256, "cpu_count": 1}], ids=["machine", "limits"])
async def test_tells_what_the_agent_tells(gateway, run, counted, table):
    async with gateway.backend(**table) as backend:
        placement = await gateway.create(backend)
        # Some cache, and something that is held.
        await run(placement, "dd if=/dev/zero of=/tmp/some bs=1M count=20 2>/dev/null")
        usage, agent = await backend.usage(placement.handle), await told_by_agent(placement)
        assert usage is not None
        assert usage.cpu_count == agent.cpu_count
        assert usage.mem_total == agent.mem_total
        assert usage.disk_total == agent.disk_total
        # What an agent does to answer takes memory itself; others fill the disk meanwhile.
        assert usage.mem_used == pytest.approx(agent.mem_used, abs=16 * MIB)
        assert usage.mem_cache == pytest.approx(agent.mem_cache, abs=8 * MIB)
        assert usage.disk_used == pytest.approx(agent.disk_used, abs=0.1 * agent.disk_total)
        await backend.destroy(placement.handle)


async def cpu_seconds(backend, placement, work) -> float:
    """What a sandbox is said to use while ``work`` goes on."""
    began = time.monotonic()
    await backend.usage(placement.handle)
    await work
    usage = await backend.usage(placement.handle)
    return usage.cpu_used_pct / 100 * usage.cpu_count * (time.monotonic() - began)


async def test_cpu_use_is_that_between_two_questions(gateway, backend, run, counted):
    placement = await gateway.create(backend)
    assert await cpu_seconds(backend, placement, run(placement, BURN)) > 0.8 * BURNT
    # It is not counted twice.
    assert await cpu_seconds(backend, placement, asyncio.sleep(0.5)) < 0.5 * BURNT
    await backend.destroy(placement.handle)


async def test_first_question_is_answered_for_the_life_until_then(gateway, run, counted):
    """After a restart of the gateway nobody has asked yet."""
    began = time.monotonic()
    async with gateway.backend() as backend:
        placement = await gateway.create(backend)
        await run(placement, BURN)
    async with gateway.backend() as backend:
        usage = await backend.usage(placement.handle)
        assert usage.cpu_used_pct / 100 * usage.cpu_count * (time.monotonic() - began) > 0.8 * BURNT
        await backend.destroy(placement.handle)


async def test_time_of_a_pause_does_not_count(gateway, backend, run, counted):
    placement = await gateway.create(backend)
    await backend.usage(placement.handle)
    handle = await backend.pause(placement.handle, memory=True)
    assert (await backend.usage(handle)).mem_used > 0
    await asyncio.sleep(1.5)
    began = time.monotonic()
    placement = await backend.resume(handle)
    await run(placement, BURN)
    usage = await backend.usage(placement.handle)
    assert usage.cpu_used_pct / 100 * usage.cpu_count * (time.monotonic() - began) > 0.8 * BURNT
    await backend.destroy(placement.handle)


async def test_sandbox_that_started_anew_on_its_files_is_measured_as_the_new_one(gateway, backend, counted):
    placement = await gateway.create(backend)
    await backend.usage(placement.handle)
    handle = await backend.pause(placement.handle, memory=False)
    with pytest.raises(NotFound):
        await backend.usage(handle)
    placement = await backend.resume(handle)
    assert (await backend.usage(placement.handle)).mem_used > 0
    await backend.destroy(placement.handle)


async def test_sandbox_that_has_ended_uses_nothing_and_is_forgotten(gateway, backend, counted):
    placement, other = await gateway.create(backend), await gateway.create(backend)
    for made in (placement, other):
        await backend.usage(made.handle)
    os.kill(record_of(gateway, placement).main.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while True:
            try:
                await backend.usage(placement.handle)
            except NotFound:
                break
            await asyncio.sleep(0.01)
    for made in (placement, other):
        await backend.destroy(made.handle)
        with pytest.raises(NotFound):
            await backend.usage(made.handle)
    assert backend._meter._gauges == {}


async def test_what_no_group_counts_is_left_to_the_agent(gateway):
    async with gateway.backend(limits="off") as backend:
        placement = await gateway.create(backend)
        assert await backend.usage(placement.handle) is None
    # Nor by a gateway that can make groups, as long as the sandbox has none.
    async with gateway.backend() as backend:
        assert await backend.usage(placement.handle) is None
        await backend.destroy(placement.handle)


async def test_all_who_ask_at_once_are_answered(gateway, backend, counted):
    placement = await gateway.create(backend)
    asked = [asyncio.create_task(backend.usage(placement.handle)) for _ in range(30)]
    await asyncio.sleep(0)
    asked[3].cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers.pop(3), asyncio.CancelledError)
    assert all(isinstance(answer, Usage) for answer in answers)
    await backend.destroy(placement.handle)


async def test_disk_that_hangs_gathers_no_questions_and_ends_with_its_hanging():
    meter, hangs, goes_on = Meter(), threading.Event(), threading.Event()

    def hang():
        hangs.set()
        goes_on.wait(30)

    try:
        first = asyncio.create_task(meter.measure("hangs", hang))
        await asyncio.to_thread(hangs.wait, 30)
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await meter.measure("other", lambda: None)
        assert not meter._asked
        goes_on.set()
        assert await first is None
        assert await meter.measure("other", lambda: None) is None
    finally:
        goes_on.set()
        meter.close()


async def test_closed_backend_leaves_nobody_waiting():
    meter, goes_on = Meter(), threading.Event()
    first = asyncio.create_task(meter.measure("one", lambda: goes_on.wait(30) and None))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(meter.measure("another", lambda: None))
    await asyncio.sleep(0.01)
    meter.close()
    goes_on.set()
    with pytest.raises(Unavailable):
        await waiting
    assert await first is None
    with pytest.raises(Unavailable):
        await meter.measure("late", lambda: None)
