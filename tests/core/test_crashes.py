"""The core is killed at each step of each operation and started again: nothing is lost, left over or in between.

Real sandboxes of the process backend, plain ones, so that what is left over is a process that can be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.core.v1 import sandboxes_pb2, sandboxes_pb2_grpc
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_testing.leftovers import processes_of, sandboxes_of
from sandgate_testing.requirements import need

TOKEN = "the-internal-token-of-this-test"
KEY = "e2b_" + "ab" * 20
#: More steps than any operation has; guards against one that never ends.
MANY = 40
#: Seconds until a core that was killed counts as away, where a test waits for that.
LEASE = 2.0
PASSING = {"creating", "killing", "pausing", "resuming", "snapshotting"}
pytestmark = pytest.mark.timeout(600)


class Core:
    """The core in a process of its own."""

    def __init__(self, deployment, *, crash_at=0, isolation="none", lease=15.0):
        self._lease = lease
        self._isolation = isolation
        self._deployment = deployment
        self._armed = deployment.folder / "armed"
        self._armed.unlink(missing_ok=True)
        self._crash_at = crash_at

    async def __aenter__(self):
        folder = self._deployment.folder
        settings = {
            "state_dir": str(folder), "runtime_dir": str(folder), "database": self._deployment.database,
            "default_backend": "process", "backends": {"process": {"isolation": self._isolation, "warm": 0}},
            "internal_token": TOKEN, "seed": "5e" * 32, "first_key": KEY, "first_key_given": True,
            "envd_version": "0.6.13", "lease": self._lease,
        }  # fmt: skip
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sandgate_testing.crashing_core",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "CRASH_AT": str(self._crash_at), "CRASH_ARMED": str(self._armed),
                 "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        async with asyncio.timeout(60):
            answer = json.loads(await self.process.stdout.readline())
        assert answer["ready"], answer
        self._channel = grpc.aio.insecure_channel(f"unix:{folder / 'core.sock'}")
        self._stub = sandboxes_pb2_grpc.SandboxServiceStub(self._channel)
        return self

    async def __aexit__(self, *_):
        await self._channel.close()
        self.process.stdin.close()
        async with asyncio.timeout(60):
            await self.process.wait()

    async def call(self, method, **fields):
        request = getattr(sandboxes_pb2, f"{method}Request")(**fields)
        return await getattr(self._stub, method)(request, metadata=(("api-key", KEY),), timeout=60)

    async def create(self, **fields):
        made = await self.call("Create", template_id="base", timeout=Duration(seconds=3600), secure=True, **fields)
        return made.sandbox.id

    async def repeat(self, key):
        """A create once more, until it is not said to be under way: the id of its sandbox, or the slug of the refusal."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.create(idempotency_key=key)
                except grpc.aio.AioRpcError as error:
                    slug = dict(error.trailing_metadata()).get("error-code")
                    # Unavailable: a machine that stood still for longer than a lease.
                    if slug != "idempotency_in_progress" and error.code() is not grpc.StatusCode.UNAVAILABLE:
                        return slug
                    await asyncio.sleep(0.1)

    async def survives(self, operation) -> bool:
        """Arm the crash, run the operation; whether the core outlived it."""
        self._armed.touch()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await operation(self)
            self._armed.unlink()
            return True
        async with asyncio.timeout(60):
            await self.process.wait()
        assert self.process.returncode == -9
        return False

    async def shown(self):
        answer = await self.call("List", all=True)
        return {sandbox.id: sandbox.state for sandbox in answer.sandboxes}

    async def answers(self, sandbox_id) -> bool:
        """Whether its agent takes a call, by way of the relay."""
        metadata = (("api-key", KEY), ("sandbox-id", sandbox_id))
        stub = process_pb2_grpc.ProcessStub(self._channel)
        await stub.List(process_pb2.ListRequest(), metadata=metadata, timeout=60)
        return True


async def crash_at_each_step(deployment, prepare, operation, judge, *, isolation="none"):
    """Run ``operation`` with a crash at its first step, its second, and so on, until it comes to its end without one."""
    for number in range(1, MANY):
        async with Core(deployment, crash_at=number, isolation=isolation) as core:
            subject = await prepare(core)
            done = await core.survives(lambda core: operation(core, subject))  # noqa: B023 - called at once
        async with Core(deployment, isolation=isolation) as core:
            await in_order(deployment, core)
            await judge(core, subject, done=done)
            for sandbox_id in await core.shown():
                await core.call("Kill", id=sandbox_id)
        # With the core gone and every sandbox killed, nothing is left.
        assert processes_of(deployment.folder) == {}
        assert sandboxes_of(deployment.folder) == {}
        if done:
            return number
    raise AssertionError(f"the operation has more than {MANY} steps")


async def in_order(deployment, core):
    """No passing state, no sandbox that the store does not know, none in the store that does not exist."""
    async with asyncio.timeout(60):
        while True:
            states = dict(await deployment.sql("SELECT id, state FROM sandboxes"))
            if not PASSING & set(states.values()):
                break
            await asyncio.sleep(0.05)
    live = {name for name, state in states.items() if state in {"running", "paused"}}
    assert set(await core.shown()) == live
    assert set(sandboxes_of(deployment.folder)) == live
    for name in live:
        if states[name] == "running":
            assert await core.answers(name)


async def test_crash_in_create_leaves_a_whole_sandbox_or_none_and_a_repeat_no_second_one(deployment):
    """rest.md 1.4: the same one, where the first attempt came to a sandbox."""
    keys = (f"k-{number}" for number in itertools.count())

    async def prepare(_):
        return next(keys)

    async def judge(core, key, *, done):
        before = await core.shown()
        made = await core.repeat(key)
        assert await core.repeat(key) == made
        assert set(await core.shown()) == {made}
        assert before.keys() <= {made}
        assert before or not done

    steps = await crash_at_each_step(deployment, prepare, lambda core, key: core.create(idempotency_key=key), judge)
    # Both sides of the first write, of the backend's create and of the last write.
    assert steps > 6


async def test_create_on_a_core_that_died_is_not_made_twice_by_another(hosts):
    """rest.md 1.4: what became of it is unknown while its core is away, for sandboxes that are bound to that core's host."""
    first, second = hosts
    seen = set()
    async with Core(second, lease=LEASE) as living:
        for number in range(1, MANY):
            key = f"k-{number}"
            async with Core(first, crash_at=number, lease=LEASE) as core:
                done = await core.survives(lambda core: core.create(idempotency_key=key))  # noqa: B023 - called at once
            rows = await first.sql("SELECT id, state FROM sandboxes WHERE idempotency_key = :key", key=key)
            left, state = next(iter(rows), (None, None))
            answer = await living.repeat(key)
            seen.add(state)
            # Nothing was begun, it is unknown, or it is there.
            assert answer == {"creating": "idempotency_outcome_unknown", "running": left}.get(state, answer)
            async with Core(first, lease=LEASE):
                made = await living.repeat(key)
                assert made == (left if state == "running" else answer if state is None else made)
                assert set(await living.shown()) == {made}
                await living.call("Kill", id=made)
            if done:
                break
        assert seen == {None, "creating", "running"}
    for host in hosts:
        assert processes_of(host.folder) == {}
        assert sandboxes_of(host.folder) == {}


async def test_killed_sandbox_stays_dead_and_one_that_was_not_lives(deployment):
    async def judge(core, subject, *, done):
        ((state,),) = await deployment.sql("SELECT state FROM sandboxes WHERE id = :id", id=subject)
        assert state in ({"killed"} if done else {"running", "killed"})

    steps = await crash_at_each_step(
        deployment, lambda core: core.create(), lambda core, subject: core.call("Kill", id=subject), judge
    )
    assert steps > 6


async def test_crash_in_pause_leaves_a_sandbox_that_is_paused_or_runs(deployment):
    async def judge(core, subject, *, done):
        assert set(await core.shown()) == {subject}
        await core.call("Connect", id=subject, timeout=Duration(seconds=600))
        assert await core.answers(subject)

    steps = await crash_at_each_step(
        deployment, lambda core: core.create(), lambda core, subject: core.call("Pause", id=subject), judge
    )
    assert steps > 6


async def test_crash_in_resume_leaves_a_sandbox_that_can_be_resumed(deployment):
    async def prepare(core):
        subject = await core.create()
        await core.call("Pause", id=subject)
        return subject

    async def judge(core, subject, *, done):
        assert set(await core.shown()) == {subject}
        await core.call("Connect", id=subject, timeout=Duration(seconds=600))
        assert await core.answers(subject)

    steps = await crash_at_each_step(
        deployment,
        prepare,
        lambda core, subject: core.call("Connect", id=subject, timeout=Duration(seconds=600)),
        judge,
    )
    assert steps > 6


def snapshots_of(folder):
    """What the backend keeps, whole or half made."""
    place = folder / "backends" / "process" / "snapshots"
    return {path.name for path in place.iterdir()} if place.exists() else set()


async def rows_and_copies_agree(deployment):
    """What was left over is given up soon after a start: every copy has its row, every row its copy."""
    async with asyncio.timeout(60):
        while True:
            rows = dict(await deployment.sql("SELECT content, state FROM snapshots"))
            if set(rows.values()) <= {"ready"} and snapshots_of(deployment.folder) == set(rows):
                return rows
            await asyncio.sleep(0.05)


async def test_crash_in_a_snapshot_leaves_a_whole_one_or_none_and_a_sandbox_that_runs(deployment):
    """Of the second one with a name, so that one is there that it replaces."""
    need("bubblewrap")

    async def prepare(core):
        subject = await core.create()
        await core.call("CreateSnapshot", id=subject, name="kept")
        return subject

    async def judge(core, subject, *, done):
        assert set(await core.shown()) == {subject}
        rows = await rows_and_copies_agree(deployment)
        assert len(rows) == 1
        assert len((await core.call("ListSnapshots")).snapshots) == 1
        await core.call("Create", template_id="kept", timeout=Duration(seconds=600))
        # The next snapshot of the sandbox is not in the way of anything.
        await core.call("CreateSnapshot", id=subject)
        for snapshot in (await core.call("ListSnapshots")).snapshots:
            await core.call("DeleteSnapshot", id=snapshot.id)
        assert await rows_and_copies_agree(deployment) == {}

    steps = await crash_at_each_step(
        deployment,
        prepare,
        lambda core, subject: core.call("CreateSnapshot", id=subject, name="kept"),
        judge,
        isolation="bubblewrap",
    )
    assert steps > 6
