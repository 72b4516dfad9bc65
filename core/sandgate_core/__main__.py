"""``python -m sandgate_core``: the core as a child of the front (docs/architecture.md, "Processes of `sandgate serve`").

One line of settings comes in on standard input, one ready line goes out on standard output, log lines go to standard
error. The end of standard input, SIGTERM and SIGINT are the order to stop. What keeps the core from starting is one line
for the operator and status 1.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import sys
from typing import IO

# gRPC reads it when it is loaded: a call then passes through one thread of its own and not three (docs/performance.md).
os.environ.setdefault(
    "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
)

import structlog

from sandgate_core import logs
from sandgate_core.settings import Settings
from sandgate_errors import FailedPrecondition, SandgateError

#: Bytes. Far more than any configuration, and a bound on what a mistaken caller may pour in.
_LONGEST_LINE = 1024 * 1024
_log = structlog.get_logger("sandgate_core")


def main() -> int:
    # Ours alone from here on: a stray print in a library or plugin must not pass for the ready line.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        settings = Settings.parse(sys.stdin.buffer.readline(_LONGEST_LINE))
        logs.configure(settings.log_level)
        # A channel and a watched process for each sandbox: the usual 1,024 would end at a few hundred of them.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # Never closed: that waits for every task, and one may be a plugin's that does not obey. All that is ours has ended.
        asyncio.Runner().run(_run(settings, answer))
    except SandgateError as error:
        return _give_up(answer, error.message)
    except OSError as error:
        return _give_up(
            answer, f"the core cannot start: {error.strerror or error}: {error.filename or ''}".rstrip(": ")
        )
    except Exception as error:
        _log.exception("the core failed")
        return _give_up(answer, f"the core cannot start: {type(error).__name__}; the log has the details")
    return 0


async def _run(settings: Settings, answer: IO[str]) -> None:
    stop = _order_to_stop()
    ordered = asyncio.create_task(stop.wait())
    ready = asyncio.Event()
    serving = asyncio.create_task(_serve(settings, answer, stop=stop, ready=ready))
    await asyncio.wait({serving, ordered}, return_when=asyncio.FIRST_COMPLETED)
    ordered.cancel()
    if not ready.is_set():
        serving.cancel()  # the order came during the start, which may wait long for a backend or the lock
    try:
        await serving
    except asyncio.CancelledError:
        pass


async def _serve(settings: Settings, answer: IO[str], *, stop: asyncio.Event, ready: asyncio.Event) -> None:
    # Loaded here, not above: a mistake in the settings is answered before gRPC and the database are.
    from sandgate_core.backends import open_backends
    from sandgate_core.locking import state_lock
    from sandgate_core.server import run_core

    for folder in (settings.state_dir, settings.runtime_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with (
        state_lock(settings.state_dir),
        open_backends(
            settings.backend_tables, state_dir=settings.state_dir, runtime_dir=settings.runtime_dir
        ) as backends,
        run_core(settings, backends) as core,
    ):
        ready.set()
        # What was loaded stays for good: a collection that walks all of it holds every call up for tens of milliseconds.
        gc.freeze()
        _write(answer, {"ready": True, "first_key_created": core.first_key_created})
        await _until(stop, core.lost)
        _log.info("the core stops")


async def _until(stop: asyncio.Event, lost: asyncio.Event | None) -> None:
    """Returns when the core is ordered to stop. Raises FailedPrecondition when another has taken its place."""
    waits = {asyncio.create_task(event.wait()) for event in (stop, lost) if event is not None}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
    if lost is not None and lost.is_set():
        raise FailedPrecondition(
            "another core has this one's node id on the database: it was started on a copy of the state directory"
        )


def _order_to_stop() -> asyncio.Event:
    """Set when the core is to stop; watched from the beginning, so that a start can be called off."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def read() -> None:
        # Anything but the end is ignored by the protocol: nothing follows the settings line.
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    try:
        loop.add_reader(0, read)
    except PermissionError:
        raise FailedPrecondition("standard input must be a pipe or a socket: its end is the order to stop") from None
    return stop


def _give_up(answer: IO[str], reason: str) -> int:
    _write(answer, {"ready": False, "error": " ".join(reason.split())})
    return 1


def _write(answer: IO[str], line: dict[str, object]) -> None:
    try:
        answer.write(json.dumps(line) + "\n")
        answer.flush()
    except BrokenPipeError:
        pass  # the front is gone; the end of standard input says so too


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
