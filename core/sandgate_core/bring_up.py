"""What happens in a sandbox between its agent's first answer and the moment it is shown to anybody.

The agent is told whose sandbox it is in. Then the template's start command is started, in the background, and its ready
command repeated until it succeeds; both as a client's commands are, by the sandbox's default user. The same each time a
sandbox starts on its files, after a resume too: nothing of it is left running by then.

Following: ``plugins/api`` (``Template``), ``protos/sandgate_api/envd/v1/process.proto``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_core.agents import AGENT_TOKEN, Agents
from sandgate_core.records import SandboxRecord
from sandgate_errors import DeadlineExceeded, Internal
from sandgate_plugin_api import AgentAddress

__all__ = ["BringUp"]

#: Seconds between two attempts of a ready command.
_PAUSE = 0.3
#: Bytes of a command's error output that are kept, and characters of them that a client is told.
_KEPT_BYTES = 4096
_TOLD = 300
_log = structlog.get_logger(__name__)


@dataclass
class _Command:
    """One command that was started, and what is known of it so far."""

    call: Any
    errors: bytearray = field(default_factory=bytearray)
    #: What it ended with, in words; None while it runs.
    end: str | None = None
    succeeded: bool = False

    async def follow(self) -> None:
        """Read to its end. Raises AioRpcError when the agent goes away."""
        while (message := await self.call.read()) is not grpc.aio.EOF:
            event = message.event
            match event.WhichOneof("event"):
                case "data":
                    self.errors += event.data.stderr
                    del self.errors[:-_KEPT_BYTES]
                case "end":
                    self.succeeded = event.end.exited and event.end.exit_code == 0
                    self.end = event.end.status or f"exit status {event.end.exit_code}"

    def last_words(self) -> str:
        text = " ".join(self.errors.decode(errors="replace").split())
        return f": {text[-_TOLD:]}" if text else ""


class BringUp:
    """Readies sandboxes through their agents."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def run(self, address: AgentAddress, record: SandboxRecord, *, patience: float) -> None:
        """Returns when the sandbox can be used, within ``patience`` seconds.

        Raises Internal with the command's own words when the template's commands fail, DeadlineExceeded with them when it
        is not ready in time.
        """
        await self._agents.init(address, record)
        setup = record.setup
        if not (setup.start_command or setup.ready_command):
            return
        async with self._agents.channel(address.target) as channel:
            stub = process_pb2_grpc.ProcessStub(channel)
            try:
                await _commands(stub, address, record, patience=patience)
            except grpc.aio.AioRpcError as error:
                _log.error("a template's commands could not be run", sandbox=record.id, details=error.details())
                # In the agent's words; those of the transport would speak of the host.
                lost = error.code() is grpc.StatusCode.UNAVAILABLE
                reason = "its agent does not answer" if lost else error.details()
                raise Internal(
                    f"the commands of template '{record.template_id}' could not be run: {reason}", should_retry=False
                ) from error


async def _commands(stub: Any, address: AgentAddress, record: SandboxRecord, *, patience: float) -> None:
    setup = record.setup
    deadline = asyncio.get_running_loop().time() + patience
    async with _started(stub, address, setup.start_command) as service:
        if setup.ready_command:
            await _ready(stub, address, record, service=service, deadline=deadline)


async def _ready(
    stub: Any, address: AgentAddress, record: SandboxRecord, *, service: _Command | None, deadline: float
) -> None:
    """The ready command until it succeeds, as long as the start command has not failed."""
    loop = asyncio.get_running_loop()
    last = _Command(call=None)
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                _check(service, record)
                # The agent ends one that hangs, so that none is left when this gives up.
                limit = max(1, round(1000 * (deadline - loop.time())))
                async with _started(stub, address, record.setup.ready_command, limit=limit, followed=False) as attempt:
                    assert attempt is not None  # noqa: S101 - there is a command
                    last = attempt
                    await attempt.follow()
                if last.succeeded:
                    return
                await asyncio.sleep(_PAUSE)
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise DeadlineExceeded(
            f"the sandbox was not ready in time: the ready command of template '{record.template_id}' has "
            f"{last.end or 'not ended'}{last.last_words()}",
            should_retry=False,
        ) from None


def _check(service: _Command | None, record: SandboxRecord) -> None:
    if service is not None and service.end is not None and not service.succeeded:
        raise Internal(
            f"the start command of template '{record.template_id}' failed: {service.end}{service.last_words()}",
            should_retry=False,
        )


@asynccontextmanager
async def _started(
    stub: Any, address: AgentAddress, command: str, *, limit: int | None = None, followed: bool = True
) -> AsyncIterator[_Command | None]:
    """A command that runs when the block begins; it is left alone when the block ends. None where there is none."""
    if not command:
        yield None
        return
    metadata = [(AGENT_TOKEN, address.token)]
    if limit is not None:
        metadata.append(("timeout-ms", str(limit)))
    config = process_pb2.ProcessConfig(cmd="/bin/bash", args=["-l", "-c", command])
    call = stub.Start(process_pb2.StartRequest(process=config, stdin=False), metadata=metadata)
    try:
        await call.read()
        started = _Command(call=call)
        if not followed:
            yield started
            return
        following = asyncio.create_task(started.follow())
        try:
            yield started
        finally:
            following.cancel()
            await asyncio.wait({following})
            if not following.cancelled():
                following.exception()  # the agent's going away is told by the next call to it
    finally:
        call.cancel()
