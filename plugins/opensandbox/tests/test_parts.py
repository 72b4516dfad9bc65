"""What needs no server: settings, names, rules, and what answers of a server mean, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandgate_errors import (
    Conflict,
    FailedPrecondition,
    Internal,
    NoSpace,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from sandgate_plugin_api import Egress
from sandgate_plugin_opensandbox.execd import Execd, Outcome
from sandgate_plugin_opensandbox.identity import Identity, Name
from sandgate_plugin_opensandbox.rules import policy
from sandgate_plugin_opensandbox.server import Endpoint, Lost, Server, told
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings
from sandgate_plugin_opensandbox.templates import Catalog

SERVER = {"server": "http://127.0.0.1:1"}


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An address that gives one answer to each connection, literally, and what it was asked."""
    asked: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", asked


def reply(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def asked_to_create(answer: bytes) -> None:
    async with answering(answer) as (address, _):
        server = Server.connect(OpenSandboxSettings.read({"server": address}))
        try:
            with told():
                await server.create({})
        finally:
            await server.close()


@pytest.mark.parametrize(
    ("answer", "error", "words", "retry_after"),
    [
        (
            reply("429 x", b'{"code": "KUBERNETES::POOL_CAPACITY_EXHAUSTED", "message": "empty"}', "Retry-After: 7"),
            ResourceExhausted,
            "no room",
            7,
        ),
        (reply("429 x", b"busy", "Retry-After: Wed, 21 Oct 2065 07:28:00 GMT"), ResourceExhausted, "no room", 5),
        (reply("403 x", b'{"code": "KUBERNETES::QUOTA_EXCEEDED", "message": "q"}'), ResourceExhausted, "quota", None),
        (reply("409 x", b'{"detail": {"code": "X", "message": "busy"}}'), Conflict, "busy with", None),
        (reply("503 x", b'{"code": "A", "message": "b"}'), Unavailable, "cannot do it now", 5),
        (reply("500 x", b'{"code": "A", "message": "no space left on device"}'), NoSpace, "disk space", None),
        (
            reply("422 x", b'{"detail": [{"loc": ["body", "timeout"], "msg": "too small", "type": "x"}]}'),
            Internal,
            "refused",
            None,
        ),
        (reply("404 x", b'{"code": "SNAPSHOT::NOT_FOUND", "message": "y"}'), NotFound, "does not exist", None),
        (reply("500 x", b"<html>/srv/secret</html>"), Internal, "refused what", None),
        (reply("307 x", b"", "Location: http://elsewhere/"), Internal, "refused what", None),
    ],
)
async def test_refusals_of_both_shapes_become_errors_of_ours(answer, error, words, retry_after):
    with pytest.raises(error, match=words) as raised:
        await asked_to_create(answer)
    assert raised.value.retry_after == retry_after
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 202 OK\r\nContent-Length: 9\r\n\r\n{",
        reply("504 x", b"{}"),
        reply("502 x"),
        reply("200 x", b"<html>log in, please</html>"),
        reply("202 x", b'{"id": null}'),
        reply("202 x", b'"' + b"x" * 20_000_000 + b'"'),
    ],
    ids=["nothing", "half", "504", "502", "a page of somebody's", "no id", "without an end"],
)
async def test_answer_that_never_came_is_told_from_a_refusal(answer):
    with pytest.raises(Lost):
        await asked_to_create(answer)


async def test_list_that_changed_while_it_was_read_is_read_again():
    """What goes moves others into a page that was read already."""
    pages = [
        b'{"items": [{"id": "a"}], "pagination": {"hasNextPage": true, "totalItems": 3}}',
        b'{"items": [{"id": "c"}], "pagination": {"hasNextPage": false, "totalItems": 3}}',
        b'{"items": [{"id": "b"}, {"id": "c"}], "pagination": {"hasNextPage": false, "totalItems": 2}}',
    ]
    async with answering(*(reply("200 x", page) for page in pages)) as (address, asked):
        server = Server.connect(OpenSandboxSettings.read({"server": address, "api_key": "k"}))
        try:
            found = await server.list({"sandgate-gateway": "g", "x": "y"}, states=["Paused", "Running"])
        finally:
            await server.close()
    assert {each["id"] for each in found} == {"a", "b", "c"}
    first = asked[0].split(b"\r\n", 1)[0]
    assert first.startswith(
        b"GET /v1/sandboxes?metadata=sandgate-gateway%3Dg%26x%3Dy&state=Paused&state=Running&page=1"
    )
    assert b"OPEN-SANDBOX-API-KEY: k\r\n" in asked[0]


@pytest.mark.parametrize(
    ("base", "path", "websocket", "url"),
    [
        ("http://h:1", "ping", False, "http://h:1/ping"),
        ("http://h:1/proxy/44772", "files/upload", False, "http://h:1/proxy/44772/files/upload"),
        ("http://h:1/proxy/49983", "", True, "ws://h:1/proxy/49983/"),
        ("https://h/a/?sig=x%2Fy", "ping", False, "https://h/a/ping?sig=x%2Fy"),
        ("https://h?sig=x", "", True, "wss://h/?sig=x"),
    ],
)
def test_endpoint_may_have_a_path_and_a_query(base, path, websocket, url):
    assert Endpoint(base, {}).url(path, websocket=websocket) == url


async def test_stream_of_a_command_is_read_in_both_forms_and_not_to_its_end():
    """Objects with and without ``data:``, unknown events, and a stream that stays open."""
    body = (
        b'{"type": "init", "text": "id1"}\n\n'
        b'data: {"type": "stdout", "text": "a"}\n\n'
        b"event: x\n\nnot json\n\n{broken\n\n"
        b'{"type": "something-new"}\n\n'
        b'{"type": "error", "error": {"ename": "CommandExecError", "evalue": "3"}}\n\n'
        b'{"type": "stdout", "text": "too late"}\n\n'
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99999\r\n\r\n"
    async with answering(head + body) as (address, asked):
        server = Server.connect(OpenSandboxSettings.read({"server": address}))
        try:
            outcome = await Execd(server.session, Endpoint(address, {"X-Route": "r"}), "t").run("false")
        finally:
            await server.close()
    assert outcome == Outcome(id="id1", exit_code=3, output=["a", "CommandExecError 3"])
    assert b"X-Route: r\r\n" in asked[0]
    assert b"X-EXECD-ACCESS-TOKEN: t\r\n" in asked[0]


@pytest.mark.parametrize(
    "said", [b'{"type": "stdout", "text": "' + b"x" * 1000 + b'"}\n', b"x" * 5000], ids=["many lines", "one line"]
)
async def test_command_that_says_too_much_is_not_listened_to(said):
    """A sandbox that starts anew on its files has what was left there in place of a shell."""
    told = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal told
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(OSError):
            while told < 64 * 2**20:
                writer.write(said)
                await writer.drain()
                told += len(said)
        writer.close()

    listener = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with listener:
        address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server = Server.connect(OpenSandboxSettings.read({"server": address}))
        try:
            with pytest.raises(Internal, match=r"^the sandbox could not be started$"):
                await Execd(server.session, Endpoint(address, {}), "t").run("true")
        finally:
            await server.close()
    # What sockets hold between the two, and a little more.
    assert told < 32 * 2**20


async def test_last_words_of_a_command_are_read_as_far_as_they_help():
    status = reply("200 x", b'{"running": false, "exit_code": 1}')
    async with answering(status, reply("200 x", b"y" * 5_000_000)) as (address, _):
        server = Server.connect(OpenSandboxSettings.read({"server": address}))
        try:
            words = await Execd(server.session, Endpoint(address, {}), "t").end_of("c")
        finally:
            await server.close()
    assert words is not None
    assert words.startswith("it ended with 1: yyy")
    assert len(words) < 3000


async def test_endpoint_that_is_not_told_is_an_error_of_ours():
    async with answering(reply("200 x", b"[]")) as (address, _):
        server = Server.connect(OpenSandboxSettings.read({"server": address}))
        try:
            with pytest.raises(Internal, match="where the sandbox is"):
                await server.endpoint("s", 1)
        finally:
            await server.close()


def test_command_that_could_not_be_started_has_a_reason_in_place_of_its_code():
    outcome = Outcome()
    assert outcome.add({"type": "error", "error": {"ename": "E", "evalue": "no such user"}})
    assert outcome.exit_code == -1
    assert "no such user" in outcome.words


def test_rules_close_private_ranges_first_and_let_allow_win():
    assert policy(Egress(internet=False, allow=("1.1.1.1",))) == {"defaultAction": "deny", "egress": []}
    found = policy(Egress(allow=("*.example.org", "8.8.8.0/24"), deny=("0.0.0.0/0", "9.9.9.9")))
    assert found["defaultAction"] == "deny"
    rules = [(rule["action"], rule["target"]) for rule in found["egress"]]
    assert rules[-3:] == [("allow", "*.example.org"), ("allow", "8.8.8.0/24"), ("deny", "9.9.9.9")]
    assert ("deny", "169.254.0.0/16") in rules[:-3]
    assert policy(Egress())["defaultAction"] == "allow"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"server": "127.0.0.1:80"}, "'server': must be http"),
        ({"server": "http://h/?x=y"}, "'server'"),
        ({"gateway": "-x"}, "'gateway'"),
        ({"gateway": "g", "api_key": None}, "common 'secret'"),
        ({"agent_port": 44772}, "taken by OpenSandbox"),
        ({"lifetime": 60}, "'lifetime'"),
        ({"secret": "short"}, "'secret'"),
        ({"templates": {"a b": {"image": "x"}}}, "'a b' cannot be the name"),
        ({"templates": {"a": {"image": "x", "aliases": ["a"]}}}, "'a' names two"),
        ({"templates": {"a": {"image": "x", "envs": {"A=B": ""}}}}, "cannot be a variable"),
        ({"templates": {"a": {}}}, "'templates.a.image'"),
        ({"gpu": "0"}, "'gpu'"),
    ],
)
def test_wrong_settings_are_named(change, words, monkeypatch):
    monkeypatch.delenv("OPEN_SANDBOX_API_KEY", raising=False)
    with pytest.raises(FailedPrecondition, match=words) as error:
        OpenSandboxSettings.read({**SERVER, **change})
    assert "short" not in error.value.message


def test_secrets_do_not_show():
    settings = OpenSandboxSettings.read(
        {
            **SERVER,
            "api_key": "hidden-key",
            "templates": {"a": {"image": "x", "registry": {"username": "u", "password": "hidden-word"}}},
        }
    )
    assert "hidden" not in repr(settings)


def test_tokens_are_the_same_for_all_who_share_the_settings_and_for_nobody_else(tmp_path: Path):
    def identity(name: str, **changes: object) -> Identity:
        (folder := tmp_path / name).mkdir(exist_ok=True)
        return Identity.of(OpenSandboxSettings.read({**SERVER, "gateway": "g", "api_key": "k", **changes}), folder)

    name = Name.of("g", "i1")
    one = identity("one")
    assert identity("other").token(name, "agent") == one.token(name, "agent")
    others = [
        one.token(name, "door"),
        one.token(Name.of("g", "i2"), "agent"),
        one.token(Name.of("h", "i1"), "agent"),
        identity("one", api_key="another").token(name, "agent"),
        identity("one", secret="a-secret-of-its-own").token(name, "agent"),
    ]
    assert len({one.token(name, "agent"), *others}) == 6


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("ghcr.io/me/tools:1", True),
        ("ghcr.io/me/tools@sha256:" + "0" * 64, True),
        ("ghcr.io/you/tools:1", False),
        ("ghcr.io/me/more/tools:1", False),
        ("base", True),
        ("tools", False),
        ("ghcr.io/me/../you", False),
        ("ghcr.io/me/x y", False),
        ("ghcr.io/me/" + "x" * 600, False),
    ],
)
def test_images_are_templates_where_they_are_allowed(name, found):
    catalog = Catalog(OpenSandboxSettings.read({**SERVER, "allow_images": ["ghcr.io/me/*"]}))
    assert (catalog.find(name) is not None) is found
