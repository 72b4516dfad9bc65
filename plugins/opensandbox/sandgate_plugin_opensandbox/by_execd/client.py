"""execd as the road to one sandbox: sessions, files, measurements and relayed ports (its interface of version 1.1).

Where execd is reached is asked of the server once, and again after nobody answered there. Errors become those of the
taxonomy here, in the words that a caller understands: whoever calls execd for a client has a client to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from sandgate_errors import (
    Internal,
    InvalidArgument,
    NoSpace,
    NotFound,
    PermissionDenied,
    SandboxUnreachable,
    SandgateError,
)
from sandgate_plugin_opensandbox.by_execd.listing import Items
from sandgate_plugin_opensandbox.execd import Execd
from sandgate_plugin_opensandbox.server import Endpoint, Refused

__all__ = ["TOKEN_HEADER", "Client", "Query"]

_log = logging.getLogger(__name__)

TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"  # noqa: S105 - a name
#: Seconds. A paused sandbox takes connections and says nothing.
_CONNECT_LIMIT = 10.0
_CALL_LIMIT = 30.0
#: Bytes. What execd says of errors, of one thing, and of a tree.
_LONGEST_ERROR = 64 * 1024
_LONGEST_ANSWER = 1024 * 1024
_LONGEST_LIST = 128 * 1024 * 1024
#: A replay is one message: a mebibyte and its head.
_LONGEST_MESSAGE = 4 * 1024 * 1024
#: Of ports, that are remembered for one sandbox.
_MOST_ENDPOINTS = 1024
#: What a relay between us and execd answers when it reached nobody.
_NOBODY_BEHIND = frozenset({502, 503, 504})
_NO_ROOM = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
_NOT_THERE = re.compile(r"no such file|not found|does not exist", re.IGNORECASE)
_NOT_ALLOWED = re.compile(r"permission denied|not permitted|read-only file system", re.IGNORECASE)
_CALLERS_FAULT = re.compile(r"(is|not) a directory|name too long|invalid argument|directory not empty", re.IGNORECASE)

Query = Sequence[tuple[str, str]]
_Item = TypeVar("_Item")


class Client:
    """execd of one sandbox."""

    def __init__(
        self, session: aiohttp.ClientSession, where: Callable[[int], Awaitable[Endpoint]], *, port: int, token: str
    ) -> None:
        """``where`` asks the server for the endpoint of a port; ``port`` is execd's own."""
        self._session = session
        self._where = where
        self._port = port
        self._token = token
        self._endpoints: dict[int, Endpoint] = {}

    def moved(self) -> None:
        """Ask anew where it is at the next call."""
        self._endpoints.clear()

    async def endpoint(self, port: int | None = None) -> Endpoint:
        """Of execd, or of another port, with the headers that are to be sent there."""
        number = self._port if port is None else port
        if (known := self._endpoints.get(number)) is None:
            try:
                found = await self._where(number)
            except Refused as refused:
                raise SandboxUnreachable("the sandbox is nowhere to be reached", retry_after=1) from refused
            # No program behind another port is told what commands execd; execd's own relay passes without.
            own = {TOKEN_HEADER: self._token} if number == self._port else {}
            known = Endpoint(found.base, {**found.headers, **own})
            if len(self._endpoints) >= _MOST_ENDPOINTS:
                self._endpoints.clear()
            self._endpoints[number] = known
        return known

    async def ask(
        self, method: str, path: str, *, query: Query = (), body: object = None, what: str, limit: float = _CALL_LIMIT
    ) -> Any:
        """What it answers; None for nothing. ``what`` names the path or thing in errors. Raises errors of the taxonomy."""
        async with self.bounded(limit), self.request(method, path, query=query, json=body, what=what) as response:
            text = await _beginning(response, _LONGEST_ANSWER, whole=True)
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            _log.error("execd answers %s with something else than JSON: %r", path, text[:200])
            raise Internal(f"execd's answer for {what} cannot be read") from None

    async def ask_list(
        self, path: str, *, query: Query, what: str, most: int, make: Callable[[dict[str, Any]], _Item]
    ) -> list[_Item]:
        """What is made of each object of a list; at most one more than ``most``. Raises as :meth:`ask`, and as ``make``."""
        made: list[_Item] = []
        items, read = Items(), 0
        async with self.bounded(), self.request("GET", path, query=query, what=what) as response:
            try:
                async for piece in response.content.iter_any():
                    read += len(piece)
                    if read > _LONGEST_LIST:
                        raise ValueError("it is too long")
                    for item in items.feed(piece):
                        made.append(make(item))
                        if len(made) > most:
                            response.close()
                            return made
                items.end()
            except ValueError as error:
                response.close()
                _log.error("what execd lists for %s cannot be read: %s", path, error)
                raise Internal(f"execd's answer for {what} cannot be read") from None
        return made

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, *, query: Query = (), what: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response that is none of an error, for as long as the caller reads; the caller bounds the time."""
        endpoint = await self.endpoint()
        headers = {**endpoint.headers, **options.pop("headers", {})}
        try:
            async with self._session.request(
                method, endpoint.url(path), params=query, headers=headers, allow_redirects=False, **options
            ) as response:
                if response.status >= 300:
                    raise self._refusal(response.status, await _beginning(response, _LONGEST_ERROR), what)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def run(self, command: str, *, what: str) -> None:
        """Run something as execd's own account. Raises Internal when it fails."""
        execd = Execd(self._session, await self.endpoint(), self._token)
        try:
            done = await execd.run(command, uid=None)
        except Internal as error:
            # In words for one who starts a sandbox.
            raise Internal(f"{what}: execd failed") from error
        if done.exit_code != 0:
            raise Internal(f"{what}: {done.words or 'execd failed'}")

    async def open_session(self, session: str, *, terminal: bool, since: int) -> aiohttp.ClientWebSocketResponse:
        """The socket of a session, taken over from whoever had it. Raises NotFound when there is no such session."""
        endpoint = await self.endpoint()
        query = {"pty": str(int(terminal)), "since": str(since), "takeover": "1"}
        try:
            async with self.bounded(_CONNECT_LIMIT):
                return await self._session.ws_connect(
                    endpoint.url(f"pty/{session}/ws", websocket=True),
                    params=query,
                    headers=endpoint.headers,
                    max_msg_size=_LONGEST_MESSAGE,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            raise self._refusal(error.status, error.message, "the session") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    @contextlib.asynccontextmanager
    async def bounded(self, limit: float = _CALL_LIMIT) -> AsyncIterator[None]:
        """Raises SandboxUnreachable when what is done in it takes longer."""
        try:
            async with asyncio.timeout(limit) as bound:
                yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> SandboxUnreachable:
        self.moved()
        _log.warning("execd of a sandbox does not answer: %s", error or type(error).__name__)
        return SandboxUnreachable("the sandbox's execd cannot be reached", retry_after=1)

    def _refusal(self, status: int, text: str, what: str) -> SandgateError:
        words = _words(text)
        if status in _NOBODY_BEHIND and not words:
            return self._lost(OSError(f"answered with {status}"))
        if status == 401:
            _log.error("execd does not know its token")
            return Internal("the sandbox's execd does not know its token")
        if _NO_ROOM.search(words):
            return NoSpace(f"not enough disk space available for {what}")
        if _NOT_ALLOWED.search(words):
            return PermissionDenied(f"permission denied for {what}")
        if status == 404 or _NOT_THERE.search(words):
            return NotFound(f"{what} does not exist")
        if status == 400 or _CALLERS_FAULT.search(words):
            return InvalidArgument(f"{what}: {words or 'execd refuses it'}")
        _log.error("execd refuses %s: %d %s", what, status, words)
        return Internal(f"{what}: execd failed: {words or status}")


def _words(text: str) -> str:
    """What an error of execd says."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return str(found.get("message") or found.get("error") or found.get("code") or "")[:500]
    return text.strip()[:500]


async def _beginning(response: aiohttp.ClientResponse, most: int, *, whole: bool = False) -> str:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > most:
            response.close()
            if whole:
                raise Internal("execd answers with more than is read")
            break
    return bytes(found[:most]).decode(errors="replace")
