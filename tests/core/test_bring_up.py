"""What a template has run in a sandbox before anybody sees it, with the real agent (``Template`` of the plugin contract)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from sandgate_api.agent.v1 import agent_pb2_grpc
from sandgate_core.agents import Agents
from sandgate_core.records import SandboxRecord
from sandgate_core.states import State
from sandgate_errors import DeadlineExceeded, Internal
from sandgate_plugin_api import AgentAddress, Capability, Placement, Resources, Template
from tests.core.conftest import Agent

RESOURCES = Resources(cpu_count=1, memory_mb=64, disk_size_mb=64)


@pytest.fixture
async def backend(deployment, folder, make_backend):
    """Sandboxes that are agents started as a backend starts them; a pause ends the agent and keeps the home."""

    class AgentBackend(make_backend):
        capabilities = frozenset({Capability.PAUSE_FILESYSTEM})

        def __init__(self, world):
            super().__init__(world)
            self.template = Template(id="base", resources=RESOURCES)
            self.agents = {}

        async def templates(self):
            return [self.template]

        def home(self, sandbox_id):
            return folder / sandbox_id

        async def create(self, request, handle):
            (self.home(request.sandbox_id) / "sub").mkdir(parents=True)
            return await self.begin(handle)

        async def begin(self, handle):
            home = self.home(handle["id"])
            target = f"unix:{folder / handle['id'][:8]}.sock"
            line = {
                "listen": target,
                "token": "token",
                "identity": "same",
                "accounts": {"user": {"home": str(home)}, "other": {"home": str(home / "sub")}},
                "system_files": False,
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sandgate_agent",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self.agents[handle["id"]] = process
            process.stdin.write(json.dumps(line).encode() + b"\n")
            assert json.loads(await process.stdout.readline()) == {"ready": True}
            return Placement(handle=dict(handle), agent=AgentAddress(target=target, token="token"))

        async def pause(self, handle, *, memory):
            await self.destroy(handle)
            return handle

        async def resume(self, handle):
            return await self.begin(handle)

        async def survey(self):
            return []

        async def locate(self, handle):
            return None

        async def destroy(self, handle):
            process = self.agents.pop(handle["id"], None)
            if process is not None:
                process.send_signal(signal.SIGTERM)
                await process.wait()
                process.stdin.close()

    deployment.backend = AgentBackend(deployment.world)
    yield deployment.backend
    for name in list(deployment.backend.agents):
        await deployment.backend.destroy({"id": name})


@pytest.fixture
def database():
    """What happens in a sandbox does not depend on the store."""


def template(**fields):
    return Template(id="base", resources=RESOURCES, **fields)


async def test_commands_have_the_template_s_user_folder_and_variables(deployment, backend, folder):
    backend.template = template(
        envs={"KIND": "template", "SAME": "template"},
        default_user="other",
        workdir="/",
        ready_command='echo "$KIND $SAME $PWD $HOME" > ~/seen',
    )
    async with deployment.core() as core:
        box = await core.owner.create(envs={"SAME": "create"})
        home = backend.home(box.id)
        assert (home / "sub" / "seen").read_text() == f"template create / {home / 'sub'}\n"


async def test_sandbox_is_shown_when_it_is_ready_and_its_start_command_runs_on(deployment, backend):
    backend.template = template(
        start_command="echo began; sleep 0.4; echo up > up; exec sleep 1000", ready_command="test -e up"
    )
    async with deployment.core() as core:
        box = await core.owner.create()
        assert (backend.home(box.id) / "up").read_text() == "up\n"
        # Not ended with the stream that the core has left (T8).
        (backend.home(box.id) / "up").unlink()
        await core.owner.call("Pause", id=box.id, memory=False)
        # On a resume that starts anew, all of it again.
        await core.owner.call("Connect", id=box.id, timeout=Duration(seconds=60))
        assert (backend.home(box.id) / "up").read_text() == "up\n"
        await core.owner.call("Kill", id=box.id)


async def test_failed_start_command_fails_the_create_with_its_own_words(deployment, backend):
    backend.template = template(start_command="echo reasons >&2; exit 7", ready_command="test -e never")
    async with deployment.core() as core:
        with pytest.raises(Internal, match=r"start command of template 'base' failed: exit status 7: reasons"):
            await core.owner.create()
        assert await core.owner.ids() == []
    assert backend.agents == {}


async def test_start_command_that_ends_well_may_have_left_a_daemon(deployment, backend):
    backend.template = template(
        start_command="(sleep 0.3; touch up) >/dev/null 2>&1 & exit 0", ready_command="test -e up"
    )
    async with deployment.core() as core:
        assert await core.owner.create()


@pytest.mark.parametrize(
    ("ready", "said"),
    [("echo not yet >&2; false", "exit status 1: not yet"), ("echo hangs >&2; sleep 100", "not ended")],
)
async def test_sandbox_that_is_not_ready_in_time_says_why(deployment, backend, ready, said):
    backend.template = template(ready_command=ready)
    async with deployment.core(create_timeout=2) as core:
        with pytest.raises(DeadlineExceeded, match=said):
            await core.owner.create()
        assert await core.owner.ids() == []
    assert backend.agents == {}


async def test_new_agent_is_told_and_not_the_one_that_was_at_its_address_before(folder):
    """A sandbox that starts anew on its files; the connection to what it was need not have ended in that moment."""
    record = SandboxRecord(
        id="ibox", owner="o", backend="b", template_id="t", alias="", state=State.RUNNING, created_at=0, timeout=0,
        resources=RESOURCES, handle={},
    )  # fmt: skip
    target, agents = f"unix:{folder}/a.sock", Agents()
    async with AsyncExitStack() as closing:
        closing.push_async_callback(agents.close)
        told = []
        for _ in range(2):
            agent = Agent("token")
            server = grpc.aio.server()
            agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
            server.add_insecure_port(target)
            await server.start()
            closing.push_async_callback(server.stop, 0)
            await agents.init(AgentAddress(target=target, token="token"), record)
            told.append(len(agent.inits))
            # It lives on, where nobody finds it.
            (folder / "a.sock").rename(folder / f"{len(told)}.sock")
        assert told == [1, 1]
