"""The Connect services that the SDKs call, one module each, and the mechanism of each kind of call."""

from __future__ import annotations

from aiohttp import web

from sandgate_edge.rpc import filesystem, process
from sandgate_edge.rpc.client_stream import client_stream
from sandgate_edge.rpc.server_stream import server_stream
from sandgate_edge.rpc.service import Handler, Method, fallback_of, routes_of
from sandgate_edge.rpc.unary import unary

__all__ = ["METHODS", "routes"]

METHODS = (*process.METHODS, *filesystem.METHODS)


def _handler_of(method: Method) -> Handler:
    if method.client_streams:
        return client_stream
    return server_stream if method.server_streams else unary


routes: list[web.RouteDef] = [
    *routes_of(METHODS, _handler_of),
    fallback_of(METHODS),
]
