"""``python -m sandgate_edge``: one of the edge processes that ``sandgate serve`` runs (docs/architecture.md).

Reads its settings, one line of JSON, from standard input; says on standard output that it is ready or why it is not; and
ends when standard input ends, however the front went, or on SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import sys

# gRPC reads it when it is loaded. Its own lines are not JSON, and what they say reaches us as status as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# So is this: a call then passes through one thread of gRPC's and not three, for half the time (docs/performance.md).
os.environ.setdefault(
    "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
)

import structlog
import uvloop
from pydantic import ValidationError

from sandgate_edge import logs
from sandgate_edge.allocator import keep_freed_pieces
from sandgate_edge.app import build
from sandgate_edge.server import Server
from sandgate_edge.settings import Settings
from sandgate_errors import SandgateError

# A settings line is a few hundred bytes.
_MAX_LINE_BYTES = 1024 * 1024


def main() -> int:
    try:
        settings = _settings(sys.stdin.buffer.readline(_MAX_LINE_BYTES))
        logs.configure(settings.log_level)
        keep_freed_pieces()
        _allow_descriptors()
        # Never closed: that waits for every task, and one may be a plugin's that does not obey. All that is ours has ended.
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(settings))
    except _NotReady as error:
        _say({"ready": False, "error": str(error)})
        return 1
    return 0


def _allow_descriptors() -> None:
    """As many as the machine lets us have: each open stream is one connection, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _NotReady(Exception):
    """Why the edge cannot start, as one line for the operator."""


def _settings(line: bytes) -> Settings:
    try:
        return Settings.model_validate_json(line)
    except ValidationError as error:
        # Field and reason only: the value may be the internal token.
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'line'}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False, include_context=False)
        )
        raise _NotReady(f"edge settings: {faults}") from None


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # A terminal sends it to the front as well, and the front says in which order its children end.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        server = Server(build(settings))
    except SandgateError as error:
        raise _NotReady(error.message) from error
    try:
        await server.start(_listening(settings.listen_fd))
        stdin, _ = await loop.connect_read_pipe(lambda: _Lifeline(stop), sys.stdin)
    except SandgateError as error:
        await server.close()
        raise _NotReady(error.message) from error
    except OSError as error:
        await server.close()
        raise _NotReady(f"edge cannot start: {error.strerror or error}") from error
    # What was loaded stays for good: a collection that walks all of it holds every request up for tens of milliseconds.
    gc.freeze()
    _say({"ready": True})
    await stop.wait()
    stdin.close()
    await server.close()
    structlog.get_logger(__name__).info("edge stopped")


def _listening(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise _NotReady(f"listen_fd {fd} is not a listening socket")
    return sock


class _Lifeline(asyncio.Protocol):
    """Standard input after the settings line: its end is the order to stop; what else comes is not for us."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def connection_lost(self, _error: Exception | None) -> None:
        self._stop.set()


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - the ready line is this process's interface


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
