"""Who may enter: every sandbox has a token of its own, and no other opens it (S1, S4, S10, S11, S12)."""

from __future__ import annotations

import base64
import hashlib
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sandgate_testing.gateway import Answer, Gateway

RPC = ("POST", "/process.Process/List", b"{}")
STAT = ("POST", "/filesystem.Filesystem/Stat", b'{"path":"/"}')
DOWNLOAD = ("GET", "/files?path=/etc/hostname", None)
UPLOAD = ("POST", "/files?path=here", b"x")
METRICS = ("GET", "/metrics", None)
ENVS = ("GET", "/envs", None)
GUARDED = [RPC, STAT, DOWNLOAD, UPLOAD, METRICS, ENVS]


@pytest.fixture(scope="module")
def pair(gateway: Gateway) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    made = gateway.create_sandbox(), gateway.create_sandbox()
    yield made
    for sandbox in made:
        gateway.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def send(
    gateway: Gateway, sandbox: Mapping[str, Any], call: tuple[str, str, bytes | None], token: str | None
) -> Answer:
    method, path, body = call
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": "49983"}
    headers["Content-Type"] = "application/octet-stream" if path.startswith("/files?") else "application/json"
    if token is not None:
        headers["X-Access-Token"] = token
    return gateway.call(method, path, body, headers=headers)


def path_of(call: tuple[str, str, bytes | None]) -> str:
    return call[1].partition("?")[0] + ":" + call[0]


@pytest.mark.parametrize("call", GUARDED, ids=path_of)
def test_own_token_opens(
    gateway: Gateway, pair: tuple[dict[str, Any], ...], call: tuple[str, str, bytes | None]
) -> None:
    assert send(gateway, pair[0], call, pair[0]["envdAccessToken"]).status == 200


@pytest.mark.parametrize("call", GUARDED, ids=path_of)
@pytest.mark.parametrize("kind", ["none", "empty", "wrong", "cut short", "longer", "of another sandbox", "the API key"])
def test_any_other_token_does_not(
    gateway: Gateway, pair: tuple[dict[str, Any], ...], call: tuple[str, str, bytes | None], kind: str
) -> None:
    own = pair[0]["envdAccessToken"]
    token = {
        "none": None,
        "empty": "",
        "wrong": "f" * len(own),
        "cut short": own[:-1],
        "longer": own + "0",
        "of another sandbox": pair[1]["envdAccessToken"],
        "the API key": gateway.api_key,
    }[kind]
    answer = send(gateway, pair[0], call, token)
    assert answer.status == 401
    assert own not in answer.body.decode()


def test_stream_with_a_wrong_token_is_a_plain_refusal(gateway: Gateway, pair: tuple[dict[str, Any], ...]) -> None:
    """Streams carry their errors in the end frame but for this one, which all SDKs know as a status (envd.md 2.7)."""
    headers = {"E2b-Sandbox-Id": pair[0]["sandboxID"], "E2b-Sandbox-Port": "49983", "X-Access-Token": "wrong"}
    headers["Content-Type"] = "application/connect+json"
    answer = gateway.call("POST", "/process.Process/Start", b"\0\0\0\0\x02{}", headers=headers)
    assert answer.status == 401


def test_health_needs_no_token(gateway: Gateway, pair: tuple[dict[str, Any], ...]) -> None:
    assert send(gateway, pair[0], ("GET", "/health", None), None).status == 204


def test_sandbox_that_was_not_secured_is_open(gateway: Gateway) -> None:
    """S10 and S2: only the old create route can ask for it, and then nothing is checked."""
    made = gateway.rest("POST", "/sandboxes", {"templateID": "base", "secure": False})
    assert made.status == 201
    sandbox = made.json()
    assert "envdAccessToken" not in sandbox
    try:
        assert send(gateway, sandbox, RPC, None).status == 200
        assert send(gateway, sandbox, DOWNLOAD, "whatever").status == 200
    finally:
        gateway.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def signature(path: str, operation: str, user: str, token: str, expiration: int | None = None) -> str:
    """S5, worked out here a second time: the vector of the contract is checked below."""
    text = ":".join([path, operation, user, token, *([] if expiration is None else [str(expiration)])])
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def test_signature_of_the_contract() -> None:
    token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
    assert signature("hello.txt", "read", "user", token) == "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"


SIGNED = [
    pytest.param("read", {}, 200, "", id="good"),
    pytest.param("read", {"expiration": 4_000_000_000}, 200, "", id="good until later"),
    pytest.param("read", {"expiration": 1_000_000_000}, 401, "signature is already expired", id="expired"),
    pytest.param("write", {}, 401, "invalid signature", id="for the other operation"),
    pytest.param("read", {"token": "x"}, 401, "invalid signature", id="made with a wrong token"),
    pytest.param("read", {"user": "root"}, 401, "invalid signature", id="for another user"),
    pytest.param("read", {"token": "x", "expiration": 1_000_000_000}, 401, "invalid signature", id="wrong and expired"),
]


@pytest.mark.parametrize(("operation", "changes", "status", "message"), SIGNED)
def test_signature_decides_where_no_token_is_sent(
    gateway: Gateway,
    pair: tuple[dict[str, Any], ...],
    operation: str,
    changes: dict[str, Any],
    status: int,
    message: str,
) -> None:
    path = "/etc/hostname"
    fields = {"user": "", "token": pair[0]["envdAccessToken"], "expiration": None, **changes}
    query = {"path": path, "signature": signature(path, operation, **fields)}
    if fields["expiration"] is not None:
        query["signature_expiration"] = str(fields["expiration"])
    answer = send(gateway, pair[0], ("GET", f"/files?{urllib.parse.urlencode(query)}", None), None)
    assert answer.status == status, answer.body
    if message:
        assert answer.json() == {"code": 401, "message": message}


def test_wrong_token_is_not_mended_by_a_good_signature(gateway: Gateway, pair: tuple[dict[str, Any], ...]) -> None:
    good = urllib.parse.quote(signature("/etc/hostname", "read", "", pair[0]["envdAccessToken"]), safe="")
    answer = send(gateway, pair[0], ("GET", f"/files?path=/etc/hostname&signature={good}", None), "wrong")
    assert answer.status == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sandboxes"),
        ("POST", "/v2/sandboxes"),
        ("GET", "/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", "/sandboxes/{id}"),
        ("DELETE", "/sandboxes/{id}"),
        ("POST", "/sandboxes/{id}/timeout"),
        ("POST", "/sandboxes/{id}/connect"),
        ("POST", "/v2/sandboxes/{id}/connect"),
        ("POST", "/sandboxes/{id}/refreshes"),
    ],
)
@pytest.mark.parametrize("key", [None, "", "e2b_" + "0" * 40, "nonsense", "e2b_" + "f" * 10_000])
def test_control_plane_needs_a_key_that_exists(
    gateway: Gateway, pair: tuple[dict[str, Any], ...], method: str, path: str, key: str | None
) -> None:
    headers = {} if key is None else {"X-API-Key": key}
    target = path.format(id=pair[0]["sandboxID"])
    answer = gateway.rest(method, target, {"templateID": "base"}, headers=headers)
    # A header beyond the server's limit is refused before anybody reads it as a key.
    assert answer.status == (401 if len(key or "") < 8_000 else 431), answer.body
    assert answer.json()["code"] == answer.status
    assert gateway.rest("GET", f"/sandboxes/{pair[0]['sandboxID']}").status == 200
