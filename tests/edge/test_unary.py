"""Unary calls end to end through the edge (behaviour W1, W3, W6 to W8, W14, T7, U1, U3, S1 to S3)."""

from __future__ import annotations

import asyncio
import base64
import gzip

import pytest

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_edge.connect import Code
from sandgate_edge.responses import meaning_of
from sandgate_edge.rpc import METHODS
from sandgate_errors import NotFound, SandgateError, Unavailable, all_errors

STAT = "/filesystem.Filesystem/Stat"
SECURED, TOKEN, LIMIT = "isecured", "tok123", 100_000


async def stat(request, _context):
    return filesystem_pb2.StatResponse(entry=filesystem_pb2.EntryInfo(name="x", path=request.path, size=5))


async def test_call_of_an_sdk_is_answered_in_its_json(edge):
    edge.agent.on["Stat"] = stat
    reply = await edge.unary(STAT, b'{\n  "path": "/x"\n}', connect_protocol_version="1", content_encoding="identity")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert "content-encoding" not in reply.headers
    assert reply.body == b'{"entry":{"name":"x","path":"/x","size":"5"}}'


async def test_call_in_protobuf_is_answered_in_protobuf(edge):
    edge.agent.on["Stat"] = stat
    body = filesystem_pb2.StatRequest(path="/x").SerializeToString()
    reply = await edge.unary(STAT, body, kind="proto")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/proto")
    assert filesystem_pb2.StatResponse.FromString(reply.body).entry.path == "/x"


async def test_empty_answer_is_two_bytes(edge):
    async def done(_request, _context):
        return process_pb2.SendInputResponse()

    edge.agent.on["SendInput"] = done
    reply = await edge.unary("/process.Process/SendInput", b'{"process":{"pid":1},"input":{"stdin":"aGk="}}')
    assert (reply.status, reply.body) == (200, b"{}")
    assert edge.agent.requests[0][1].input.stdin == b"hi"


async def test_every_unary_method_of_both_services_reaches_the_agent(edge):
    for method in METHODS:
        if not method.streams:
            name = method.path.rsplit("/", 1)[1]

            async def refuse(_request, _context, name=name):
                raise NotFound(f"{name} was here")

            edge.agent.on[name] = refuse
            reply = await edge.unary(method.path)
            assert reply.json() == {"code": "not_found", "message": f"{name} was here"}


async def test_chunked_body_without_length_and_a_leading_double_slash_are_accepted(edge):
    edge.agent.on["Stat"] = stat
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    body = b'5\r\n{"pat\r\n7\r\nh":"/x"\r\n1\r\n}\r\n0\r\n\r\n'
    reply = await edge.ask("/" + STAT, headers=headers, body=body)
    assert (reply.status, reply.json()["entry"]["path"]) == (200, "/x")


async def test_gzip_body_is_read_and_other_encodings_are_named(edge):
    edge.agent.on["Stat"] = stat
    assert (await edge.unary(STAT, gzip.compress(b'{"path":"/x"}'), content_encoding="gzip")).status == 200
    broken = await edge.unary(STAT, b"no gzip", content_encoding="gzip")
    assert (broken.status, broken.json()["code"]) == (400, "invalid_argument")
    cut = await edge.unary(STAT, gzip.compress(b'{"path":"/x"}')[:-1], content_encoding="gzip")
    assert (cut.status, cut.json()["code"]) == (400, "invalid_argument")
    bomb = await edge.unary(STAT, gzip.compress(b" " * 50_000_000), content_encoding="gzip")
    assert (bomb.status, bomb.json()["code"]) == (429, "resource_exhausted")
    other = await edge.unary(STAT, b"x", content_encoding="compress")
    assert (other.status, other.json()["code"]) == (501, "unimplemented")


@pytest.mark.parametrize("cls", [cls for cls in all_errors() if cls.__module__ == "sandgate_errors"])
async def test_error_of_the_agent_has_its_documented_status(edge, cls: type[SandgateError]):
    async def refuse(_request, _context):
        raise cls("what happened")

    edge.agent.on["Stat"] = refuse
    reply = await edge.unary(STAT)
    code: Code = meaning_of(cls("")).connect
    if issubclass(cls, Unavailable):
        # In doubt, the core was asked and says that the sandbox runs (R5).
        assert (reply.status, reply.json()["port"]) == (502, 49983)
        return
    assert reply.status == code.http_status
    assert reply.json() == {"code": code.value, "message": "what happened"}


async def test_gone_sandbox_is_the_fixed_answer_502(edge):
    reply = await edge.unary(STAT, sandbox="igone")
    assert reply.status == 502
    assert reply.json() == {"sandboxId": "igone", "message": "The sandbox was not found", "code": 502}


async def test_sandbox_that_ends_between_question_and_call_is_502(edge):
    # The core names an agent that is gone already, and says so when it is asked again (R4, R14).
    edge.core.sandboxes["iopen"].agent.target += ".gone"
    edge.core.after_answer = edge.core.sandboxes.clear
    reply = await edge.unary(STAT)
    assert reply.status == 502
    assert reply.json() == {"sandboxId": "iopen", "message": "The sandbox was not found", "code": 502}
    assert len(edge.core.asked) == 2


async def test_silent_agent_of_a_running_sandbox_is_told_as_such(edge):
    edge.core.sandboxes["iopen"].agent.target += ".nobody"
    reply = await edge.unary(STAT)
    message = "The sandbox is running but port is not open"
    assert reply.status == 502
    assert reply.json() == {"sandboxId": "iopen", "message": message, "port": 49983, "code": 502}


@pytest.mark.parametrize("given", [None, "", "tok124", "tok123 ", "ÿ"])
async def test_wrong_token_is_a_plain_401(edge, given):
    edge.agent.on["Stat"] = stat
    headers = {} if given is None else {"X_Access_Token": given}
    reply = await edge.unary(STAT, sandbox=SECURED, **headers)
    if given == "tok123 ":
        # Blanks around a header's value are not part of it.
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.json()["code"] == 401
    assert set(reply.json()) == {"code", "message"}
    assert edge.agent.requests == []


async def test_right_token_opens_its_sandbox(edge):
    edge.agent.on["Stat"] = stat
    assert (await edge.unary(STAT, sandbox=SECURED, x_access_token=TOKEN)).status == 200


async def test_metadata_of_the_call_proves_the_edge_to_the_agent_and_nothing_more(edge):
    edge.agent.on["Stat"] = stat
    await edge.unary(STAT, x_request_id="req-1")
    metadata = edge.agent.metadata[0]
    assert metadata["agent-token"] == "agent-token-of-iopen"
    assert metadata["request-id"] == "req-1"
    # The internal token opens every sandbox; an agent is in the hands of one.
    assert "internal-token" not in metadata
    assert edge.core.asked[0][1]["internal-token"] == "internal"


@pytest.mark.parametrize(
    ("authorization", "user"),
    [
        (None, None),
        ("Basic " + base64.b64encode(b"root:").decode(), "root"),
        ("basic " + base64.b64encode("jürgen:pw:x".encode()).decode(), "jürgen"),
        ("Bearer abc", None),
        ("Basic", None),
        ("Basic %%%", None),
        ("Basic " + base64.b64encode(b"nocolon").decode(), None),
        ("Basic " + base64.b64encode(b":").decode(), None),
    ],
)
async def test_acting_user_is_the_name_in_basic_credentials(edge, authorization, user):
    edge.agent.on["Stat"] = stat
    headers = {} if authorization is None else {"Authorization": authorization}
    assert (await edge.unary(STAT, **headers)).status == 200
    assert edge.agent.metadata[0].get("acting-user-bin") == (None if user is None else user.encode())


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\0b", b"x" * 257])
async def test_name_that_no_account_can_have_is_unauthenticated(edge, name):
    reply = await edge.unary(STAT, authorization="Basic " + base64.b64encode(name + b":").decode())
    assert (reply.status, reply.json()["code"]) == (401, "unauthenticated")
    assert "invalid username" in reply.json()["message"]


async def test_time_limit_bounds_the_call(edge):
    async def never(_request, _context):
        await asyncio.Event().wait()

    edge.agent.on["Stat"] = never
    reply = await edge.unary(STAT, connect_timeout_ms="50")
    assert (reply.status, reply.json()["code"]) == (504, "deadline_exceeded")
    await asyncio.wait_for(edge.agent.ended.wait(), 10)


async def test_broken_time_limit_is_invalid_argument(edge):
    reply = await edge.unary(STAT, connect_timeout_ms="soon")
    assert (reply.status, reply.json()["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize("chunked", [False, True])
async def test_too_large_message_is_refused_without_the_agent(edge, chunked):
    body = b'{"path":"' + b"x" * LIMIT + b'"}'
    if chunked:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        reply = await edge.ask(STAT, headers=headers, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    else:
        reply = await edge.unary(STAT, body)
    assert (reply.status, reply.json()["code"]) == (429, "resource_exhausted")
    assert str(LIMIT) in reply.json()["message"]
    assert edge.agent.requests == []


async def test_answer_larger_than_the_limit_is_an_error_and_not_a_hang(edge):
    async def much(_request, _context):
        return filesystem_pb2.StatResponse(entry=filesystem_pb2.EntryInfo(name="x" * (LIMIT + 2_000_000)))

    edge.agent.on["Stat"] = much
    assert (await edge.unary(STAT)).json()["code"] == "resource_exhausted"


@pytest.mark.parametrize("kind", ["text/plain", "application/connect+json", "application/json; charset=latin-1", ""])
async def test_other_content_type_is_415_and_says_what_would_do(edge, kind):
    reply = await edge.ask(STAT, headers={"Content-Type": kind}, body=b"{}")
    assert reply.status == 415
    assert reply.headers["accept-post"] == "application/json, application/proto"
    assert reply.json()["code"] == "invalid_argument"


async def test_charset_utf8_is_the_same_type(edge):
    edge.agent.on["Stat"] = stat
    headers = {"Content-Type": "Application/JSON; charset=UTF-8"}
    assert (await edge.ask(STAT, headers=headers, body=b'{"path":"/x"}')).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", STAT, 405),
        ("PUT", STAT, 405),
        ("POST", "/filesystem.Filesystem/Nope", 404),
        ("POST", "/nobody.Service/Stat", 404),
        ("GET", "/nobody.Service/Stat", 404),
    ],
)
async def test_unknown_rpc_and_wrong_method_are_told_in_connects_words(edge, method, path, status):
    reply = await edge.ask(path, method=method, headers={"Content-Type": "application/json"}, body=b"{}")
    assert (reply.status, reply.json()["code"]) == (status, "unimplemented")
    assert reply.headers.get("allow") == ("POST" if status == 405 else None)


async def test_other_protocol_version_is_refused(edge):
    reply = await edge.unary(STAT, connect_protocol_version="2")
    assert reply.status == 400


async def test_error_that_names_the_longest_path_arrives_every_time(edge):
    message = f"path '/{'é' * 2047}' does not exist"

    async def refuse(_request, _context):
        raise NotFound(message)

    edge.agent.on["Stat"] = refuse
    for _ in range(10):
        assert (await edge.unary(STAT)).json() == {"code": "not_found", "message": message}


async def test_malformed_message_is_invalid_argument(edge):
    for body in (b"", b"{", b"[]", b'{"path":1}'):
        reply = await edge.unary(STAT, body)
        assert (reply.status, reply.json()["code"]) == (400, "invalid_argument")


async def test_agent_that_does_not_reply_is_given_up(edge, monkeypatch):
    """R5: one that root has stopped inside its sandbox holds its connection open, and answers nothing on it."""

    async def silent(_request, _context):
        await asyncio.Event().wait()

    monkeypatch.setattr("sandgate_edge.routing.REPLY_SECONDS", 0.2)
    edge.agent.on["Stat"] = silent
    reply = await edge.unary(STAT)
    assert (reply.status, reply.json()["port"]) == (502, 49983)
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_limit_of_the_client_replaces_the_gateways_patience(edge, monkeypatch):
    async def slow(request, context):
        await asyncio.sleep(0.5)
        return await stat(request, context)

    monkeypatch.setattr("sandgate_edge.routing.REPLY_SECONDS", 0.01)
    edge.agent.on["Stat"] = slow
    assert (await edge.unary(STAT, connect_timeout_ms="20000")).status == 200
