"""The control plane over HTTP, against a real core (rest.md 1 to 4; behaviour 13; errors.md 2; traps B37, B40, B47)."""

import asyncio
import io
import json
from datetime import datetime

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = "i" + "0" * 20
ID = "/sandboxes/" + UNKNOWN


def end_of(detail):
    return datetime.fromisoformat(detail["endAt"])


async def detail_of(edge, box):
    status, detail, _ = await edge.rest("GET", f"/sandboxes/{box['sandboxID']}")
    assert status == 200
    return detail


async def test_the_life_of_a_sandbox(edge):
    """C1, C2, C13, C23, C34."""
    status, box, headers = await edge.rest(
        "POST",
        "/v2/sandboxes",
        {"templateID": "base", "metadata": {"a b": "c&d=é"}, "envVars": {"A": "1"}, "timeout": 60, "later": {"x": 1}},
    )
    assert status == 201
    assert headers["Content-Type"].startswith("application/json")
    assert set(box) == {"sandboxID", "templateID", "clientID", "envdVersion", "envdAccessToken"}
    detail = await detail_of(edge, box)
    assert detail["metadata"] == {"a b": "c&d=é"}
    assert detail["state"] == "running"
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert detail["network"] == {}
    assert detail["envdAccessToken"] == box["envdAccessToken"]
    assert (detail["cpuCount"], detail["memoryMB"], detail["diskSizeMB"]) == (1, 512, 1024)
    assert 59 < (end_of(detail) - datetime.fromisoformat(detail["startedAt"])).total_seconds() < 61

    query = "?metadata=a%252520b%3Dc%252526d%25253D%2525C3%2525A9"
    status, listed, headers = await edge.rest("GET", "/v2/sandboxes" + query)
    assert [item["sandboxID"] for item in listed] == [box["sandboxID"]]
    assert "envdAccessToken" not in listed[0]
    assert headers["X-Total-Running"] == "1"
    assert "X-Next-Token" not in headers
    assert (await edge.rest("GET", "/sandboxes" + query))[1] == listed

    assert (await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}"))[:2] == (204, None)
    status, error, _ = await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}")
    assert (status, error["code"]) == (404, 404)
    assert (await edge.rest("GET", "/v2/sandboxes" + query))[1] == []


async def test_secure_is_a_choice_of_the_old_route_only(edge):
    """S10; rest.md 4.1 and 4.2."""
    _, open_box, _ = await edge.rest("POST", "/sandboxes", {"templateID": "base"})
    assert "envdAccessToken" not in open_box
    detail = await detail_of(edge, open_box)
    assert "envdAccessToken" not in detail
    assert 14 < (end_of(detail) - datetime.fromisoformat(detail["startedAt"])).total_seconds() < 16
    status, _, _ = await edge.rest("POST", "/sandboxes", {"templateID": "base", "secure": True})
    assert status == 201
    _, secured, _ = await edge.rest("POST", "/v2/sandboxes", {"templateID": "base", "secure": False})
    assert secured["envdAccessToken"]


async def test_chunked_bodies_without_a_length_are_read(edge):
    """W8, and any content type."""

    async def body():
        yield b'{"templateID":'
        yield b'"base"}'

    async with edge.session.post(
        edge.url + "/v2/sandboxes",
        data=body(),
        headers={"X-API-KEY": "e2b_" + "0" * 40, "Content-Type": "text/plain"},
    ) as answer:
        assert answer.status == 201


async def test_timeouts_move_the_end(edge, box):
    """C28, C32, C42; trap B37: nothing else moves it."""
    path = f"/sandboxes/{box['sandboxID']}"
    assert (await edge.rest("POST", path + "/timeout", {"timeout": 600}))[0] == 204
    long_end = end_of(await detail_of(edge, box))
    assert (await edge.rest("POST", path + "/refreshes", {"duration": 30}))[0] == 204
    assert (await edge.rest("POST", path + "/refreshes"))[0] == 204
    status, connected, _ = await edge.rest("POST", path + "/connect", {"timeout": 60})
    assert status == 200
    assert connected["envdAccessToken"] == box["envdAccessToken"]
    for body in ({}, None):
        assert (await edge.rest("POST", "/v2" + path + "/connect", body))[0] == 200
    assert end_of(await detail_of(edge, box)) == long_end
    await edge.rest("POST", "/v2" + path + "/connect", {"timeout": 1200})
    assert end_of(await detail_of(edge, box)) > long_end
    assert (await edge.rest("POST", path + "/timeout", {"timeout": 300}))[0] == 204
    shorter = end_of(await detail_of(edge, box))
    assert shorter < long_end
    assert (await edge.rest("POST", path + "/refreshes", {"duration": 900}))[0] == 204
    assert end_of(await detail_of(edge, box)) > shorter


async def test_a_timeout_of_zero_is_due_at_once(edge):
    """C29."""
    for timeout in (0, -5):
        box = await edge.create()
        path = f"/sandboxes/{box['sandboxID']}"
        assert (await edge.rest("POST", path + "/timeout", {"timeout": timeout}))[0] == 204
        for _ in range(100):
            if (await edge.rest("GET", path))[0] == 404:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("still there")


async def test_ids_with_a_client_id_are_the_same_sandbox(edge, box):
    """C4."""
    status, detail, _ = await edge.rest("GET", f"/sandboxes/{box['sandboxID']}-sandgate")
    assert (status, detail["sandboxID"]) == (200, box["sandboxID"])


async def test_an_unknown_sandbox_is_404_everywhere(edge):
    """C16, C31, C34, C43; errors.md 2.2."""
    for method, path, body in (
        ("GET", ID, None),
        ("DELETE", ID, None),
        ("POST", ID + "/timeout", {"timeout": 5}),
        ("POST", ID + "/refreshes", {"duration": 5}),
        ("POST", ID + "/connect", {"timeout": 5}),
        ("POST", "/v2" + ID + "/connect", {}),
    ):
        status, error, _ = await edge.rest(method, path, body)
        assert status == 404
        assert error == {"code": 404, "message": f"Sandbox \"{UNKNOWN}\" doesn't exist or you don't have access to it"}


@pytest.mark.parametrize("bad", ["..%2Fx", "A", "a" * 300, "a%2Fb", "%00", "%FF", "%", "a b", "é", "-x", "a%0d%0ab"])
async def test_malformed_ids_are_a_client_error(edge, bad):
    """Trap B40."""
    for method, end, body in (("GET", "", None), ("DELETE", "", None), ("POST", "/timeout", {"timeout": 1})):
        status, error, _ = await edge.rest(method, f"/sandboxes/{bad}{end}", body)
        assert status in {400, 404}
        assert error["code"] == status
        assert isinstance(error["message"], str)


async def test_raw_bytes_in_paths_and_headers_are_a_client_error(edge):
    for head in (
        "GET /sandboxes/\udcff\udcfe HTTP/1.1\r\nX-API-KEY: " + "e2b_" + "0" * 40,
        "GET /v2/sandboxes?template=\udcff HTTP/1.1\r\nX-API-KEY: " + "e2b_" + "0" * 40,
        "GET /v2/sandboxes HTTP/1.1\r\nX-API-KEY: \udcff\udcfe",
        "GET /v2/sandboxes HTTP/1.1\r\nX-API-KEY: kéy",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write((head + "\r\nHost: x\r\nConnection: close\r\n\r\n").encode(errors="surrogateescape"))
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.split()[1] in {b"400", b"401"}
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] in {400, 401}


@pytest.mark.parametrize("key", [None, "", "e2b_" + "1" * 40, "x", "a" * 5000, "with space"])
async def test_every_route_needs_a_good_key(edge, key):
    """S12; also where the request is wrong, and where there is nothing behind the route yet."""
    for method, path, body in (
        ("POST", "/sandboxes", {"templateID": "base"}),
        ("POST", "/v2/sandboxes", {"timeout": "x"}),
        ("GET", "/sandboxes", None),
        ("GET", "/v2/sandboxes?limit=0", None),
        ("GET", ID, None),
        ("GET", "/sandboxes/A", None),
        ("DELETE", ID, None),
        ("POST", ID + "/timeout", None),
        ("POST", ID + "/pause", {}),
        ("GET", "/templates", None),
    ):
        status, error, _ = await edge.rest(method, path, body, key=key)
        assert (status, error["code"]) == (401, 401), (method, path)
        assert set(error) == {"code", "message"}


async def test_a_bearer_token_is_not_a_key(edge):
    headers = {"Authorization": "Bearer e2b_" + "0" * 40}
    assert (await edge.rest("GET", "/v2/sandboxes", key=None, headers=headers))[0] == 401


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"templateID": NaN}',
        b'{"templateID":' * 50_000,
        b"\xff\xfe",
        b'{"timeout": 1' + b"0" * 6000 + b"}",
    ],
)
async def test_bodies_that_are_no_json_object(edge, raw):
    for path in ("/sandboxes", "/v2/sandboxes", ID + "/timeout"):
        status, error, _ = await edge.rest("POST", path, raw=raw)
        assert (status, error["code"]) == (400, 400)
        assert "request body" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v2/sandboxes", {}, "templateID"),
        ("/v2/sandboxes", {"templateID": "base", "timeout": True}, "timeout"),
        ("/v2/sandboxes", {"templateID": "base", "timeout": 1.5}, "timeout"),
        ("/v2/sandboxes", {"templateID": "base", "timeout": 0}, "timeout"),
        ("/v2/sandboxes", {"templateID": "base", "timeout": 2**31 - 1}, "timeout"),
        ("/v2/sandboxes", {"templateID": "base", "envVars": {"A\0": "x"}}, "envVars"),
        ("/v2/sandboxes", {"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ("/v2/sandboxes", {"templateID": "base", "autoPauseMemory": False}, "pause"),
        ("/v2/sandboxes", {"templateID": "base", "allow_internet_access": False}, "internet"),
        ("/v2/sandboxes", {"templateID": "base", "network": {"denyOut": ["10.0.0.0/8"]}}, "network"),
        (ID + "/timeout", {}, "timeout"),
        (ID + "/timeout", {"timeout": "5"}, "timeout"),
        (ID + "/refreshes", {"duration": []}, "duration"),
        (ID + "/connect", {"timeout": 0}, "timeout"),
        ("/v2" + ID + "/connect", {"timeout": 2**31}, "timeout"),
        ("/v2" + ID + "/connect", {"memory": 1}, "memory"),
        (ID + "/pause", {"memory": "no"}, "memory"),
        (ID + "/pause", {"requireHealthyGuest": 0}, "requireHealthyGuest"),
        (ID + "/resume", {"timeout": "1"}, "timeout"),
        (ID + "/resume", {"autoPause": 1}, "autoPause"),
    ],
)
async def test_wrong_members_are_named(edge, path, body, named):
    """C5 (a timeout of nothing, or of too much), C56."""
    status, error, _ = await edge.rest("POST", path, body)
    assert (status, error["code"]) == (400, 400)
    assert named in error["message"]


async def test_an_unknown_template_is_404(edge):
    """C6."""
    status, error, _ = await edge.rest("POST", "/v2/sandboxes", {"templateID": "nope"})
    assert (status, error["code"]) == (404, 404)


@pytest.mark.parametrize(("template", "status"), [("broken", 500), ("bug", 500)])
async def test_a_create_that_may_have_had_an_effect_is_not_repeated(edge, template, status):
    """rest.md 1.4: an SDK that repeats by itself would make a second sandbox."""
    for path in ("/sandboxes", "/v2/sandboxes"):
        found, error, headers = await edge.rest("POST", path, {"templateID": template})
        assert (found, error["code"]) == (status, status)
        assert headers["Should-Retry"] == "false"
        assert "secret" not in error["message"]


async def test_a_create_that_started_nothing_may_be_repeated(edge):
    """C10, errors.md 2.2: a machine without room is no quota of the caller's."""
    status, error, headers = await edge.rest("POST", "/v2/sandboxes", {"templateID": "full"})
    assert (status, error["code"], error["error_code"]) == (503, 503, "sandbox_capacity_unavailable")
    assert (headers["Should-Retry"], headers["Retry-After"]) == ("true", "10")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_16_mib_is_413(edge, chunked):
    """C58: the client gets to read the answer although it is still sending."""
    piece = b" " * (1024 * 1024)
    whole = io.BytesIO(piece * 17)

    async def body():
        for _ in range(17):
            yield piece

    data = body() if chunked else whole
    async with edge.session.post(
        edge.url + "/v2/sandboxes", data=data, headers={"X-API-KEY": "e2b_" + "0" * 40}
    ) as answer:
        assert answer.status == 413
        assert (await answer.json())["code"] == 413


async def test_an_encoded_body_is_refused_when_it_is_broken_or_unknown(edge):
    status, error, _ = await edge.rest("POST", "/v2/sandboxes", raw=b"{}", headers={"Content-Encoding": "br"})
    assert (status, error["code"]) in {(415, 415), (400, 400)}


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("state=creating", "state"),
        ("startedAfter=today", "startedAfter"),
        ("metadata=a", "metadata"),
        ("nextToken=junk", "token"),
        ("nextToken=%00", "nextToken"),
        ("template=%ff", "UTF-8"),
    ],
)
async def test_wrong_list_parameters_are_named(edge, query, named):
    """C17, C19, C21."""
    status, error, _ = await edge.rest("GET", "/v2/sandboxes?" + query)
    assert (status, error["code"]) == (400, 400)
    assert named.lower() in error["message"].lower()


async def test_pages_have_no_gap_and_no_double(edge):
    """C18, C19; trap B47."""
    boxes = await asyncio.gather(*(edge.create(metadata={"page": "1"}) for _ in range(5)))
    made = {box["sandboxID"] for box in boxes}
    seen = {}
    for order in ("asc", "desc"):
        for limit in (1, 2, 3, 1000):
            found, token = [], ""
            while True:
                query = f"?metadata=page%3D1&state=running%2Cpaused&order={order}&limit={limit}"
                status, page, headers = await edge.rest("GET", f"/v2/sandboxes{query}&nextToken={token}")
                assert status == 200
                assert headers["X-Total-Running"] == "5"
                found += [item["sandboxID"] for item in page]
                if "X-Next-Token" not in headers:
                    break
                token = headers["X-Next-Token"]
                assert len(page) == limit
            assert len(found) == 5
            assert set(found) == made
            assert seen.setdefault(order, found) == found
    assert seen["asc"] == seen["desc"][::-1]
    for box in boxes:
        assert (await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}"))[0] == 204


async def test_filters_of_the_list(edge, box):
    started = (await detail_of(edge, box))["startedAt"]

    async def listed(query):
        status, items, headers = await edge.rest("GET", "/v2/sandboxes?" + query)
        assert status == 200
        return [item["sandboxID"] for item in items], headers

    assert box["sandboxID"] in (await listed(f"startedAfter={started}"))[0]
    assert box["sandboxID"] in (await listed("startedAfter=2020-01-01T00:00:00+02:00"))[0]
    assert (await listed("startedAfter=2099-01-01T00:00:00%2B02:00"))[0] == []
    assert box["sandboxID"] in (await listed("template=base"))[0]
    assert (await listed("template=nope"))[0] == []
    paused, headers = await listed("state=paused")
    assert paused == []
    assert "X-Total-Running" not in headers


async def test_two_kills_at_once_end_it_once(edge):
    """C35."""
    box = await edge.create()
    answers = await asyncio.gather(*(edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}") for _ in range(4)))
    assert {answer[0] for answer in answers} <= {204, 404}
    assert 204 in {answer[0] for answer in answers}


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/v3/templates", "templates"),
        ("GET", "/templates/team/name:tag/tags", "tags of templates"),
        ("GET", "/templates/team%2Fname%3Atag/tags/exists", "tags of templates"),
        ("DELETE", "/templates/tags", "tags of templates"),
        ("GET", "/templates/t/files/0123", "building templates"),
        ("GET", "/templates/team%2Fname/builds/b/status", "building templates"),
        ("POST", "/v2/templates/t/builds/b", "building templates"),
        ("PATCH", "/v2/templates/base", "changing templates"),
        ("POST", "/volumes", "volumes"),
        ("PUT", "/volumecontent/v/file?path=/a", "volumes"),
        ("DELETE", "/secrets/a/b", "secrets"),
    ],
)
async def test_documented_routes_that_are_missing_say_so(edge, method, path, what):
    status, error, _ = await edge.rest(method, path, {} if method in {"POST", "PUT"} else None)
    assert (status, error["code"]) == (501, 501)
    assert what in error["message"]


async def test_template_that_exists_is_told_from_one_that_does_not(edge):
    """C24."""
    status, found, _ = await edge.rest("GET", "/templates/aliases/base")
    assert (status, found) == (200, {"templateID": "base", "public": True})
    for name in ("nope", "team/name:tag", "team%2Fname%3Atag", "x" * 300):
        status, error, _ = await edge.rest("GET", f"/templates/aliases/{name}")
        assert (status, error["code"]) in {(404, 404), (400, 400)}, name
        assert status == 404 or len(name) > 256


@pytest.mark.parametrize("path", ["/nope", "/v9/sandboxes", "/sandboxes/a/b/c", "/sandboxes/", "/api-keys/a/b"])
async def test_unknown_paths_are_404_in_json(edge, path):
    status, error, _ = await edge.rest("GET", path)
    assert (status, error["code"]) == (404, 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/sandboxes"), ("PATCH", ID), ("GET", ID + "/timeout"), ("DELETE", "/v2/sandboxes"), ("PUT", "/volumes")],
)
async def test_wrong_methods_are_405_in_json(edge, method, path):
    status, error, _ = await edge.rest(method, path)
    assert (status, error["code"]) == (405, 405)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {str(n): "" for n in range(257)}),
        ("metadata", {"a": "x" * 65_536}),
        ("envVars", {"A": "x" * 131_070}),
        ("envVars", {f"A{n}": "x" * 131_000 for n in range(9)}),
    ],
    ids=["pairs", "bytes", "one-variable", "all-variables"],
)
async def test_metadata_and_variables_have_limits(edge, field, value):
    body = io.BytesIO(json.dumps({"templateID": "base", field: value}).encode())
    status, error, _ = await edge.rest("POST", "/v2/sandboxes", raw=body)
    assert (status, error["code"]) == (400, 400)
    assert "at most" in error["message"]
