"""The OpenSandbox server: each call bounded in time, each failure told in our terms.

The lifecycle API of server 1.1, below ``/v1``. A server that is down or silent is ``Unavailable``: its sandboxes are not lost
for that. What it refuses is :class:`Refused`, for the caller to judge by status and code; its errors come in two shapes, its
own ``{code, message}`` and its framework's ``{detail: [...]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp

from sandgate_errors import (
    Conflict,
    FailedPrecondition,
    Internal,
    NoSpace,
    NotFound,
    ResourceExhausted,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings

__all__ = ["Details", "Endpoint", "Lost", "Refused", "Server", "has_ended", "state_of", "told"]

_log = logging.getLogger(__name__)

#: What the server says of something: its API is the type.
Details = Mapping[str, Any]

#: Seconds. A list looks at every container; a create on Kubernetes waits for the pod, on Docker for the image.
_LOOK_LIMIT = 30.0
_CHANGE_LIMIT = 120.0
_CREATE_LIMIT = 600.0
#: What a client is told to wait when the server is down or gives no time of its own.
_RETRY_AFTER = 5.0
_LONGEST_WAIT = 60.0
_PAGE = 200
#: Bytes; many times what a page of sandboxes has.
_LONGEST_ANSWER = 16 * 1024 * 1024
#: Lists that change while they are read are read again, this often.
_READINGS = 3
_NO_ROOM = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_NO_MORE = re.compile(
    r"allocate host ports|port is already allocated|cannot allocate memory|too many open files|insufficient|"
    r"available, non-?overlapping|no available ip",
    re.IGNORECASE,
)
#: A relay that reached nobody, or waited for nobody.
_NOBODY_BEHIND = frozenset({502, 503, 504})


_ENDED = frozenset({"Stopping", "Terminated", "Failed"})


class Refused(Exception):
    """The server answered, with an error. The text is for the log."""

    def __init__(self, status: int, *, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{message} ({status} {code})")
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


class Lost(Unavailable):
    """The call went out and no answer came back: it may have had its effect."""


@dataclass(frozen=True)
class Endpoint:
    """Where a port of a sandbox is reached: never assumed to be just host and port."""

    #: Scheme, host, and perhaps a path.
    base: str
    #: To be sent with every request.
    headers: Mapping[str, str]

    def url(self, path: str = "", *, websocket: bool = False) -> str:
        base, query, rest = self.base.partition("?")
        if websocket:
            base = re.sub("^http", "ws", base)
        return f"{base.rstrip('/')}/{path.lstrip('/')}{query}{rest}"


def state_of(details: Details) -> str:
    """Of a sandbox or snapshot."""
    return str((details.get("status") or {}).get("state"))


def has_ended(details: Details) -> bool:
    """Whether a sandbox will never run again."""
    return state_of(details) in _ENDED


@contextlib.contextmanager
def told(subject: str = "the sandbox") -> Iterator[None]:
    """What a client hears of a refusal that nobody has judged; the log hears more."""
    try:
        yield
    except Refused as refused:
        raise _meaning(refused, subject) from refused


def _meaning(refused: Refused, subject: str) -> SandgateError:
    if refused.status == 404:
        return NotFound(f"{subject} does not exist any more")
    _log.error("the OpenSandbox server refused: %s", refused)
    wait = refused.retry_after or _RETRY_AFTER
    if refused.status == 429 or "CAPACITY_EXHAUSTED" in refused.code:
        return ResourceExhausted("the OpenSandbox server has no room for it now", retry_after=wait)
    if "QUOTA_EXCEEDED" in refused.code:
        return ResourceExhausted("the quota of the OpenSandbox server is used up")
    if _NO_ROOM.search(refused.message):
        return NoSpace("no disk space is left for it")
    if _NO_MORE.search(refused.message):
        return ResourceExhausted("the OpenSandbox server has no room for it", retry_after=wait)
    if refused.status == 409:
        return Conflict(f"{subject} is busy with something else")
    if refused.status in _NOBODY_BEHIND:
        return Unavailable("the OpenSandbox server cannot do it now", retry_after=wait)
    return Internal(f"the OpenSandbox server refused what {subject} needs")


class Server:
    """One server. Sandboxes and snapshots are named by its ids, and handed on as it describes them."""

    def __init__(self, settings: OpenSandboxSettings, session: aiohttp.ClientSession) -> None:
        self._base = settings.server
        self._key = settings.key
        self._through_it = settings.reach == "server"
        self._scheme = settings.endpoint_scheme
        self._ca = settings.ca
        #: For what is reached at endpoints, too.
        self.session = session

    @classmethod
    def connect(cls, settings: OpenSandboxSettings) -> Server:
        """To be called in the loop that is going to use it; asks nothing yet. Raises FailedPrecondition."""
        tls: ssl.SSLContext | bool = True
        if settings.ca is not None:
            try:
                tls = ssl.create_default_context(cafile=settings.ca)
            except (OSError, ssl.SSLError) as error:
                raise FailedPrecondition(f"the certificates in '{settings.ca}' cannot be used: {error}") from error
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=_watched_socket)
        # The whole of a call is bounded where it is made; this is for a machine that swallows packets.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        return cls(settings, aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True))

    async def close(self) -> None:
        await self.session.close()

    @functools.cached_property
    def tls(self) -> ssl.SSLContext:
        """For connections to endpoints that are not the session's."""
        return ssl.create_default_context(cafile=self._ca)

    @property
    def address(self) -> str:
        return self._base

    @property
    def secured(self) -> bool:
        """Whether the way to it is."""
        return self._base.startswith("https:")

    async def health(self) -> None:
        await self._ask("GET", "/health", limit=_LOOK_LIMIT)

    async def version(self) -> str:
        found = await self._ask("GET", "/version", limit=_LOOK_LIMIT)
        return str(found.get("version", "unknown"))

    # Sandboxes.

    async def create(self, body: Mapping[str, object]) -> Details:
        """Raises Lost when it may have been made and nobody knows; a relay's 504 says no more."""
        unknown = "the OpenSandbox server did not say what became of the sandbox"
        try:
            made = await self._ask("POST", "/v1/sandboxes", body=body, limit=_CREATE_LIMIT)
        except Refused as refused:
            if refused.status in {502, 504}:
                raise Lost(unknown) from refused
            raise
        if not isinstance(made.get("id"), str):
            # Something between answers in its name.
            _log.error("the OpenSandbox server answers a create with something else: %s", str(made)[:500])
            raise Lost(unknown)
        return made

    async def get(self, sandbox: str) -> Details | None:
        """None: there is no such sandbox."""
        return await self._or_none("GET", f"/v1/sandboxes/{_part(sandbox)}", limit=_LOOK_LIMIT)

    async def list(self, labels: Mapping[str, str], *, states: Sequence[str] = ()) -> Sequence[Details]:
        """Every sandbox with all these labels."""
        query = [("metadata", urlencode(labels)), *(("state", state) for state in states)]
        return await self._all("/v1/sandboxes", query)

    async def delete(self, sandbox: str) -> None:
        """Success also when there is none."""
        await self._or_none("DELETE", f"/v1/sandboxes/{_part(sandbox)}", limit=_CHANGE_LIMIT)

    async def pause(self, sandbox: str) -> None:
        await self._ask("POST", f"/v1/sandboxes/{_part(sandbox)}/pause", limit=_CHANGE_LIMIT)

    async def resume(self, sandbox: str) -> None:
        await self._ask("POST", f"/v1/sandboxes/{_part(sandbox)}/resume", limit=_CHANGE_LIMIT)

    async def renew(self, sandbox: str, *, seconds: float) -> None:
        expires = datetime.now(UTC) + timedelta(seconds=seconds)
        body = {"expiresAt": expires.isoformat()}
        await self._ask("POST", f"/v1/sandboxes/{_part(sandbox)}/renew-expiration", body=body, limit=_LOOK_LIMIT)

    async def endpoint(self, sandbox: str, port: int) -> Endpoint:
        query = [("use_server_proxy", "true")] if self._through_it else []
        found = await self._ask(
            "GET", f"/v1/sandboxes/{_part(sandbox)}/endpoints/{port}", query=query, limit=_LOOK_LIMIT
        )
        address = found.get("endpoint")
        if not isinstance(address, str):
            _log.error("the OpenSandbox server tells no endpoint: %s", str(found)[:500])
            raise Internal("the OpenSandbox server does not say where the sandbox is")
        base = address if "://" in address else f"{self._scheme}://{address}"
        headers = {str(name): str(value) for name, value in (found.get("headers") or {}).items()}
        if self._through_it and self._key is not None:
            # Asked for by a server with several tenants; it passes it on to nobody.
            headers["OPEN-SANDBOX-API-KEY"] = self._key
        return Endpoint(base, headers)

    async def network(self, sandbox: str) -> Details:
        """The rules that hold, as :meth:`set_network` takes them."""
        found = await self._ask("GET", f"/v1/sandboxes/{_part(sandbox)}/networkpolicy", limit=_LOOK_LIMIT)
        inner = found.get("policy", found)
        return {key: inner[key] for key in ("defaultAction", "egress") if key in inner}

    async def set_network(self, sandbox: str, policy: Mapping[str, object]) -> None:
        path = f"/v1/sandboxes/{_part(sandbox)}/networkpolicy"
        await self._ask("PUT", path, body=policy, limit=_CHANGE_LIMIT)

    async def log(self, sandbox: str) -> str:
        """The end of what it wrote, on one line; empty when the server does not tell."""
        with contextlib.suppress(Refused, SandgateError):
            path = f"/v1/sandboxes/{_part(sandbox)}/diagnostics/logs"
            found = await self._ask("GET", path, query=[("tail", "20")], limit=_LOOK_LIMIT)
            return " | ".join(str(found.get("text", found)).split("\n"))[-2000:]
        return ""

    # Snapshots.

    async def snapshot(self, sandbox: str, *, name: str) -> Details:
        path = f"/v1/sandboxes/{_part(sandbox)}/snapshots"
        return await self._ask("POST", path, body={"name": name}, limit=_CHANGE_LIMIT)

    async def get_snapshot(self, snapshot: str) -> Details | None:
        return await self._or_none("GET", f"/v1/snapshots/{_part(snapshot)}", limit=_LOOK_LIMIT)

    async def snapshots(self, name: str | None = None, *, states: Sequence[str] = ()) -> Sequence[Details]:
        """Those of this name, or all."""
        named = [] if name is None else [("name", name)]
        return await self._all("/v1/snapshots", [*named, *(("state", state) for state in states)])

    async def delete_snapshot(self, snapshot: str) -> None:
        """Success also when there is none. Raises Refused, 409, while a sandbox uses it."""
        await self._or_none("DELETE", f"/v1/snapshots/{_part(snapshot)}", limit=_CHANGE_LIMIT)

    # What all calls have in common.

    async def _all(self, path: str, query: Sequence[tuple[str, str]]) -> Sequence[Details]:
        """All pages. What goes while they are read moves others into a page that was read already: then once more."""
        found: dict[str, Details] = {}
        for _ in range(_READINGS):
            whole = await self._pages(path, query, found)
            if whole:
                break
        return list(found.values())

    async def _pages(self, path: str, query: Sequence[tuple[str, str]], found: dict[str, Details]) -> bool:
        """Whether as many came as the server said at last that there are."""
        page, seen = 1, 0
        while True:
            sizes = [("page", str(page)), ("pageSize", str(_PAGE))]
            answer = await self._ask("GET", path, query=[*query, *sizes], limit=_LOOK_LIMIT)
            items = answer.get("items") or ()
            found.update({str(item["id"]): item for item in items})
            seen += len(items)
            about = answer.get("pagination") or {}
            if not about.get("hasNextPage"):
                return seen >= int(about.get("totalItems") or 0)
            page += 1

    async def _or_none(self, method: str, path: str, *, limit: float) -> Details | None:
        try:
            return await self._ask(method, path, limit=limit)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        limit: float,
        body: Mapping[str, object] | None = None,
        query: Sequence[tuple[str, str]] = (),
    ) -> Details:
        headers = {} if self._key is None else {"OPEN-SANDBOX-API-KEY": self._key}
        url = f"{self._base}{path}"
        try:
            async with (
                _bounded(limit),
                self.session.request(
                    method, url, params=query, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                text = await _whole(response)
                if response.status >= 300:
                    raise _refusal(response.status, text, response.headers.get("Retry-After"))
                return _object(text)
        except aiohttp.ClientConnectorError as error:
            _log.warning("the OpenSandbox server cannot be reached: %s", error)
            raise Unavailable("the OpenSandbox server does not answer", retry_after=_RETRY_AFTER) from error
        except (aiohttp.ClientError, OSError) as error:
            _log.warning("the OpenSandbox server hung up: %s", error)
            raise Lost("the OpenSandbox server does not answer", retry_after=_RETRY_AFTER) from error


async def _whole(response: aiohttp.ClientResponse) -> str:
    """Raises Lost for what nobody could want to say: the log of a sandbox is in some of it."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _LONGEST_ANSWER:
            response.close()
            raise Lost("the OpenSandbox server answers with more than is read", retry_after=_RETRY_AFTER)
    return body.decode(errors="replace")


def _part(name: str) -> str:
    """As one part of a path, whatever it holds: handles come back from the store, and a store can be edited."""
    quoted = quote(name, safe="")
    if quoted in {"", ".", ".."}:
        raise Internal("the handle of the sandbox is damaged")
    return quoted


def _object(text: str) -> Details:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        # Some diagnostics are plain text.
        return {"text": text}
    return found if isinstance(found, dict) else {"text": text}


def _refusal(status: int, text: str, retry_after: str | None) -> Refused:
    about = _object(text)
    # Its framework wraps an error into `detail` where nobody has unwrapped it.
    inner = about.get("detail", about)
    if isinstance(inner, list):
        message = "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in inner[:5])
        return Refused(status, code="INVALID_REQUEST", message=message)
    if not isinstance(inner, dict):
        inner = {"message": str(inner)}
    code, message = str(inner.get("code", "")), str(inner.get("message", text))[:2000]
    return Refused(status, code=code, message=message, retry_after=_seconds(retry_after))


def _seconds(header: str | None) -> float | None:
    """Of a Retry-After; a date is taken for none."""
    if header is None or not header.strip().isdigit():
        return None
    return min(float(header), _LONGEST_WAIT)


@contextlib.asynccontextmanager
async def _bounded(limit: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        text = f"the OpenSandbox server has not answered for {limit:g} seconds"
        raise Lost(text, retry_after=_RETRY_AFTER) from error


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that notices a machine which has gone. The kernel answers for a sandbox that stands still, so pauses are none."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
