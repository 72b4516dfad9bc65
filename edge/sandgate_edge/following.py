"""Commands whose client has left, followed to their end for plugins that want to know of it.

A command runs on when its client goes away (T8), and then nobody here would learn when it ends. Where a plugin implements
``sandgate_command_ended``, the edge attaches to such a command, reads past its output, and tells the plugin at its end.
Without such a plugin nothing is followed: :func:`command` is a look into a dictionary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
from aiohttp import web
from google.protobuf.message import Message

from sandgate_api.envd.v1 import process_pb2
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENT_REQUEST, AGENTS, POLICY, REQUEST_ID

__all__ = ["command"]

Note = Callable[[Message], None]


@asynccontextmanager
async def command(request: web.Request, located: Located) -> AsyncIterator[Note]:
    """Around the stream of a request. What is yielded is to be told each message that the agent sends."""
    if not request.path.endswith("/Start") or not request.app[POLICY].has("sandgate_command_ended"):
        yield _note_nothing
        return
    watched = _Watched()
    try:
        yield watched.note
    except (asyncio.CancelledError, ConnectionError):
        watched.left = True
        raise
    finally:
        # Left before the agent's first word: whether it runs is not known, and it could not be found.
        if watched.ended or not watched.left:
            request.app[POLICY].command_ended(request[AGENT_REQUEST])
        elif watched.pid:
            request.app[POLICY].follow(request[AGENT_REQUEST], _to_its_end(request, located, watched.pid))


async def _to_its_end(request: web.Request, located: Located, pid: int) -> None:
    """Returns when the process has ended, or its sandbox has."""
    agents = request.app[AGENTS]
    selector = process_pb2.ProcessSelector(pid=pid)
    call = agents.process(located).Connect(
        process_pb2.ConnectRequest(process=selector),
        metadata=agents.metadata(located, request_id=request[REQUEST_ID]),
    )
    try:
        async for message in call:
            if message.event.HasField("end"):
                return
    except grpc.aio.AioRpcError:
        # Not found: it ended meanwhile. Whatever else: its sandbox is gone or as good as gone.
        pass
    finally:
        call.cancel()


class _Watched:
    """What the stream has shown so far."""

    def __init__(self) -> None:
        self.pid = 0
        self.ended = False
        self.left = False

    def note(self, message: Message) -> None:
        if isinstance(message, process_pb2.StartResponse):
            self.pid = self.pid or message.event.start.pid
            self.ended = self.ended or message.event.HasField("end")


def _note_nothing(message: Message) -> None:
    pass
