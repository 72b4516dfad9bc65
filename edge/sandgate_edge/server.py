"""Serving the application on a listening socket: limits of HTTP itself, requests that are none, and the end.

aiohttp's own runner would do, but for two things that happen before any middleware: a base URL that ends in a slash
makes paths that begin with two (envd.md 1.1), and bytes that are not HTTP are answered in plain text, which JSON
clients cannot read.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import structlog
from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from sandgate_edge import routing
from sandgate_edge.keys import DRAIN, SETTINGS, TARGET
from sandgate_edge.request_log import SERVER_NAME
from sandgate_edge.responses import bad_request, http_error
from sandgate_errors import InvalidArgument

__all__ = ["Server"]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Proxies in front keep their idle connections for up to 600 s; the side that sends requests must close first (W12).
_KEEPALIVE_SECONDS = 630.0
# From a connection's begin, or a later request's first byte, to the end of the request's headers. A client sends them in
# one go; without a limit anybody could hold descriptors with half a line each, for as long as an idle connection.
_HEAD_SECONDS = 30.0
# What remains of a refused body is read for so long: a client that still sends would see a reset, not the answer.
_LINGER_SECONDS = 10.0
# At the end: what a unary call or a transfer may still take before it is cut off.
_DRAIN_SECONDS = 5.0
# What a handler may take to end after it was cut off, and an answer that refuses a request at the end.
_CANCEL_SECONDS = 1.0
_BACKLOG = 1024
# A path of 4,096 bytes, each escaped, with a signature behind it.
_MAX_LINE_BYTES = 16 * 1024
# File metadata has up to 4,096 bytes, in one header or many; gRPC takes no longer API key either.
_MAX_FIELD_BYTES = 8 * 1024


class Server:
    """The application, accepting connections until :meth:`close`."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, handler_cancellation=True, shutdown_timeout=_CANCEL_SECONDS
        )
        self._domain = app[SETTINGS].domain
        self._listener: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Begins to accept on a socket that listens or is bound; owns it from here on."""
        await self._runner.setup()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the application did not start")
        _prepare_for_routing(server, domain=self._domain)
        _answer_in_json(server)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(server, loop=loop), sock=sock, backlog=_BACKLOG)

    async def close(self) -> None:
        """Refuses requests, resets streams, gives what is under way a bounded time; then closes every connection."""
        app, server = self._runner.app, self._runner.server
        app[DRAIN].begin(app)
        if server is not None:
            under_way = [each for each in server.connections if isinstance(each, _Connection) and each.is_busy]
            await asyncio.gather(*(connection.shutdown(_DRAIN_SECONDS) for connection in under_way))
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


class _Connection(web.RequestHandler):
    """One connection, with this edge's limits and its own words for what is not HTTP."""

    __slots__ = ("_head_timer", "_heads_before", "_last_body")

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=_KEEPALIVE_SECONDS,
            lingering_time=_LINGER_SECONDS,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            # It would take a body that was cut off for a whole one; who reads a body undoes its encoding.
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # documented, and missing in its type
        )
        self._head_timer: asyncio.TimerHandle | None = None
        self._heads_before = 0
        self._last_body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Else the bytes are of a body, which may take its time. A next head that begins in the same packet as the end of
        # a request is timed from its second packet; until then the connection counts as idle, which anybody may be.
        begins_head = self._payload_parser is None and (self._last_body is None or self._last_body.is_eof())
        heads = self._request_count
        super().data_received(data)
        if self._request_count > heads:
            self._stop_head_timer()
            self._last_body = self._messages[-1][1]
        elif begins_head and data and self._head_timer is None:
            self._await_head()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self._request_in_progress

    def close(self) -> None:
        """At the end of the edge: no further request. One that is under way is left to :meth:`shutdown`."""
        if not self._request_in_progress:
            super().close()

    async def shutdown(self, timeout: float | None = _DRAIN_SECONDS) -> None:
        """Ends the connection. A request that is under way has time to be answered; aiohttp would drop the rest of its body."""
        if self._request_in_progress:
            self._handler_waiter = self._loop.create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._handler_waiter
                    await self._sent()
            except TimeoutError:
                timeout = _CANCEL_SECONDS
            finally:
                self._handler_waiter = None
        super().close()
        await super().shutdown(timeout)

    async def _sent(self) -> None:
        """What was written is with the kernel: it outlives the process, and what is queued here does not."""
        if self.transport is not None:
            self.transport.set_write_buffer_limits(0)
            await self._drain_helper()

    def eof_received(self) -> bool:  # type: ignore[override]  # None, which closes the connection, is what aiohttp wants
        """After a change of protocol a client may end its side and still read; before it, it has left."""
        if self._payload_parser is None:
            return False
        self._payload_parser.feed_eof()
        return True

    def _await_head(self) -> None:
        self._heads_before = self._request_count
        self._head_timer = self._loop.call_later(_HEAD_SECONDS, self._end_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_without_head(self) -> None:
        self._head_timer = None
        if self._request_count > self._heads_before:
            return  # it came by another way: bytes behind a request that asks for an upgrade are kept and read later
        if self._waiter is None or self._waiter.done():
            self._await_head()  # a request before it is still being answered
            return
        _log.info("request headers did not come in time")
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called for bytes that are not HTTP; what handlers raise was answered by the middlewares before."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        if status >= 500:
            _log.error("request failed outside the application", exc_info=exc)
        else:
            # Not the parser's own text: it quotes the bytes, and they may be a secret sent to the wrong port.
            _log.info("request is not HTTP", status=status, reason=type(exc).__name__)
        response = bad_request(_status_of(exc) or status)
        response.headers[hdrs.SERVER] = SERVER_NAME
        response.force_close()
        return response

    def log_exception(self, *args: Any, exc_info: BaseException | None = None, **_: Any) -> None:
        """Called by the loop that reads requests, also when the rest of a body it was to skip turns out broken."""
        if not isinstance(exc_info, web.RequestPayloadError):
            _log.error("connection failed", reason=" ".join(map(str, args)), exc_info=exc_info)


def _status_of(error: BaseException | None) -> int | None:
    """Of HTTP that is valid and exceeds this edge's limits (RFC 9110 section 15.5.15, RFC 6585 section 5); else None."""
    if isinstance(error, LineTooLong):
        # The parser tells only which limit it was.
        return 414 if error.args[1] == _MAX_LINE_BYTES else 431
    if isinstance(error, BadHttpMessage) and error.message == "Too many headers received":
        return 431
    return None


def _answer_in_json(server: web.Server) -> None:
    """For what aiohttp refuses between routing and middlewares, such as an ``Expect`` header it does not know."""
    handle = server.request_handler

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as error:
            return http_error(error)

    server.request_handler = handler


def _prepare_for_routing(server: web.Server, *, domain: str | None) -> None:
    """What must be done to a request before it is routed.

    Every path has one slash in front. An expectation of a request to a port is that server's to meet or to refuse, and
    aiohttp would meet it; the headers as they came still have it. Any other expectation that aiohttp does not know it quotes
    as it refuses it, which ends in an error of its own where the bytes are no text.
    """
    make = server.request_factory

    def factory(message: Any, *rest: Any) -> web.BaseRequest:
        target = message.path
        if target.startswith("//"):
            path = "/" + target.lstrip("/")
            message = message._replace(path=path, url=URL(path, encoded=True))
        if (expectation := message.headers.get(hdrs.EXPECT)) is not None:
            headers = CIMultiDict(message.headers)
            del headers[hdrs.EXPECT]
            if not _is_for_port(message.headers, domain):
                headers[hdrs.EXPECT] = ascii(expectation)[1:-1]
            message = message._replace(headers=CIMultiDictProxy(headers))
        request = make(message, *rest)
        if message.path != target:
            request[TARGET] = target
        return request

    server.request_factory = factory


def _is_for_port(headers: CIMultiDictProxy[str], domain: str | None) -> bool:
    try:
        named = routing.named_by(headers, domain)
    except InvalidArgument:
        return False
    return named is not None and named[1] != routing.AGENT_PORT
