"""The agent behind a placement, as the core and its callers use it: for tests of backends, which have no core."""

from __future__ import annotations

import grpc

from sandgate_api.agent.v1 import agent_pb2, agent_pb2_grpc
from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_plugin_api import Placement, SandboxRequest

__all__ = ["init", "run"]


async def init(placement: Placement, request: SandboxRequest) -> None:
    """What the core tells the agent of a sandbox that was just made."""
    template = request.template
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        await agent_pb2_grpc.AgentStub(channel).Init(
            agent_pb2.InitRequest(
                sandbox_id=request.sandbox_id,
                template_id=template.id,
                envs=template.envs,
                default_user=template.default_user or "user",
                default_workdir=template.workdir,
            ),
            metadata=(("agent-token", placement.agent.token),),
            timeout=60,
        )


async def run(
    placement: Placement, command: str, user: str | None = None, *, shell: str = "/bin/bash", **envs: str
) -> tuple[int, str]:
    """Run a command line to its end: (exit code, what it wrote). ``user`` None: the sandbox's default one."""
    output, code = b"", None
    metadata: list[tuple[str, str | bytes]] = [("agent-token", placement.agent.token)]
    if user is not None:
        metadata.append(("acting-user-bin", user.encode()))
    args = ["-l", "-c", command] if shell == "/bin/bash" else ["-c", command]
    async with grpc.aio.insecure_channel(placement.agent.target) as channel:
        call = process_pb2_grpc.ProcessStub(channel).Start(
            process_pb2.StartRequest(process=process_pb2.ProcessConfig(cmd=shell, args=args, envs=envs), stdin=False),
            metadata=tuple(metadata),
            timeout=60,
        )
        async for response in call:
            output += response.event.data.stdout + response.event.data.stderr
            if response.event.HasField("end"):
                code = response.event.end.exit_code
    assert code is not None
    return code, output.decode(errors="replace")
