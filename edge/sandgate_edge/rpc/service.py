"""The table of a Connect service: one row per method of its protobuf service, and the route that answers it.

The rows are read off the service descriptor, so that the edge offers exactly what the agent does. HTTP-level refusals
(wrong content type, unknown method) are the same for all of them and stand here. Behaviour W1, W4, W5, W14.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from sandgate_edge.agents import Agents
from sandgate_edge.connect.codec import CODECS, JSON, Codec
from sandgate_edge.connect.first_form import FIRST_FORM_JSON, knows_first_form_only
from sandgate_edge.core_client import Located
from sandgate_edge.keys import PLACE, ROOM
from sandgate_edge.settings import Settings
from sandgate_errors import InvalidArgument

__all__ = ["Check", "Handler", "Method", "codec_of", "fallback_of", "methods_of", "routes_of"]


Check = Callable[[Settings, Any], None]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method as the edge needs it."""

    path: str
    """``/<service as clients call it>/<method>``."""
    request: type[Message]
    client_streams: bool
    server_streams: bool
    begin: Callable[[Agents, Located], Callable[..., Any]]
    """The method's stub at the sandbox's agent."""
    check_request: Check | None = None
    """Of a unary method: what this gateway's settings have against a message. Raises errors of the taxonomy."""
    check_reply: Check | None = None

    @property
    def streams(self) -> bool:
        return self.client_streams or self.server_streams


Handler = Callable[[web.Request, Method], Awaitable[web.StreamResponse]]


def methods_of(name: str, service: ServiceDescriptor, stub_of: Callable[[Agents, Located], Any]) -> tuple[Method, ...]:
    """The rows of a service that clients call by ``name``."""

    def begin(method: str) -> Callable[[Agents, Located], Callable[..., Any]]:
        def of_sandbox(agents: Agents, located: Located) -> Callable[..., Any]:
            stub: Callable[..., Any] = getattr(stub_of(agents, located), method)
            return stub

        return of_sandbox

    return tuple(
        Method(
            path=f"/{name}/{method.name}",
            request=GetMessageClass(method.input_type),
            client_streams=method.client_streaming,
            server_streams=method.server_streaming,
            begin=begin(method.name),
        )
        for method in service.methods
    )


def routes_of(methods: Iterable[Method], handler_of: Callable[[Method], Handler]) -> list[web.RouteDef]:
    """A POST route for each row."""
    return [web.post(method.path, _bound(handler_of(method), method)) for method in methods]


def _bound(handler: Handler, method: Method) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        with request.app[ROOM].place() as place:
            request[PLACE] = place
            return await handler(request, method)

    return answer


def codec_of(request: web.Request, method: Method) -> Codec:
    """The codec that the content type names. Raises 415, or InvalidArgument for another version of the protocol."""
    wanted, _, parameters = request.headers.get("Content-Type", "").partition(";")
    types = {codec.stream_type if method.streams else codec.unary_type: codec for codec in CODECS}
    codec = types.get(wanted.strip().lower())
    if codec is None or not _is_utf8(parameters):
        raise web.HTTPUnsupportedMediaType(headers={"Accept-Post": ", ".join(types)})
    if (version := request.headers.get("Connect-Protocol-Version", "1")) != "1":
        raise InvalidArgument(f"Connect-Protocol-Version must be 1, not {version[:16]!a}")
    if codec is JSON and knows_first_form_only(request.headers.get("User-Agent", "")):
        return FIRST_FORM_JSON
    return codec


def _is_utf8(parameters: str) -> bool:
    name, _, value = parameters.partition("=")
    return name.strip().lower() != "charset" or value.strip().strip('"').lower() in {"utf-8", "utf8"}


def fallback_of(methods: Iterable[Method]) -> web.RouteDef:
    """The route after all others: a path of the form ``/package.Service/Method`` that is none of ours, or no POST."""
    known = frozenset(method.path for method in methods)

    async def refuse(request: web.Request) -> web.StreamResponse:
        if request.path in known:
            raise web.HTTPMethodNotAllowed(request.method, [hdrs.METH_POST])
        raise web.HTTPNotFound

    return web.route(hdrs.METH_ANY, r"/{service:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+}/{method:[A-Za-z_]\w*}", refuse)
