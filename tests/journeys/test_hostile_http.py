"""Hostile bytes at the edge: each gets the contract's answer, soon, and never a 500, a hang or a traceback.

A row is the literal request. What each may answer is written beside it; that no answer tells of the inside, and that the
gateway works as before, is checked after every one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.raw_http import RawReply, envelope, exchange, request

#: The longest any refusal may take; many times what one takes, and less than any timeout that would hide a hang.
PATIENCE = 15.0
NONE = 0
"""The server closed the connection without an answer; right only for what is no HTTP at all."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A sandbox as its owner knows it, and what a call to it carries."""

    gateway: Gateway
    sandbox_id: str
    token: str

    @property
    def control(self) -> dict[str, str]:
        return {"X-API-Key": self.gateway.api_key, "Content-Type": "application/json"}

    @property
    def data(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}

    def send(self, data: bytes, *, half_close: bool = False) -> RawReply:
        return exchange(self.gateway.address, data, half_close=half_close, timeout=PATIENCE)


@pytest.fixture(scope="module")
def target(gateway: Gateway) -> Iterator[Target]:
    made = gateway.create_sandbox()
    yield Target(gateway=gateway, sandbox_id=made["sandboxID"], token=made["envdAccessToken"])
    gateway.rest("DELETE", f"/sandboxes/{made['sandboxID']}")


@pytest.fixture(autouse=True)
def unharmed(target: Target) -> Iterator[None]:
    mark = len(target.gateway.log())
    yield
    assert target.gateway.rest("GET", f"/sandboxes/{target.sandbox_id}").status == 200
    health = target.send(request("GET", "/health", target.data))
    assert health.status == 204
    assert "Traceback" not in target.gateway.log()[mark:]


def tells_nothing_of_the_inside(reply: RawReply) -> bool:
    text = reply.body.decode(errors="replace")
    return not any(word in text for word in ("Traceback", ".py", "aiohttp", "grpc", "asyncio", "sqlalchemy"))


Build = Callable[[Target], bytes]


def create(body: bytes | object, path: str = "/v2/sandboxes") -> Build:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda target: request("POST", path, target.control, body=content)


def control(method: str, path: str, body: bytes = b"") -> Build:
    return lambda target: request(method, path.format(id=target.sandbox_id), target.control, body=body)


def template(**fields: object) -> Build:
    return create({"templateID": "base", **fields})


CONTROL: list[tuple[str, Build, set[int]]] = [
    ("no body", create(b""), {400}),
    ("broken json", create(b'{"templateID":'), {400}),
    ("not utf-8", create(b'{"templateID":"\xff\xfe"}'), {400}),
    ("lone surrogate", create(b'{"templateID":"\\ud800"}'), {400, 404}),
    ("an array", create([]), {400}),
    ("null", create(b"null"), {400}),
    ("a number", create(b"1" * 5000), {400}),
    ("deeply nested", create(b'{"templateID":"base","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), {400}),
    ("not a number", create(b'{"templateID":"base","timeout":NaN}'), {400}),
    ("infinite", create(b'{"templateID":"base","timeout":1e999}'), {400}),
    ("no template", create({}), {400}),
    ("template is a number", create({"templateID": 5}), {400}),
    ("template is empty", create({"templateID": ""}), {400, 404}),
    ("template is unknown", create({"templateID": "no-such-template"}), {404}),
    ("template is a path", create({"templateID": "../../etc"}), {400, 404}),
    ("template holds NUL", create({"templateID": "ba\0se"}), {400, 404}),
    ("template is huge", create({"templateID": "x" * 1_000_000}), {400, 404}),
    ("timeout is text", template(timeout="60"), {400}),
    ("timeout is true", template(timeout=True), {400}),
    ("timeout is a fraction", template(timeout=1.5), {400}),
    ("timeout is zero", template(timeout=0), {400}),
    ("timeout is negative", template(timeout=-5), {400}),
    ("timeout is beyond any integer", template(timeout=10**30), {400}),
    ("metadata is an array", template(metadata=["a"]), {400}),
    ("metadata value is a number", template(metadata={"a": 1}), {400}),
    ("metadata holds NUL", template(metadata={"a": "\0"}), {400}),
    ("variables are text", template(envVars="A=1"), {400}),
    ("variable without a name", template(envVars={"": "x"}), {400}),
    ("variable with = in its name", template(envVars={"A=B": "x"}), {400}),
    ("variable holds NUL", template(envVars={"A": "x\0y"}), {400}),
    ("volume that cannot be", template(volumeMounts=[{"name": "v", "path": "/v"}]), {400}),
    ("timeout of an id that is none", control("POST", "/sandboxes/../x/timeout", b'{"timeout":5}'), {400, 404}),
    ("id climbs", control("GET", "/sandboxes/../../etc/passwd"), {400, 404}),
    ("id climbs, escaped", control("GET", "/sandboxes/%2e%2e%2f%2e%2e%2fetc"), {400, 404}),
    ("id is empty", control("GET", "/sandboxes/"), {400, 404}),
    ("id is long", control("GET", "/sandboxes/" + "a" * 300), {400, 404}),
    ("id holds NUL", control("GET", "/sandboxes/i%00abc"), {400, 404}),
    ("id has capitals", control("GET", "/sandboxes/IABC"), {400, 404}),
    ("id is not text", control("GET", "/sandboxes/%ff%fe"), {400, 404}),
    ("id is unknown", control("GET", "/sandboxes/i00000000000000000000"), {404}),
    ("kill of an unknown id", control("DELETE", "/sandboxes/i00000000000000000000"), {404}),
    ("timeout body is broken", control("POST", "/sandboxes/{id}/timeout", b"{"), {400}),
    ("timeout body is empty", control("POST", "/sandboxes/{id}/timeout", b"{}"), {400}),
    ("timeout body is text", control("POST", "/sandboxes/{id}/timeout", b'{"timeout":"9"}'), {400}),
    ("connect body is an array", control("POST", "/v2/sandboxes/{id}/connect", b"[]"), {400}),
    ("connect for no time", control("POST", "/v2/sandboxes/{id}/connect", b'{"timeout":-1}'), {400}),
    ("list limit is zero", control("GET", "/v2/sandboxes?limit=0"), {400}),
    ("list limit is text", control("GET", "/v2/sandboxes?limit=ten"), {400}),
    ("list limit is huge", control("GET", "/v2/sandboxes?limit=" + "9" * 400), {200, 400}),
    ("list token is junk", control("GET", "/v2/sandboxes?nextToken=%00junk"), {400}),
    ("list order is unknown", control("GET", "/v2/sandboxes?order=sideways"), {400}),
    ("list state is unknown", control("GET", "/v2/sandboxes?state=dreaming"), {400}),
    ("list filter without =", control("GET", "/v2/sandboxes?metadata=abc"), {400}),
    ("list filter is not text", control("GET", "/v2/sandboxes?metadata=a%3D%25ff"), {200, 400}),
    ("list since never", control("GET", "/v2/sandboxes?startedAfter=yesterday"), {400}),
    ("list since the year 99999", control("GET", "/v2/sandboxes?startedAfter=99999-01-01T00:00:00Z"), {400}),
    ("unknown route", control("GET", "/no/such/route"), {400, 404}),
    ("wrong method", control("PUT", "/v2/sandboxes"), {405}),
    ("method of nobody's", control("FROBNICATE", "/v2/sandboxes"), {400, 405, 501}),
]


@pytest.mark.parametrize(("build", "statuses"), [row[1:] for row in CONTROL], ids=[row[0] for row in CONTROL])
def test_control_plane_refuses(target: Target, build: Build, statuses: set[int]) -> None:
    reply = target.send(build(target))
    assert reply.status in statuses, reply
    assert tells_nothing_of_the_inside(reply), reply
    if reply.status >= 400:
        # The SDKs parse this before they look at the status (rest.md 1.3).
        assert reply.json()["code"] == reply.status
        assert isinstance(reply.json()["message"], str)


def test_body_beyond_the_limit_is_refused_before_it_is_read(target: Target) -> None:
    fields = {**target.control, "Content-Length": str(1 << 40)}
    reply = target.send(request("POST", "/v2/sandboxes", fields, body=b'{"templateID":"base"}'))
    assert reply.status == 413
    assert reply.json()["code"] == 413


STREAM = "/process.Process/Start"
COMMAND = {"process": {"cmd": "/bin/true"}}


def stream(body: bytes, path: str = STREAM, content_type: str = "application/connect+json", **extra: str) -> Build:
    return lambda target: request("POST", path, {**target.data, "Content-Type": content_type, **extra}, body=body)


def start(**fields: object) -> Build:
    return stream(envelope({"process": {"cmd": "/bin/true", **fields}}))


ENDS_IN_THE_STREAM: list[tuple[str, Build, set[str]]] = [
    ("no envelope", stream(b""), {"invalid_argument"}),
    ("half a header", stream(b"\0\0\0"), {"invalid_argument"}),
    ("cut short", stream(envelope(COMMAND, announced=5000)), {"invalid_argument"}),
    ("announces 4 GiB", stream(envelope(COMMAND, announced=0xFFFFFFFF)), {"resource_exhausted", "invalid_argument"}),
    ("two messages", stream(envelope(COMMAND) * 2), {"invalid_argument", "unimplemented"}),
    ("broken json", stream(envelope(b'{"process":')), {"invalid_argument"}),
    ("not utf-8", stream(envelope(b'{"process":{"cmd":"\xff"}}')), {"invalid_argument"}),
    ("an array", stream(envelope(b"[]")), {"invalid_argument"}),
    ("deeply nested", stream(envelope(b"[" * 50_000 + b"]" * 50_000)), {"invalid_argument"}),
    ("wrong type", stream(envelope({"process": {"cmd": 5}})), {"invalid_argument"}),
    ("args are text", start(args="x"), {"invalid_argument"}),
    ("compressed without a word", stream(envelope(b"\x1f\x8bjunk", flags=1)), {"invalid_argument", "internal"}),
    (
        "compressed, and is not",
        stream(envelope(b"junk", flags=1), **{"Connect-Content-Encoding": "gzip"}),
        {"invalid_argument"},
    ),
    (
        "compressed in an unknown way",
        stream(envelope(COMMAND), **{"Connect-Content-Encoding": "rot13"}),
        {"unimplemented", "invalid_argument"},
    ),
    ("unknown flags", stream(envelope(COMMAND, flags=0x7C)), {"invalid_argument", "internal"}),
    ("not protobuf", stream(envelope(b"\xff" * 40), content_type="application/connect+proto"), {"invalid_argument"}),
    ("no command", stream(envelope({})), {"invalid_argument"}),
    ("command holds NUL", stream(envelope({"process": {"cmd": "/bin/\0true"}})), {"invalid_argument"}),
    ("argument holds NUL", start(args=["a\0b"]), {"invalid_argument"}),
    ("variable with =", start(envs={"A=B": "x"}), {"invalid_argument"}),
    ("argument beyond the system's limit", start(args=["x" * 5_000_000]), {"invalid_argument"}),
    ("cwd is missing", start(cwd="/no/such"), {"invalid_argument"}),
    ("cwd is a file", start(cwd="/etc/passwd"), {"invalid_argument"}),
    ("cwd holds NUL", start(cwd="/tm\0p"), {"invalid_argument"}),
    ("cwd is another's home", start(cwd="~root"), {"invalid_argument"}),
    ("cwd is huge", start(cwd="/" + "a/" * 50_000), {"invalid_argument"}),
    ("timeout is text", stream(envelope(COMMAND), **{"Connect-Timeout-Ms": "soon"}), {"invalid_argument"}),
    ("timeout is too long", stream(envelope(COMMAND), **{"Connect-Timeout-Ms": "9" * 11}), {"invalid_argument"}),
    ("timeout is negative", stream(envelope(COMMAND), **{"Connect-Timeout-Ms": "-1"}), {"invalid_argument"}),
    ("user is unknown", stream(envelope(COMMAND), Authorization="Basic bm8tc3VjaDo="), {"unauthenticated"}),
    ("attach to nothing", stream(envelope({}), "/process.Process/Connect"), {"invalid_argument", "unimplemented"}),
    ("attach to a stranger", stream(envelope({"process": {"pid": 1}}), "/process.Process/Connect"), {"not_found"}),
    (
        "input before its process",
        stream(envelope({"data": {"input": {"stdin": "YQ=="}}}), "/process.Process/StreamInput"),
        {"invalid_argument"},
    ),
    (
        "input that is not base64",
        stream(envelope({"data": {"input": {"stdin": "%%%"}}}), "/process.Process/StreamInput"),
        {"invalid_argument"},
    ),
    ("input of nothing at all", stream(b"", "/process.Process/StreamInput"), {"invalid_argument"}),
]


@pytest.mark.parametrize(
    ("build", "codes"), [row[1:] for row in ENDS_IN_THE_STREAM], ids=[row[0] for row in ENDS_IN_THE_STREAM]
)
def test_stream_ends_with_an_error(target: Target, build: Build, codes: set[str]) -> None:
    """Errors of a stream stand in its end frame under HTTP 200, or the JavaScript SDK misreads them (envd.md 2.7)."""
    reply = target.send(build(target))
    assert reply.status == 200, reply
    assert reply.headers["content-type"].startswith("application/connect+")
    assert reply.end_error is not None
    assert reply.end_error["code"] in codes, reply.end_error
    assert reply.end_error.get("message")
    assert tells_nothing_of_the_inside(reply), reply


def unary(path: str, body: bytes | object, content_type: str = "application/json", **extra: str) -> Build:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda target: request("POST", path, {**target.data, "Content-Type": content_type, **extra}, body=content)


def stat(path: str) -> Build:
    return unary("/filesystem.Filesystem/Stat", {"path": path})


def signal_of(**fields: object) -> Build:
    return unary("/process.Process/SendSignal", fields)


UNARY: list[tuple[str, Build, set[tuple[int, str]]]] = [
    ("broken json", unary("/process.Process/List", b"{"), {(400, "invalid_argument")}),
    ("not utf-8", unary("/filesystem.Filesystem/Stat", b'{"path":"\xff"}'), {(400, "invalid_argument")}),
    ("an array", unary("/filesystem.Filesystem/Stat", []), {(400, "invalid_argument")}),
    ("wrong type", unary("/filesystem.Filesystem/Stat", {"path": {}}), {(400, "invalid_argument")}),
    (
        "deeply nested",
        unary("/filesystem.Filesystem/Stat", b'{"x":' * 50_000 + b"1" + b"}" * 50_000),
        {(400, "invalid_argument")},
    ),
    (
        "not protobuf",
        unary("/filesystem.Filesystem/Stat", b"\xff" * 30, content_type="application/proto"),
        {(400, "invalid_argument")},
    ),
    ("path holds NUL", stat("/tmp/\0x"), {(400, "invalid_argument")}),
    ("path is huge", stat("/" + "a" * 100_000), {(400, "invalid_argument")}),
    ("path has many parts", stat("/a" * 20_000), {(400, "invalid_argument")}),
    ("path is another's home", stat("~root/x"), {(400, "invalid_argument")}),
    ("path is a lone surrogate", unary("/filesystem.Filesystem/Stat", b'{"path":"\\ud800"}'), {(400, "invalid_argument")}),
    ("path is missing", stat("/no/such"), {(404, "not_found")}),
    ("list of a file", unary("/filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}), {(400, "invalid_argument")}),
    (
        "list deeper than a number goes",
        unary("/filesystem.Filesystem/ListDir", {"path": "/", "depth": 1 << 40}),
        {(400, "invalid_argument")},
    ),
    ("remove nothing", unary("/filesystem.Filesystem/Remove", {"path": ""}), {(400, "invalid_argument")}),
    ("signal to a stranger", signal_of(process={"pid": 1}, signal="SIGNAL_SIGKILL"), {(404, "not_found")}),
    ("signal to pid 0", signal_of(process={"pid": 0}, signal="SIGNAL_SIGKILL"), {(404, "not_found"), (400, "invalid_argument")}),
    ("signal to a negative pid", signal_of(process={"pid": -1}, signal="SIGNAL_SIGKILL"), {(400, "invalid_argument")}),
    (
        "signal of no name",
        signal_of(process={"pid": 2}, signal="SIGNAL_SIGFUN"),
        {(400, "invalid_argument"), (404, "not_found"), (501, "unimplemented")},
    ),
    ("input to a stranger", unary("/process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "YQ=="}}), {(404, "not_found")}),
    (
        "timeout is text",
        unary("/process.Process/List", b"{}", **{"Connect-Timeout-Ms": "x"}),
        {(400, "invalid_argument")},
    ),
    (
        "compressed in an unknown way",
        unary("/process.Process/List", b"{}", **{"Content-Encoding": "rot13"}),
        {(501, "unimplemented"), (400, "invalid_argument"), (415, "unimplemented")},
    ),
    ("unknown method", unary("/process.Process/Explode", b"{}"), {(404, "unimplemented"), (501, "unimplemented")}),
    ("unknown service", unary("/process.Nothing/List", b"{}"), {(404, "unimplemented"), (501, "unimplemented")}),
]  # fmt: skip


@pytest.mark.parametrize(("build", "answers"), [row[1:] for row in UNARY], ids=[row[0] for row in UNARY])
def test_unary_call_is_refused(target: Target, build: Build, answers: set[tuple[int, str]]) -> None:
    reply = target.send(build(target))
    assert reply.headers["content-type"].startswith("application/json"), reply
    assert (reply.status, reply.json()["code"]) in answers, reply
    assert tells_nothing_of_the_inside(reply), reply


def test_wrong_content_type_says_what_would_be_right(target: Target) -> None:
    reply = target.send(unary("/process.Process/List", b"{}", content_type="text/plain")(target))
    assert reply.status == 415
    assert "application/json" in reply.headers["accept-post"]


def test_calls_are_posts(target: Target) -> None:
    assert target.send(request("GET", "/process.Process/List", target.data)).status == 405


#: Every header whose value the gateway looks at.
READ_HEADERS = [
    "Accept", "Accept-Encoding", "Access-Control-Request-Headers", "Authorization", "Baggage", "Connect-Content-Encoding",
    "Connect-Protocol-Version", "Connect-Timeout-Ms", "Content-Encoding", "Content-Type", "Cookie", "E2b-Sandbox-Id",
    "E2b-Sandbox-Port", "E2b-Traffic-Access-Token", "Expect", "Forwarded", "Host", "Idempotency-Key", "If-Match",
    "If-Modified-Since", "If-None-Match", "If-Range", "If-Unmodified-Since", "Keepalive-Ping-Interval", "Origin", "Range",
    "Traceparent", "Tracestate", "User-Agent", "X-API-Key", "X-Access-Token", "X-Admin-Token", "X-Forwarded-For",
    "X-Forwarded-Proto", "X-Metadata-A", "X-Request-Id", "X-Team-ID",
]  # fmt: skip


@pytest.mark.parametrize("name", READ_HEADERS)
def test_header_that_is_not_text_is_never_a_fault_of_the_gateway(target: Target, name: str) -> None:
    """A header may hold any bytes, and a message only text: what becomes of it is for whoever sent it to know."""
    octets = {**target.data, "Content-Type": "application/octet-stream"}
    json_type = {**target.data, "Content-Type": "application/json"}
    body = json.dumps({"templateID": "base", "timeout": 5}).encode()
    for method, path, fields, content in (
        ("POST", "/v2/sandboxes", target.control, body),
        ("GET", "/api-keys", {"X-Admin-Token": "x"}, b""),
        ("OPTIONS", "/v2/sandboxes", {"Origin": "x", "Access-Control-Request-Method": "POST"}, b""),
        ("POST", "/filesystem.Filesystem/Stat", json_type, b'{"path":"/"}'),
        ("POST", "/files?path=odd-header", octets, b"x"),
        ("GET", "/files?path=/etc/hostname", target.data, b""),
        ("GET", "/", {**target.data, "E2b-Sandbox-Port": "9"}, b""),
    ):
        for value in (b"\xff\xfe\x80", b"a\xc3\x28", "\u20ac".encode()):
            data = request(method, path, {**fields, name: "VALUE"}, body=content).replace(b"VALUE", value, 1)
            reply = target.send(data)
            assert reply.status not in {NONE, 500}, (method, path, reply)
            assert tells_nothing_of_the_inside(reply), reply
            if reply.status == 201:
                target.gateway.rest("DELETE", f"/sandboxes/{reply.json()['sandboxID']}")


def routed(**fields: str) -> Build:
    return lambda target: request("GET", "/health", {name.replace("_", "-"): value for name, value in fields.items()})


ROUTING: list[tuple[str, Build, set[int]]] = [
    ("id is unknown", routed(E2b_Sandbox_Id="i00000000000000000000", E2b_Sandbox_Port="49983"), {502}),
    ("id is malformed", routed(E2b_Sandbox_Id="../x", E2b_Sandbox_Port="49983"), {400}),
    ("id is long", routed(E2b_Sandbox_Id="a" * 300, E2b_Sandbox_Port="49983"), {400, 502}),
    ("port is missing", lambda t: request("GET", "/health", {"E2b-Sandbox-Id": t.sandbox_id}), {400}),
    ("id is missing", routed(E2b_Sandbox_Port="49983"), {400}),
    ("port is text", lambda t: request("GET", "/health", {**t.data, "E2b-Sandbox-Port": "abc"}), {400}),
    ("port is beyond ports", lambda t: request("GET", "/health", {**t.data, "E2b-Sandbox-Port": "70000"}), {400}),
    ("port is negative", lambda t: request("GET", "/health", {**t.data, "E2b-Sandbox-Port": "-1"}), {400}),
    ("port in other digits", lambda t: request("GET", "/health", {**t.data, "E2b-Sandbox-Port": "٤٩"}), {400}),
    ("internal route", lambda t: request("POST", "/init", t.data, body=b"{}"), {404}),
    ("internal route, disguised", lambda t: request("POST", "//init", t.data, body=b"{}"), {404}),
    ("internal route, climbing", lambda t: request("POST", "/files/../init", t.data, body=b"{}"), {400, 404}),
]


@pytest.mark.parametrize(("build", "statuses"), [row[1:] for row in ROUTING], ids=[row[0] for row in ROUTING])
def test_routing_refuses(target: Target, build: Build, statuses: set[int]) -> None:
    reply = target.send(build(target))
    assert reply.status in statuses, reply
    assert tells_nothing_of_the_inside(reply), reply


def test_unknown_sandbox_is_told_in_the_words_that_sdks_parse(target: Target) -> None:
    sandbox_id = "i00000000000000000000"
    reply = target.send(request("GET", "/health", {**target.data, "E2b-Sandbox-Id": sandbox_id}))
    assert reply.status == 502
    assert reply.json() == {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}


@pytest.mark.parametrize("path", ["//health", "//process.Process/List", "//files?path=/etc/hostname"])
def test_base_url_with_a_slash_at_its_end_works(target: Target, path: str) -> None:
    """A client that joins `http://host/` and `/path` sends two slashes (envd.md 1.1)."""
    method = "POST" if "Process" in path else "GET"
    body = b"{}" if method == "POST" else b""
    fields = {**target.data, "Content-Type": "application/json"}
    assert target.send(request(method, path, fields, body=body)).status in {200, 204}


FILES: list[tuple[str, Build, set[int]]] = [
    ("download without a path", lambda t: request("GET", "/files", t.data), {400}),
    ("download of NUL", lambda t: request("GET", "/files?path=%00", t.data), {400}),
    ("download of what is not text", lambda t: request("GET", "/files?path=%ff", t.data), {400, 404}),
    ("download of a long path", lambda t: request("GET", "/files?path=/" + "a" * 5000, t.data), {400, 404, 414}),
    ("download of a path without end", lambda t: request("GET", "/files?path=/" + "a" * 200_000, t.data), {400, 414, 431}),
    ("download of a folder", lambda t: request("GET", "/files?path=/etc", t.data), {400}),
    ("download of nothing", lambda t: request("GET", "/files?path=/no/such", t.data), {404}),
    ("download for nobody", lambda t: request("GET", "/files?path=x&username=no-such", t.data), {401}),
    ("download of a broken range", lambda t: request("GET", "/files?path=/etc/passwd", {**t.data, "Range": "bytes=x-"}), {200, 416}),
    ("download beyond the end", lambda t: request("GET", "/files?path=/etc/passwd", {**t.data, "Range": "bytes=9999999-"}), {416}),
    ("upload of no kind", lambda t: request("POST", "/files?path=x", {**t.data, "Content-Type": "text/plain"}, body=b"x"), {400, 415}),
    ("upload without a path", lambda t: request("POST", "/files", {**t.data, "Content-Type": "application/octet-stream"}, body=b"x"), {400}),
    ("upload into NUL", lambda t: request("POST", "/files?path=a%00b", {**t.data, "Content-Type": "application/octet-stream"}, body=b"x"), {400}),
    ("upload onto a folder", lambda t: request("POST", "/files?path=/etc", {**t.data, "Content-Type": "application/octet-stream"}, body=b"x"), {400}),
    (
        "upload of broken gzip",
        lambda t: request("POST", "/files?path=x", {**t.data, "Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, body=b"no"),
        {400},
    ),
    ("multipart without a boundary", lambda t: request("POST", "/files?path=x", {**t.data, "Content-Type": "multipart/form-data"}, body=b"x"), {400}),
    (
        "multipart that is none",
        lambda t: request("POST", "/files?path=x", {**t.data, "Content-Type": "multipart/form-data; boundary=B"}, body=b"nothing of the kind"),
        {400},
    ),
    (
        "multipart cut short",
        lambda t: request(
            "POST", "/files?path=x", {**t.data, "Content-Type": "multipart/form-data; boundary=B"},
            body=b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhalf',
        ),
        {400},
    ),
    (
        "metadata beyond the limit",
        lambda t: request("POST", "/files?path=x", {**t.data, "Content-Type": "application/octet-stream", "X-Metadata-A": "x" * 5000}, body=b"x"),
        {400},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "statuses"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_files_refuse(target: Target, build: Build, statuses: set[int]) -> None:
    reply = target.send(build(target))
    assert reply.status in statuses, reply
    assert tells_nothing_of_the_inside(reply), reply


ODD_NAMES = [
    "with space", "double  space ", "qu\"o'te", "per%cent", "per%20cent", "plus+plus", "ü–漢字–😀", "semi;colon", "back\\slash",
    "amp&ersand=x", "#hash?query", "new\nline", "-dash", "$(touch x)", "`id`", "*", "..dots", ".hidden", "x" * 255,
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_odd_file_name_goes_there_and_back(target: Target, name: str) -> None:
    path = f"/home/user/odd/{name}"
    query = urllib.parse.urlencode({"path": path})
    fields = {**target.data, "Content-Type": "application/octet-stream"}
    written = target.send(request("POST", f"/files?{query}", fields, body=name.encode()))
    assert written.status == 200, written
    assert written.json()[0]["path"] == path
    assert target.send(request("GET", f"/files?{query}", target.data)).body == name.encode()
    listed = target.send(unary("/filesystem.Filesystem/ListDir", {"path": "/home/user/odd"})(target))
    assert name in [entry["name"] for entry in listed.json()["entries"]]


GARBAGE: list[tuple[str, Callable[[Target], bytes]]] = [
    ("no http", lambda _: b"GARBAGE\r\n\r\n"),
    ("only NUL", lambda _: b"\0" * 4096),
    ("a TLS hello", lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))),
    ("HTTP/2 with prior knowledge", lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("an unknown version", lambda _: b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n"),
    ("no host", lambda _: b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"),
    ("two lengths", lambda t: request("POST", "/v2/sandboxes", {**t.control, "Content-Length": "2\r\nContent-Length: 3"}, body=b"{}")),
    ("a length that is none", lambda t: request("POST", "/v2/sandboxes", {**t.control, "Content-Length": "two"}, body=b"{}")),
    ("a negative length", lambda t: request("POST", "/v2/sandboxes", {**t.control, "Content-Length": "-1"}, body=b"{}")),
    (
        "length and chunks",
        lambda t: request("POST", "/v2/sandboxes", {**t.control, "Content-Length": "2", "Transfer-Encoding": "chunked"}, body=b"0\r\n\r\n"),
    ),
    ("chunks that are none", lambda t: request("POST", "/v2/sandboxes", {**t.control, "Transfer-Encoding": "chunked"}, body=b"zz\r\nhi\r\n")),
    ("a chunk beyond memory", lambda t: request("POST", "/v2/sandboxes", {**t.control, "Transfer-Encoding": "chunked"}, body=b"f" * 30 + b"\r\n")),
    ("a header without end", lambda t: request("GET", "/health", {"X-Long": "x" * 1_000_000})),
    ("headers without end", lambda t: request("GET", "/health", {f"X-{n}": "x" for n in range(20_000)})),
    ("a header with NUL", lambda _: b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\0b\r\nConnection: close\r\n\r\n"),
    ("a folded header", lambda _: b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\r\n b\r\nConnection: close\r\n\r\n"),
    ("a host of no kind", lambda _: b"GET /health HTTP/1.1\r\nHost: [::1\r\nConnection: close\r\n\r\n"),
    ("an absolute target", lambda _: b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    ("a target that is none", lambda _: b"GET * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    ("a tunnel", lambda _: b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n"),
]  # fmt: skip


@pytest.mark.parametrize("build", [row[1] for row in GARBAGE], ids=[row[0] for row in GARBAGE])
def test_what_is_hardly_http_is_refused_or_cut(target: Target, build: Callable[[Target], bytes]) -> None:
    reply = target.send(build(target), half_close=True)
    assert reply.status == NONE or reply.status < 500 or reply.status in {501, 505}, reply
    assert tells_nothing_of_the_inside(reply), reply


def test_slow_senders_do_not_keep_others_waiting(target: Target) -> None:
    """Slow loris: many connections that never finish their request hold no place that an honest client needs."""
    half = request("POST", "/v2/sandboxes", {**target.control, "Content-Length": "1000"}, body=b"{")
    with contextlib.ExitStack() as stack:
        for number in range(200):
            slow = stack.enter_context(socket.create_connection(target.gateway.address, timeout=PATIENCE))
            slow.sendall(half[: len(half) if number % 2 else 40])
        began = time.monotonic()
        for _ in range(20):
            assert target.send(request("GET", "/health", target.data)).status == 204
        assert time.monotonic() - began < PATIENCE


def test_clients_that_leave_early_take_nothing_with_them(target: Target) -> None:
    """B08: a client that goes away just when its command starts; the process table shows only what really runs."""
    command: dict[str, Any] = {"process": {"cmd": "/bin/sleep", "args": ["0.2"]}, "stdin": False}
    data = stream(envelope(command))(target)
    for number in range(60):
        with socket.create_connection(target.gateway.address, timeout=PATIENCE) as connection:
            connection.sendall(data)
            time.sleep(number % 10 / 1000)
    end = time.monotonic() + PATIENCE
    while (listed := target.send(unary("/process.Process/List", b"{}")(target)).json()).get("processes"):
        assert time.monotonic() < end, listed
        time.sleep(0.05)
