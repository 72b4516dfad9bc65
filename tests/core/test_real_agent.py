"""The core with the real agent in a process of its own: create, the relayed calls a service makes, a restart, kill."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_errors import SandboxNotFound
from sandgate_errors.grpc import from_status
from sandgate_plugin_api import AgentAddress, Placement


@pytest.fixture
def backend(deployment, folder, make_backend):
    """Sandboxes that are agents started as a backend starts them."""

    class AgentBackend(make_backend):
        def __init__(self, world):
            super().__init__(world)
            self.agents = {}

        async def create(self, request, handle):
            home = folder / request.sandbox_id
            home.mkdir()
            target = f"unix:{folder / request.sandbox_id[:8]}.sock"
            bootstrap = {
                "listen": target,
                "token": "token",
                "identity": "same",
                "accounts": {"user": {"home": str(home)}},
                "system_files": False,
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sandgate_agent",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            placement = Placement(handle=dict(handle), agent=AgentAddress(target=target, token="token"))
            self.agents[request.sandbox_id] = (process, placement)
            process.stdin.write(json.dumps(bootstrap).encode() + b"\n")
            answer = json.loads(await process.stdout.readline())
            assert answer == {"ready": True}
            return placement

        async def locate(self, handle):
            found = self.agents.get(handle["id"])
            return None if found is None else found[1]

        async def survey(self):
            return []

        async def destroy(self, handle):
            if (found := self.agents.pop(handle["id"], None)) is not None:
                found[0].terminate()
                await found[0].wait()
                found[0].stdin.close()

    deployment.backend = AgentBackend(deployment.world)
    return deployment.backend


async def test_command_runs_through_the_relay_and_outlives_the_core(backend, deployment):
    async with deployment.core() as core:
        made = await core.owner.create(envs={"GREETING": "hello"})
        metadata = (*core.owner.credentials, ("sandbox-id", made.id))
        processes = process_pb2_grpc.ProcessStub(core.owner.channel)
        start = process_pb2.StartRequest(
            process={"cmd": "/bin/bash", "args": ["-c", "echo $GREETING $E2B_SANDBOX_ID; exit 3"]}
        )
        events = [answer.event async for answer in processes.Start(start, metadata=metadata)]
        assert events[0].start.pid > 0
        assert b"".join(event.data.stdout for event in events) == f"hello {made.id}\n".encode()
        assert events[-1].end.exit_code == 3
        sleeper = process_pb2.StartRequest(process={"cmd": "sleep", "args": ["1000"]}, tag="sleeper")
        stream = processes.Start(sleeper, metadata=metadata)
        assert (await stream.read()).event.start.pid > 0
        stream.cancel()
    async with deployment.core() as core:
        metadata = (*core.owner.credentials, ("sandbox-id", made.id))
        processes = process_pb2_grpc.ProcessStub(core.owner.channel)
        running = (await processes.List(process_pb2.ListRequest(), metadata=metadata)).processes
        assert [process.tag for process in running] == ["sleeper"]
        stream = processes.Connect(process_pb2.ConnectRequest(process={"tag": "sleeper"}), metadata=metadata)
        await stream.read()
        await core.owner.call("Kill", id=made.id)
        code, details = await stream.code(), await stream.details()
        error = from_status(code, details, tuple(await stream.trailing_metadata()))
        assert type(error) is SandboxNotFound
    assert not backend.agents


async def test_file_goes_in_and_out_through_the_relay(backend, deployment):
    async with deployment.core(on_exit="kill") as core:
        made = await core.owner.create()
        metadata = (*core.owner.credentials, ("sandbox-id", made.id))
        agent = agent_pb2_grpc.AgentStub(core.owner.channel)
        content = bytes(range(256)) * 20_000

        async def pieces():
            yield agent_pb2.WriteFileRequest(header={"path": "big"})
            for start in range(0, len(content), 100_000):
                yield agent_pb2.WriteFileRequest(data=content[start : start + 100_000])

        written = await agent.WriteFile(pieces(), metadata=metadata)
        assert written.entry.size == len(content)
        read = [part.data async for part in agent.ReadFile(agent_pb2.ReadFileRequest(path="big"), metadata=metadata)]
        assert b"".join(read) == content
