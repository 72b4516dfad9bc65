"""Pause and resume through the native client, in both its forms, and what commands keep over them."""

from __future__ import annotations

import asyncio

import pytest

from sandgate import NotFoundException, SandboxException, SandboxState
from sandgate_testing.either import done


async def state_of(box) -> SandboxState:
    return (await done(box.get_info())).state


async def test_a_sandbox_is_paused_and_resumed(sandbox):
    """C44, C46: what is so already is told apart from what was done."""
    await done(sandbox.files.write("kept", "1"))
    assert await done(sandbox.resume()) is False
    assert await done(sandbox.pause()) is True
    assert await state_of(sandbox) is SandboxState.PAUSED
    assert await done(sandbox.pause()) is False
    assert await state_of(sandbox) is SandboxState.PAUSED
    assert await done(sandbox.resume(1000)) is True
    info = await done(sandbox.get_info())
    assert info.state is SandboxState.RUNNING
    assert (info.end_at - info.started_at).total_seconds() > 900
    assert await done(sandbox.files.read("kept")) == "1"


async def test_commands_go_on_or_are_given_up_as_asked(sandbox):
    """X12: a handle goes on by itself where the memory was kept, and fails where the process is gone."""
    handle = await done(sandbox.commands.run("echo 1; read x; echo 2 $x", background=True, stdin=True, timeout=0))
    assert (await done(handle.read())).stdout == b"1\n"
    await done(sandbox.pause())
    await done(sandbox.resume())
    await done(handle.send_stdin("more\n"))
    assert (await done(handle.wait())).stdout == "1\n2 more\n"
    lost = await done(sandbox.commands.run("echo 1; exec sleep 600", background=True, timeout=0))
    assert (await done(lost.read())).stdout == b"1\n"
    await done(sandbox.pause(memory=False))
    await done(sandbox.resume())
    with pytest.raises(NotFoundException, match="process"):
        await done(lost.wait())
    assert lost.exit_code is None


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "files"])
async def test_variables_of_the_create_hold_over_a_pause(kind, gateway, memory):
    """P18, P15, P17: also in a sandbox that was started anew from its files, whose agent is another one."""
    show = 'printf "%s|" "$GIVEN" "$E2B_SANDBOX" "$E2B_SANDBOX_ID" "$FOR_ONE"'
    given = "1\n2 'é' \"$HOME\""
    box = await done(kind.create(state_dir=gateway.state_dir, envs={"GIVEN": given}))
    expected = f"{given}|true|{box.sandbox_id}||"
    try:
        assert (await done(box.commands.run(show))).stdout == expected
        assert (await done(box.commands.run("true", envs={"FOR_ONE": "yes", "GIVEN": "other"}))).exit_code == 0
        for _ in range(2):
            await done(box.pause(memory=memory))
            await done(box.resume())
            for user in ("user", "root"):
                assert (await done(box.commands.run(show, user=user))).stdout == expected
            assert (await done(box.commands.run(show, envs={"GIVEN": "mine"}))).stdout.startswith("mine|true|")
    finally:
        await done(box.kill())
        await done(box.close())


async def test_pauses_of_a_sandbox_that_is_gone_say_so(kind, gateway):
    box = await done(kind.create(state_dir=gateway.state_dir))
    await done(box.kill())
    for call in (box.pause, box.resume):
        with pytest.raises(NotFoundException, match=box.sandbox_id):
            await done(call())
    await done(box.close())
    with pytest.raises(SandboxException, match="closed"):
        await done(box.pause())


async def test_calls_at_the_same_time_join_one_pause(sandbox):
    """B42: each hears that it is paused now, and it is."""
    outcomes = await asyncio.gather(*(asyncio.create_task(done_in_turn(sandbox.pause)) for _ in range(5)))
    assert True in outcomes
    assert await state_of(sandbox) is SandboxState.PAUSED
    assert await done(sandbox.resume()) is True


async def done_in_turn(call) -> bool:
    """The blocking form in a thread of its own, so that calls are really at the same time."""
    outcome = await asyncio.to_thread(call)
    result: bool = await done(outcome)
    return result
