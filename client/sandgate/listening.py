"""The listening socket: bound by the front, before anything else starts, and inherited by the edge workers.

So a taken port is known at once, a dead worker's successor finds the same socket, and connections wait in its backlog
meanwhile.
"""

from __future__ import annotations

import errno
import os
import socket

from sandgate_errors import FailedPrecondition

__all__ = ["bind", "url_of"]

_BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises FailedPrecondition with one line for the operator."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise FailedPrecondition(f"cannot listen on '{host}': {reason}: choose another with --host") from error
    family, _, _, _, address = found[0]
    # "::" is meant as everywhere; without this it would be IPv6 only or not, as the system pleases.
    dual = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    try:
        # No SO_REUSEPORT: a second gateway would then share the port instead of being told.
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        raise FailedPrecondition(_refusal(error, host, port)) from error
    listener.setblocking(False)
    return listener


def _refusal(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use (by another gateway?): choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed for this user: choose one from 1024 up with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: choose another with --host"
    return f"cannot listen on port {port} of {host}: {os.strerror(error.errno or 0)}"


def url_of(host: str, listener: socket.socket) -> str:
    """What clients on this machine put into ``E2B_API_URL``."""
    port: int = listener.getsockname()[1]
    if host in {"0.0.0.0", "::"}:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
