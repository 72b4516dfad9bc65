"""Heads of requests and answers as they pass the gateway (RFC 9110 section 7.6, RFC 9112; behaviour.md R8, R9).

What belongs to one connection only stays on it. How a body is framed is said anew on each side, from what its reader found:
a length or a coding that is repeated unread is what request smuggling is made of. Everything else passes byte for byte, in
order and in its own spelling.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import h11
from aiohttp import web

from sandgate_edge.ambiguity import authority_and_rest, tokens
from sandgate_edge.keys import TARGET
from sandgate_errors import InvalidArgument

__all__ = [
    "TRAFFIC_TOKEN",
    "AnswerHead",
    "Headers",
    "Networks",
    "answer_head",
    "interim_head",
    "last_chunk",
    "request_head",
]

Headers: TypeAlias = list[tuple[bytes, bytes]]
Networks: TypeAlias = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]

TRAFFIC_TOKEN = "e2b-traffic-access-token"  # noqa: S105 - the name of a header

_OF_ONE_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Trailers of a request are not read, so none are announced. The token is for this gateway and not for the code behind it.
_NOT_ONWARD = frozenset({b"content-length", b"host", b"trailer", TRAFFIC_TOKEN.encode()})
# Said by whoever sits before the client; only this gateway knows who that is (R9).
_FORWARDED = (b"forwarded", b"x-forwarded-", b"x-real-ip")
_NO_BODY = frozenset({204, 304})
# Who reads them after the body would have had to know them before (RFC 9110 section 6.5.1).
_NO_TRAILERS = frozenset({b"content-length", b"content-encoding", b"content-type", b"host", b"trailer"})


def request_head(request: web.Request, *, port: int, mask: str, trusted: Networks = ()) -> h11.Request:
    """The head to send to the server. Raises InvalidArgument for what must not be passed on.

    ``mask`` replaces the host where it is not empty (R8). ``trusted`` are the peers whose word about the client counts.
    """
    received = request.raw_headers
    host = _host(received, port)
    passed = [pair for pair in _end_to_end(received) if not _is_dropped(pair[0].lower())]
    headers: Headers = [(b"Host", mask.replace("${PORT}", str(port)).encode() if mask else host)]
    headers += passed
    headers += _forwarded(request, host, trusted)
    headers += _request_framing(received)
    # An old client cannot change the protocol, whatever it says (RFC 9110 section 7.8).
    headers += _upgrade(received) if request.version >= (1, 1) else [(b"Connection", b"close")]
    try:
        return h11.Request(method=request.method, target=_target(request), headers=headers)
    except h11.LocalProtocolError as error:
        raise InvalidArgument("the request cannot be passed on: a header or the target is not valid") from error


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The head of an answer, and how its body is to be framed."""

    data: bytes
    chunked: bool
    ends_by_closing: bool
    """The server says neither a length nor chunks: its end is the end of the body, whatever caused it."""
    keep_alive: bool


def answer_head(request: web.Request, answer: h11.Response, *, keep_alive: bool) -> AnswerHead:
    """The head of a final answer for the client. ``keep_alive`` is whether its connection may be used again."""
    headers = [pair for pair in _end_to_end(answer.headers.raw_items()) if pair[0].lower() != b"content-length"]
    in_chunks = any(name == b"transfer-encoding" for name, _ in answer.headers)
    lengths = [value for name, value in answer.headers if name == b"content-length" and not in_chunks]
    if lengths and answer.status_code != 204:
        headers.append((b"Content-Length", lengths[0]))
    has_body = request.method != "HEAD" and answer.status_code not in _NO_BODY
    modern = request.version >= (1, 1)
    chunked = has_body and not lengths and modern
    if chunked:
        headers.append((b"Transfer-Encoding", b"chunked"))
    keep_alive = keep_alive and modern
    if not keep_alive:
        headers.append((b"Connection", b"close"))
    return AnswerHead(
        data=_head(answer.status_code, answer.reason, headers),
        chunked=chunked,
        ends_by_closing=has_body and not lengths and not in_chunks,
        keep_alive=keep_alive,
    )


def interim_head(answer: h11.InformationalResponse) -> bytes:
    """The head of an answer before the final one; of 101, with the protocol that is spoken from here on."""
    headers = _end_to_end(answer.headers.raw_items())
    if answer.status_code == 101:
        protocols = [(b"Upgrade", value) for name, value in answer.headers if name == b"upgrade"]
        headers += [(b"Connection", b"Upgrade"), *protocols]
    return _head(answer.status_code, answer.reason, headers)


def last_chunk(end: h11.EndOfMessage) -> bytes:
    """The end of a chunked body, with the trailers that the server has sent."""
    trailers = [pair for pair in _end_to_end(end.headers.raw_items()) if pair[0].lower() not in _NO_TRAILERS]
    return b"\r\n".join((b"0", *(b"%b: %b" % pair for pair in trailers), b"", b""))


def _head(status: int, reason: bytes, headers: Headers) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, bytes(reason)), *(b"%b: %b" % pair for pair in headers)]
    return b"\r\n".join((*lines, b"", b""))


def _end_to_end(received: Iterable[tuple[bytes, bytes]]) -> Headers:
    pairs = [(bytes(name), bytes(value)) for name, value in received]
    named = {token.encode() for token in _tokens(pairs, b"connection")}
    dropped = _OF_ONE_CONNECTION | named
    return [pair for pair in pairs if pair[0].lower() not in dropped]


def _is_dropped(name: bytes) -> bool:
    return name in _NOT_ONWARD or name.startswith(_FORWARDED)


def _tokens(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return tokens(value.decode("latin-1") for name, value in headers if name.lower() == wanted)


def _host(received: Sequence[tuple[bytes, bytes]], port: int) -> bytes:
    hosts = [value for name, value in received if name.lower() == b"host"]
    if len(hosts) > 1:
        raise InvalidArgument("a request has one Host header")
    # HTTP/1.0 needs none; the server behind may well.
    return hosts[0] if hosts else f"localhost:{port}".encode()


def _target(request: web.Request) -> bytes:
    """The target as it came, byte for byte; of one with scheme and host, what comes after these."""
    if request.method == "CONNECT":
        raise InvalidArgument("CONNECT is not forwarded")
    _, target = authority_and_rest(request.get(TARGET, request.raw_path))
    return target.encode("utf-8", "surrogateescape")


def _request_framing(received: Sequence[tuple[bytes, bytes]]) -> Headers:
    lengths = [value for name, value in received if name.lower() == b"content-length"]
    if any(name.lower() == b"transfer-encoding" for name, _ in received):
        if lengths:
            raise InvalidArgument("a request has a length or a transfer coding, not both")
        return [(b"Transfer-Encoding", b"chunked")]
    if len(lengths) > 1:
        raise InvalidArgument("a request has one Content-Length header")
    return [(b"Content-Length", lengths[0])] if lengths else []


def _upgrade(received: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Each request has a tunnel of its own, so the server need not wait for another."""
    if "upgrade" in _tokens(received, b"connection"):
        protocols = [value for name, value in received if name.lower() == b"upgrade"]
        if protocols:
            return [(b"Connection", b"Upgrade"), *((b"Upgrade", value) for value in protocols)]
    if "trailers" in _tokens(received, b"te"):
        return [(b"TE", b"trailers"), (b"Connection", b"TE, close")]
    return [(b"Connection", b"close")]


def _forwarded(request: web.Request, host: bytes, trusted: Networks) -> Headers:
    peer, scheme = request.remote or "", "http"
    chain = peer
    if _is_trusted(peer, trusted):
        before = request.headers.getall("X-Forwarded-For", [])
        chain = ", ".join((*before, peer))
        # The proxy in front ends TLS; the last value is its own.
        told = request.headers.get("X-Forwarded-Proto", scheme).rpartition(",")[2].strip().lower()
        scheme = told if told in {"http", "https"} else scheme
    headers: Headers = [(b"X-Forwarded-Host", host), (b"X-Forwarded-Proto", scheme.encode())]
    return [(b"X-Forwarded-For", chain.encode("utf-8", "surrogateescape")), *headers] if chain else headers


def _is_trusted(peer: str, trusted: Networks) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    return any(address in network for network in trusted)
