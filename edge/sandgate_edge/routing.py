"""From a request of the data plane to the sandbox it is for: which one, is it there, may this caller.

A sandbox is named by host (``<port>-<id>.<domain>``) or by headers (``E2b-Sandbox-Id`` with ``E2b-Sandbox-Port``); the
host wins, because it is what a user's own traffic is addressed by. Where nothing names one, its access token does
(:mod:`sandgate_edge.bearers`). Behaviour rules R1 to R4, R13, R14 and S1 to S3.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
import grpc.aio
from aiohttp import web
from multidict import CIMultiDictProxy

from sandgate_edge.agents import error_of
from sandgate_edge.core_client import Located
from sandgate_edge.keys import AGENTS, BEARERS, CORE, NAMED, POLICY, PORT, REQUEST_ID, SANDBOX_ID, SETTINGS
from sandgate_errors import (
    InvalidArgument,
    PermissionDenied,
    SandboxNotFound,
    SandboxUnreachable,
    SandgateError,
    Unauthenticated,
)

__all__ = [
    "AGENT_PORT",
    "FIRST_MESSAGE_SECONDS",
    "ID_HEADER",
    "REPLY_SECONDS",
    "Access",
    "NamedInVain",
    "PortClosed",
    "SandboxGone",
    "admit",
    "answering",
    "brings_token",
    "check_access_token",
    "cut",
    "is_on_host_of_sandbox",
    "locate",
    "locate_by_id",
    "lost",
    "named_by",
    "reset",
    "sandbox_id_of",
]

#: Raises Unauthenticated unless the request may reach the sandbox.
Access: TypeAlias = Callable[[Located], None]

AGENT_PORT = 49983
#: Until the first message of a stream or a file. The agent sends it as soon as it has begun (T9); one that is stopped, by
#: root in its sandbox, sends none, and its connection looks well.
FIRST_MESSAGE_SECONDS = 30.0
#: Until the reply of a unary call whose client set no limit: to list or remove a huge tree takes a while.
REPLY_SECONDS = 120.0
ID_HEADER = "E2b-Sandbox-Id"
_PORT_HEADER = "E2b-Sandbox-Port"
_TOKEN_HEADER = "X-Access-Token"  # noqa: S105 - the name of a header

# `id` or `id-clientID` (C4); only the first part says which sandbox.
_NAME = re.compile(r"(?P<id>[a-z0-9]{1,64})(?:-[a-z0-9]{1,64})?", re.ASCII)
_HOST_LABEL = re.compile(r"(?P<port>[0-9]+)-(?P<name>.+)", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_PYTHON_SDK = re.compile(r"e2b-python-sdk/(?P<major>[0-9]{1,6})\.(?P<minor>[0-9]{1,6})\.", re.ASCII)
_READS_RESETS = (2, 45)
# Zero seconds of linger: closing discards what is queued and sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)


class SandboxGone(SandboxNotFound):
    """The data plane's form of a missing sandbox: clients learn it by status 502 and a fixed text (R4)."""

    def __init__(self, sandbox_id: str) -> None:
        super().__init__("The sandbox was not found")
        self.sandbox_id = sandbox_id


class NamedInVain(InvalidArgument):
    """Headers name a sandbox on a host where they cannot (R2)."""

    def __init__(self, host: str) -> None:
        super().__init__(f"a sandbox cannot be named by headers on host '{host[:255]}'")


class PortClosed(SandboxUnreachable):
    """The sandbox runs, and what should listen there does not answer: status 502 and a fixed text (R5)."""

    def __init__(self, sandbox_id: str, port: int) -> None:
        super().__init__("The sandbox is running but port is not open")
        self.sandbox_id = sandbox_id
        self.port = port


def sandbox_id_of(request: web.Request) -> tuple[str, int] | None:
    """The sandbox and port that a request names, or None when it names none. Raises InvalidArgument (R3)."""
    if NAMED not in request:
        request[NAMED] = named_by(request.headers, request.app[SETTINGS].domain)
    return request[NAMED]


def named_by(headers: CIMultiDictProxy[str], domain: str | None) -> tuple[str, int] | None:
    """:func:`sandbox_id_of` for the headers of a request that has not been routed yet."""
    # Clients append it to a host as it is, port and all; hosts are compared without.
    domain = domain and domain.partition(":")[0]
    host = _host_of(headers)
    if (named := _named_by_host(host, domain)) is not None:
        return named
    sandbox, port = headers.get(ID_HEADER), headers.get(_PORT_HEADER)
    if sandbox is None and port is None:
        return None
    if not _takes_headers(host, domain):
        raise NamedInVain(host)
    if sandbox is None or port is None:
        raise InvalidArgument(f"{ID_HEADER} and {_PORT_HEADER} must be sent together")
    return _sandbox_id(sandbox), _port(port)


def is_on_host_of_sandbox(request: web.Request) -> bool:
    """Whether the host names a sandbox, rather than headers or nothing. Raises InvalidArgument (R3)."""
    domain = request.app[SETTINGS].domain
    return _named_by_host(_host_of(request.headers), domain and domain.partition(":")[0]) is not None


async def locate(request: web.Request, *, access: Access) -> Located:
    """The agent of the sandbox that the request is for. Raises InvalidArgument when it is for none, and as below."""
    named = sandbox_id_of(request)
    if named is not None:
        # Other ports than the agent's do not come here (``ports``).
        return await locate_by_id(request, named[0], access=access)
    if not brings_token(request):
        raise InvalidArgument(f"no sandbox named: send {ID_HEADER} and {_PORT_HEADER}, or use the sandbox's host name")
    bearers, core = request.app[BEARERS], request.app[CORE]
    bearer = await bearers.sandbox_of(request.headers[_TOKEN_HEADER], core, request_id=request[REQUEST_ID])
    return await locate_by_id(request, bearer, access=access)


def brings_token(request: web.Request) -> bool:
    """Whether the request proves itself by a sandbox's access token, which also tells the sandbox where nothing names it."""
    return _TOKEN_HEADER in request.headers


async def locate_by_id(request: web.Request, sandbox_id: str, *, access: Access) -> Located:
    """The agent of a sandbox, once ``access`` has let the request through.

    One that sleeps and may be woken is woken then (R15). Raises SandboxGone (R4), Unauthenticated for a sandbox that is
    awake, PermissionDenied for one that sleeps on.
    """
    request[SANDBOX_ID] = sandbox_id
    core, request_id = request.app[CORE], request[REQUEST_ID]
    try:
        located = await core.locate(sandbox_id, request_id=request_id)
        policy = request.app[POLICY]
        if located.awake:
            await policy.check_access(request, located, access)
            policy.admitted(request, sandbox_id)
            return located
        try:
            await policy.check_access(request, located, access)
        except Unauthenticated as error:
            raise PermissionDenied(error.message) from error
        located = await core.locate(sandbox_id, request_id=request_id, wake=True)
        if not located.awake:
            raise SandboxNotFound.of(sandbox_id)
        policy.admitted(request, sandbox_id)
        return located
    except SandboxNotFound as error:
        raise SandboxGone(sandbox_id) from error


def check_access_token(request: web.Request, located: Located) -> None:
    """Raises Unauthenticated unless ``X-Access-Token`` opens this sandbox (S1, S3); an unsecured one is open (S2)."""
    expected = located.sandbox.access_token
    if not expected:
        return
    given = request.headers.get(_TOKEN_HEADER)
    if given is None:
        raise Unauthenticated(f"header {_TOKEN_HEADER} is missing")
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode()):
        raise Unauthenticated(f"the token in header {_TOKEN_HEADER} is not valid for this sandbox")


async def admit(request: web.Request) -> Located:
    """:func:`locate` and :func:`check_access_token`: the way into every agent route but health and files."""
    return await locate(request, access=functools.partial(check_access_token, request))


async def lost(request: web.Request, located: Located, error: grpc.aio.AioRpcError) -> SandgateError:
    """What to tell the client whose call to the agent failed; the caller raises or sends it.

    Only UNAVAILABLE is in doubt: the core knows whether the sandbox is gone. If it is and the answer has begun, the
    connection is cut, since only a reset makes the SDKs ask for the sandbox's health (R13), which is 502 by now (R14).
    """
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return error_of(error)
    return await _out_of_reach(request, located)


@asynccontextmanager
async def answering(request: web.Request, located: Located, *, within: float | None) -> AsyncIterator[None]:
    """Around the wait for an agent's answer: raises PortClosed or SandboxGone when it does not come in time."""
    try:
        async with asyncio.timeout(within) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise await _out_of_reach(request, located) from None


async def _out_of_reach(request: web.Request, located: Located) -> SandgateError:
    try:
        found = await request.app[CORE].locate(located.sandbox.id, request_id=request[REQUEST_ID], agent_lost=True)
        if not found.awake:
            # What interrupts a call does not make it worth waking the sandbox for: the client may ask again.
            raise SandboxNotFound.of(located.sandbox.id)
    except SandboxNotFound:
        request.app[AGENTS].forget(located)
        if request.writer.output_size > 0:
            cut(request)
        return SandboxGone(located.sandbox.id)
    except SandgateError as failure:
        return failure
    return PortClosed(located.sandbox.id, request.get(PORT, AGENT_PORT))


def cut(request: web.Request) -> None:
    """Breaks the connection of the request off, if it still has one, so that its client asks for the sandbox's health."""
    transport = request.transport
    if transport is None:
        return
    if _takes_reset_for_a_fault(request.headers.get("User-Agent", "")):
        # Closed in the middle of the body: no end of the last chunk, so nothing passes a part off as the whole.
        transport.abort()
    else:
        reset(transport)


def _takes_reset_for_a_fault(user_agent: str) -> bool:
    """Whether a client asks for health only after a plain close, and lets a reset through as its transport's own error.

    Measured: the Python SDK 2.34.0 does; 2.45.1 and later, and the JavaScript SDK, read a reset as R13 wants it.
    """
    match = _PYTHON_SDK.match(user_agent)
    return match is not None and (int(match["major"]), int(match["minor"])) < _READS_RESETS


def reset(transport: asyncio.Transport) -> None:
    """What is queued is dropped and the peer sees a reset, never an orderly end (R13)."""
    if (sock := transport.get_extra_info("socket")) is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        except OSError:
            pass  # the peer was faster
    transport.abort()


def _host_of(headers: CIMultiDictProxy[str]) -> str:
    """The host without its port, in lower case."""
    host = headers.get("Host", "").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, _ = host.partition(":")
    return name.rstrip(".")


def _named_by_host(host: str, domain: str | None) -> tuple[str, int] | None:
    """The sandbox named by host (R1).

    Without a configured domain any domain will do, and only a label that fits in full counts: there, a host such as
    ``10-0-0-1.internal`` is the gateway itself.
    """
    label, _, rest = host.partition(".")
    match = _HOST_LABEL.fullmatch(label)
    if match is None or not rest or (domain is not None and rest != domain.lower()):
        return None
    if domain is None and not (_NAME.fullmatch(match["name"]) and match["name"][0].isalpha()):
        return None
    return _sandbox_id(match["name"]), _port(match["port"])


def _takes_headers(host: str, domain: str | None) -> bool:
    """Whether a request to this host may name its sandbox by headers (R2)."""
    if domain is None or host in {"localhost", f"sandbox.{domain.lower()}"}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _sandbox_id(name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidArgument("a sandbox id has lower-case letters and digits only")
    return match["id"]


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise InvalidArgument("a port is a number from 1 to 65535")
    return int(text)
