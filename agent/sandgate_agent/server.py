"""The agent's gRPC server, from the first listening socket to the last process (docs/architecture.md)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio

from sandgate_agent.accounts import Accounts
from sandgate_agent.calls import generic_handler
from sandgate_agent.elevation import Elevation
from sandgate_agent.handover import Handover
from sandgate_agent.health import Health
from sandgate_agent.journal import Journal
from sandgate_agent.launcher import Launcher
from sandgate_agent.listeners import Listeners
from sandgate_agent.metrics import Meter
from sandgate_agent.orphans import reap_as_first_process
from sandgate_agent.processes import Processes
from sandgate_agent.sandbox import Sandbox
from sandgate_agent.services import AgentService, FilesystemService, ProcessService
from sandgate_agent.settings import BadSettings, Settings
from sandgate_agent.tunnels import Tunnels
from sandgate_agent.watch import Watchers
from sandgate_errors import Unauthenticated, Unavailable

__all__ = ["serve"]

log = logging.getLogger(__name__)

#: File work blocks for as long as a disk or a network file system does; others must not wait behind it.
_THREADS = 32
#: From SIGTERM to the last byte of an ordinary stream. A backend kills what is left after about two seconds.
_GRACE_SECONDS = 0.3
_OPTIONS = (
    # A Start may carry megabytes of arguments, so that the system and not the transport says what is too long.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    # A piece of a file in one frame, not in thirty.
    ("grpc.http2.max_frame_size", 1024 * 1024),
    # A taken port is an error and not shared.
    ("grpc.so_reuseport", 0),
)


async def serve(settings: Settings, *, control: socket.socket, root_spawner: int, ready: Callable[[], None]) -> int:
    """Serve until SIGTERM; the exit status. ``ready`` is called when calls are accepted.

    Raises BadSettings when the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    _raise_descriptor_limit()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="files"))
    stop: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _finish, stop, 0)
    reap_as_first_process()

    accounts = Accounts(settings.identity, settings.accounts)
    launcher = Launcher(
        control, root_spawner, switches_users=accounts.owns_files, on_root_lost=lambda: _finish(stop, 1)
    )
    journal = Journal()
    processes = Processes(launcher, journal)
    elevation = _open_elevation(settings, accounts, launcher)
    sandbox = Sandbox(
        accounts, system_files=settings.system_files, programs=elevation.programs if elevation is not None else None
    )
    watchers = Watchers()
    listeners = Listeners(root_spawner) if settings.network == "shared" else None
    tunnels = Tunnels(listeners, closed=settings.closed_ports)
    meter = Meter(settings.measured)
    agent_service = AgentService(
        sandbox, tunnels, journal, warm=launcher.warm, measure=lambda: asyncio.to_thread(meter.measure)
    )
    services = (ProcessService(processes, sandbox), FilesystemService(sandbox, watchers), agent_service)
    health = Health(frozenset(service.name for service in services))
    server = grpc.aio.server(options=_OPTIONS)
    token = settings.token.encode()
    server.add_generic_rpc_handlers(
        (*(generic_handler(service.name, service.methods(), token) for service in services), health.handler())
    )
    handover = None
    try:
        handover = _open_handover(settings, token, agent_service)
        await _listen(server, settings)
        _warm_usual_account(accounts, launcher)
        # What was loaded stays for good: a collection that walks all of it holds every call up.
        gc.freeze()
        gc.enable()
        ready()
        status = await stop
        if status != 0:
            log.error("the root spawner is gone: nothing can be started any more")
        return status
    finally:
        health.stop()
        watchers.close()
        if elevation is not None:
            elevation.close()
        if handover is not None:
            handover.close()
        await processes.close(Unavailable("the sandbox is ending"))
        await server.stop(_GRACE_SECONDS)
        await launcher.close()


async def _listen(server: grpc.aio.Server, settings: Settings) -> None:
    address = settings.listen
    path = address.removeprefix("unix:")
    try:
        if settings.tls is None:
            port = server.add_insecure_port(address)
        else:
            pair = (settings.tls.key.encode(), settings.tls.certificate.encode())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        await server.start()
    except RuntimeError as error:
        raise BadSettings(f"cannot listen on {address}: {error}") from None
    if port == 0:
        raise BadSettings(f"cannot listen on {address}")
    if path != address:
        os.chmod(path, _socket_mode(settings))
    if settings.folder is not None:
        # Whoever could read this process's descriptors could otherwise put something else in the socket's place.
        os.close(settings.folder)


def _socket_mode(settings: Settings) -> int:
    """A folder without a path keeps strangers away by itself; root in here may be nobody out there, where the callers are."""
    return 0o600 if settings.folder is None else 0o666


def _open_handover(settings: Settings, token: bytes, service: AgentService) -> Handover | None:
    """Where callers may be on the same machine. What stands in its way is said in the log: calls carry content too."""
    path = settings.listen.removeprefix("unix:")
    if path == settings.listen:
        return None
    handover = Handover(path, token=token, opener=service.open_to_hand_over)
    try:
        handover.open(mode=_socket_mode(settings))
    except OSError as error:
        log.warning("files will not be handed over: %s", error)
        handover.close()
        return None
    return handover


def _open_elevation(settings: Settings, accounts: Accounts, launcher: Launcher) -> Elevation | None:
    """A sandbox without `sudo` is still one: what its root file system does not allow is said in the log."""
    if settings.sudo is None:
        return None
    elevation = Elevation(settings.sudo, accounts=accounts, launcher=launcher)
    try:
        elevation.open()
    except OSError as error:
        log.warning("there is no sudo in this sandbox: %s", error)
        elevation.close()
        return None
    return elevation


def _warm_usual_account(accounts: Accounts, launcher: Launcher) -> None:
    """Nearly every sandbox acts as `user` first; Init tells, but comes when the first command is already near."""
    try:
        launcher.warm(accounts.find("user"))
    except Unauthenticated:
        log.debug("there is no user 'user' yet")


def _raise_descriptor_limit() -> None:
    """Each process takes up to four descriptors. After the spawners are forked: programs keep the usual limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _finish(stop: asyncio.Future[int], status: int) -> None:
    if not stop.done():
        stop.set_result(status)
