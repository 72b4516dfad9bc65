"""Rules K1 to K36 of the ROCK contract on two real gateways: one with the profile, one without it.

Each probe is asked of both, and the pair of answers must be the one that stands beside it. The rules of a cold start (K3 to
K5, K7) need images: ``test_cold_start.py``. The SDK's own view: ``test_client.py``.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import threading
import time
from typing import Any
from urllib.parse import urlencode

import pytest

from sandgate_testing.sides import (
    COMMANDS,
    FOREIGN_KEY,
    PROBES,
    Probe,
    Side,
    changes,
    envelopes,
    moment,
    rule,
    same,
    start_body,
)

pytestmark = pytest.mark.xdist_group("rock")

AS_ROOT = {"Authorization": "Basic " + base64.b64encode(b"root:").decode()}
TEXTS = ("0", "-1", "2.5", "two", "", "1_0", "0x2", "9" * 30)
NUMBERS = ("0", "-1", "inf", "nan", "Infinity", "", "soon", "1_0", "0.0", "1e999", "-0.5")


# Control plane


@rule(1, "replies-are-those-of-rock", rock=("0.3.0", "rock", "base", False), plain=("0.6.13", "sandgate", "base", True))
def _(side: Side) -> Any:
    made = side.create()
    return made["envdVersion"], made["clientID"], made["templateID"], "domain" in made


@rule(1, "version-is-in-every-reply", rock={"0.3.0"}, plain={"0.6.13"})
def _(side: Side) -> Any:
    made = side.create(metadata={"k1": "1"})
    listed = side.gateway.rest("GET", "/v2/sandboxes?metadata=k1%3D1").json()
    connected = side.gateway.rest("POST", f"/sandboxes/{made['sandboxID']}/connect", {"timeout": 60}).json()
    return {reply["envdVersion"] for reply in (side.detail(made), connected, *listed)}


@rule(2, "token-is-the-api-key", rock=True, plain=False)
def _(side: Side) -> Any:
    made = side.create()
    assert side.detail(made)["envdAccessToken"] == made["envdAccessToken"]
    return made["envdAccessToken"] == side.gateway.api_key


@rule(2, "key-may-have-any-form", rock=(201, True, 204), plain=(401, None, None))
def _(side: Side) -> Any:
    answer = side.asked({}, **{"X-API-Key": FOREIGN_KEY})
    if answer.status != 201:
        return answer.status, None, None
    made = answer.json()
    assert side.agent(made, "POST", "/files?path=a", b"").status == 400
    written = side.upload(made, "a")
    assert written.status == 200, written.body
    killed = side.gateway.rest("DELETE", f"/sandboxes/{made['sandboxID']}", headers={"X-API-Key": FOREIGN_KEY})
    return answer.status, made["envdAccessToken"] == FOREIGN_KEY, killed.status


@same(2, "other-tokens-open-nothing", (401, 401, 401))
def _(side: Side) -> Any:
    wrong = ("e2b_" + "0" * 40, "", None)
    return tuple(side.agent(side.shared, "GET", "/files?path=.bashrc", X_Access_Token=token).status for token in wrong)


@rule(2, "port-header-is-not-needed", rock=(200, 204), plain=(400, 400))
def _(side: Side) -> Any:
    without = {"E2b_Sandbox_Port": None}
    return (
        side.agent(side.shared, "GET", "/files?path=.bashrc", **without).status,
        side.agent(side.shared, "GET", "/health", **without).status,
    )


@rule(2, "port-header-is-not-read", rock=(200, 200, 204, None), plain=(502, 400, 502, "unavailable"))
def _(side: Side) -> Any:
    other = {"E2b_Sandbox_Port": "3000"}
    answer = side.agent(
        side.shared,
        "POST",
        "/process.Process/Start",
        start_body("true"),
        Content_Type="application/connect+json",
        Connect_Timeout_Ms="60000",
        **other,
    )
    return (
        side.agent(side.shared, "GET", "/files?path=.bashrc", **other).status,
        side.agent(side.shared, "GET", "/files?path=.bashrc", E2b_Sandbox_Port="x").status,
        side.agent(side.shared, "GET", "/health", **other).status,
        envelopes(answer.body)[-1].get("code") if answer.status == 200 else "unavailable",
    )


@same(2, "ports-by-headers-are-reached-still", "served\n")
def _(side: Side) -> Any:
    made = side.create()
    with socket.socket() as free:
        # Sandboxes may share the machine's ports.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"mkdir -p w/sub && echo served > w/sub/page && cd w && exec python3 -m http.server {port}"
    connection = _begin(side, command=f"{serve} >/dev/null 2>&1", sandbox=made)

    def page() -> Any:
        return side.agent(made, "GET", "/sub/page", E2b_Sandbox_Port=str(port))

    assert changes(lambda: page().status == 200, patience=30)
    connection.close()
    served = page().body.decode()
    # The server counts as a command until it ends, and others want its place.
    assert side.kill(made) == 204
    return served


@rule(4, "wrong-resources-of-a-cold-start-are-refused", rock={400}, plain={404})
def _(side: Side) -> Any:
    return {
        side.asked({"templateID": "image:tag", "metadata": {name: value}}).status
        for name, values in {"cpuCount": TEXTS, "memoryMB": TEXTS, "startup_timeout": NUMBERS}.items()
        for value in values
    }


@same(4, "right-resources-of-a-cold-start-are-not-refused", {404})
def _(side: Side) -> Any:
    right = ({"cpuCount": "1"}, {"memoryMB": "+512"}, {"startup_timeout": "0.5"}, {"startup_timeout": "1e2"}, {})
    return {side.asked({"templateID": "image:tag", "metadata": metadata}).status for metadata in right}


@same(4, "resources-are-not-read-with-a-ready-template", 201)
def _(side: Side) -> Any:
    return side.asked({"metadata": {"cpuCount": "-1", "memoryMB": "x", "startup_timeout": "nan"}}).status


@same(6, "metadata-comes-back-as-given", True)
def _(side: Side) -> Any:
    given = {"cpuCount": "4", "memoryMB": " 7 ", "startup_timeout": "x", "ap-sandbox-id": "mine", "é": "a=b&c:d,e"}
    detail = side.detail(side.create(metadata=given))["metadata"]
    return given.items() <= detail.items()


@same(6, "empty-metadata-is-valid", 201)
def _(side: Side) -> Any:
    return side.asked({"metadata": {}}).status


@same(8, "life-that-is-none-is-refused", {400})
def _(side: Side) -> Any:
    return {side.asked({"timeout": timeout}).status for timeout in (0, -1, -60, 1.5, "60", True, 2**31)}


@rule(8, "life-is-rounded-up-to-minutes", rock=[60, 60, 120, 300], plain=[1, 60, 61, 300])
def _(side: Side) -> Any:
    return [side.life(side.create(timeout=timeout)) for timeout in (1, 60, 61, 300)] if side.is_rock else _lives(side)


def _lives(side: Side) -> list[int]:
    # One second is over before it can be asked about: what the detail of a longer one shows is enough.
    made = side.asked({"timeout": 1})
    assert made.status == 201
    return [1, *(side.life(side.create(timeout=timeout)) for timeout in (60, 61, 300))]


@rule(9, "a-command-renews-the-deadline", rock=True, plain=False)
def _(side: Side) -> Any:
    return _renewed_by(side, lambda made: side.start(made, "true"))


@rule(9, "a-file-renews-the-deadline", rock=True, plain=False)
def _(side: Side) -> Any:
    return _renewed_by(side, lambda made: side.upload(made, "a"))


@rule(9, "a-listing-renews-the-deadline", rock=True, plain=False)
def _(side: Side) -> Any:
    return _renewed_by(side, lambda made: side.rpc(made, "ListDir", {"path": "/"}))


@same(9, "questions-renew-nothing", False)
def _(side: Side) -> Any:
    def ask(made: dict[str, Any]) -> None:
        side.detail(made)
        side.agent(made, "GET", "/health")
        side.gateway.rest("POST", "/sandboxes/i00000000000000000000/timeout", {"timeout": 5})

    return _renewed_by(side, ask, patience=0.5)


def _renewed_by(side: Side, use: Any, *, patience: float = 15) -> bool:
    made = side.create(timeout=120)
    before = side.end_of(made)
    time.sleep(0.1)
    use(made)
    return changes(lambda: side.end_of(made) > before, patience=patience if side.is_rock else 0.5)


@rule(9, "use-renews-what-set-timeout-last-said", rock=True, plain=False)
def _(side: Side) -> Any:
    made = side.create(timeout=600)
    assert side.set_timeout(made, 60).status == 204
    before = side.end_of(made)
    time.sleep(0.1)
    side.start(made, "true")
    renewed = changes(lambda: side.end_of(made) > before, patience=15 if side.is_rock else 0.5)
    assert (side.end_of(made) - before).total_seconds() < 60
    return renewed


@same(10, "sandbox-ends-at-its-deadline", (404, 502))
def _(side: Side) -> Any:
    made = side.create()
    assert side.set_timeout(made, 0).status == 204
    assert changes(lambda: side.status_of(made) == 404, patience=30)
    return side.status_of(made), side.agent(made, "GET", "/health").status


@same(11, "set-timeout-takes-integers-only", {400})
def _(side: Side) -> Any:
    return {side.set_timeout(side.shared, value).status for value in (True, 1.5, "60", None, [], 2**31, -(2**31) - 1)}


@rule(11, "set-timeout-is-rounded-up-to-minutes", rock=(204, b"", 2), plain=(204, b"", 1))
def _(side: Side) -> Any:
    made = side.create()
    before = time.time()
    answer = side.set_timeout(made, 61)
    return answer.status, answer.body, int((side.end_of(made).timestamp() - before) // 60)


@same(11, "set-timeout-zero-ends-it", True)
def _(side: Side) -> Any:
    made = side.create()
    assert side.set_timeout(made, 0).status == 204
    return changes(lambda: side.status_of(made) == 404, patience=30)


@same(11, "set-timeout-needs-a-running-sandbox", (404, {"code", "message"}, 404))
def _(side: Side) -> Any:
    missing = side.set_timeout({"sandboxID": "i00000000000000000000"}, 60)
    made = side.create()
    assert side.gateway.rest("POST", f"/sandboxes/{made['sandboxID']}/pause", {}).status == 204
    return missing.status, set(missing.json()), side.set_timeout(made, 60).status


@rule(12, "secure-has-no-effect", rock=401, plain=200)
def _(side: Side) -> Any:
    made = side.create(secure=False)
    return side.agent(made, "GET", "/files?path=.bashrc", X_Access_Token=None).status


@rule(12, "lifecycle-has-no-effect", rock=("kill", False, True), plain=("pause", True, False))
def _(side: Side) -> Any:
    made = side.create(autoPause=True, autoResume={"enabled": True}, allow_internet_access=False)
    detail = side.detail(made)
    lifecycle = detail["lifecycle"]
    return lifecycle["onTimeout"], lifecycle["autoResume"], detail["allowInternetAccess"]


@rule(12, "what-has-no-effect-may-say-anything", rock=201, plain=400)
def _(side: Side) -> Any:
    return side.asked({"secure": "x", "autoPause": 3, "autoResume": [], "allow_internet_access": "no"}).status


@rule(12, "what-is-not-there-is-refused", rock=[400, 400, 400, 400, 400], plain=[201, 201, 201, 201, 400])
def _(side: Side) -> Any:
    bodies: list[dict[str, object]] = [
        {"autoPause": True, "autoPauseMemory": True},
        {"autoPause": True, "autoPauseMemory": False},
        {"mcp": {"server": {}}},
        {"network": {"denyOut": ["0.0.0.0/0"]}},
        {"volumeMounts": [{"name": "v", "path": "/v"}]},
    ]
    return [side.asked({"secure": True, **body}).status for body in bodies]


@same(12, "what-is-empty-asks-for-nothing", 201)
def _(side: Side) -> Any:
    return side.asked({"mcp": {}, "network": {}, "volumeMounts": [], "autoPauseMemory": None}).status


@same(13, "variables-hold-for-all-commands", "create request create\n")
def _(side: Side) -> Any:
    made = side.create(envVars={"A": "create", "B": "create"})
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", "echo -n $A $B"], "envs": {"B": "request"}}
    return side.output(made, "", process=process) + side.output(made, "echo '' $B")


@rule(14, "detail-says-where-it-is", rock=True, plain=False)
def _(side: Side) -> Any:
    metadata = side.detail(side.create(metadata={"a": "b"}))["metadata"]
    address = metadata.pop("e2b.agents.kruise.io/sandbox-ip", None)
    assert metadata == {"a": "b"}
    return address == "127.0.0.1"


@same(14, "detail-is-whole", True)
def _(side: Side) -> Any:
    detail = side.detail(side.shared)
    zones = [moment(detail[name]).tzinfo is not None for name in ("startedAt", "endAt")]
    return all(zones) and min(detail["cpuCount"], detail["memoryMB"], detail["diskSizeMB"]) > 0


@same(15, "states-are-running-paused-and-missing", ["running", "paused", 404, 404])
def _(side: Side) -> Any:
    made = side.create()
    shown = [side.detail(made)["state"]]
    assert side.gateway.rest("POST", f"/sandboxes/{made['sandboxID']}/pause", {}).status == 204
    shown.append(side.detail(made)["state"])
    side.kill(made)
    return [*shown, side.status_of(made), side.status_of({"sandboxID": "i00000000000000000000"})]


@rule(16, "list-needs-a-filter", rock=[400, 400, 400], plain=[200, 200, 200])
def _(side: Side) -> Any:
    paths = ("/v2/sandboxes", "/v2/sandboxes?metadata=", "/sandboxes")
    return [side.gateway.rest("GET", path).status for path in paths]


@rule(16, "pairs-must-be-whole", rock={400}, plain={200, 400})
def _(side: Side) -> Any:
    queries = (
        "a%3D",
        "%3Db",
        "a",
        "a%3Db%26",
        "a%3Db%26a%3Db",
        "a%3Db%3Dc",
        "a%25FF%3Db",
        "%2C",
        "a:",
        ":b",
        "a:b,a:b",
    )
    return {side.gateway.rest("GET", f"/v2/sandboxes?metadata={query}").status for query in queries}


@rule(16, "list-is-of-running-ones-in-one-piece", rock=(3, None), plain=(1, True))
def _(side: Side) -> Any:
    made = [side.create(metadata={"k16": "piece", "n": str(n)}) for n in range(4)]
    assert side.gateway.rest("POST", f"/sandboxes/{made[0]['sandboxID']}/pause", {}).status == 204
    answer = side.gateway.rest("GET", "/v2/sandboxes?metadata=k16%3Dpiece&state=paused,running&limit=1")
    ignored = side.gateway.rest("GET", "/v2/sandboxes?metadata=k16%3Dpiece&nextToken=none&limit=zero").status
    assert ignored == (200 if side.is_rock else 400)
    return len(answer.json()), answer.headers.get("x-next-token") and True


@same(16, "all-pairs-must-match-exactly", [True, True, True])
def _(side: Side) -> Any:
    made = side.create(metadata={"k16": "exact é&=", "b": "2"})["sandboxID"]
    query = "?metadata=k16%3Dexact%252520%2525C3%2525A9%252526%25253D"
    return [
        side.listed(query) == [made],
        side.listed(f"{query}%26b%3D2") == [made],
        side.listed(f"{query}%26b%3D3") == side.listed("?metadata=k16%3Dexac") == [],
    ]


@rule(16, "pairs-may-be-written-with-colons", rock=True, plain=400)
def _(side: Side) -> Any:
    made = side.create(metadata={"image": "a:1", "zone": "x"})["sandboxID"]
    found = side.listed("?metadata=image:a:1,zone:x")
    return found if found == 400 else found == [made] and side.listed("?metadata=image:a:1,zone:y") == []


@same(17, "kill-is-for-good", [204, 404, 404])
def _(side: Side) -> Any:
    made = side.create()
    return [side.kill(made), side.kill(made), side.status_of(made)]


@same(18, "health-is-good-while-it-runs", [204, 502, 502, 502])
def _(side: Side) -> Any:
    made = side.create()
    found = [side.agent(made, "GET", "/health").status]
    assert side.gateway.rest("POST", f"/sandboxes/{made['sandboxID']}/pause", {}).status == 204
    found.append(side.agent(made, "GET", "/health").status)
    side.kill(made)
    missing = {**made, "sandboxID": "i00000000000000000000"}
    return [*found, side.agent(made, "GET", "/health").status, side.agent(missing, "GET", "/health").status]


@same(19, "what-rock-lacks-may-be-there", [200, 204, 201])
def _(side: Side) -> Any:
    path = f"/sandboxes/{side.create()['sandboxID']}"
    bodies = (("connect", {"timeout": 60}), ("pause", {}), ("resume", {"timeout": 60}))
    return [side.gateway.rest("POST", f"{path}/{name}", body).status for name, body in bodies]


@rule(19, "signed-urls-open-nothing", rock=[401, 401, 401], plain=[200, 200, 401])
def _(side: Side) -> Any:
    """The SDK signs with the token that it was given, here the key, which the gateway does not keep."""
    made = side.create()
    own, wrong = made["envdAccessToken"], "e2b_" + "0" * 40
    return [_signed(side, made, *use) for use in (("read", own), ("write", own), ("read", wrong))]


def _signed(side: Side, made: dict[str, Any], operation: str, token: str) -> int:
    digest = hashlib.sha256(f".bashrc:{operation}:user:{token}".encode()).digest()
    signature = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    query = "?" + urlencode({"path": ".bashrc", "username": "user", "signature": signature})
    if operation == "write":
        return side.upload(made, "x", query=query, X_Access_Token=None).status
    return side.agent(made, "GET", f"/files{query}", X_Access_Token=None).status


# Commands


@rule(20, "only-a-login-shell-runs", rock=["invalid_argument"] * 4, plain=[None] * 4)
def _(side: Side) -> Any:
    others = ("/bin/sh", ["-l", "-c", "true"]), ("/bin/bash", ["-c", "true"]), ("/bin/true", [])
    more = ("/bin/bash", ["-l", "-c", "true", "name"])
    return [
        side.stream(side.shared, "", process={"cmd": program, "args": args})[1] for program, args in (*others, more)
    ]


@rule(20, "user-has-no-effect", rock="user\n", plain="root\n")
def _(side: Side) -> Any:
    return side.output(side.shared, "id -un", headers=AS_ROOT)


@rule(20, "user-that-does-not-exist-has-no-effect", rock=None, plain="unauthenticated")
def _(side: Side) -> Any:
    nobody = {"Authorization": "Basic " + base64.b64encode(b"no-such-user:").decode()}
    return side.stream(side.shared, "true", headers=nobody)[1]


@rule(
    21,
    "time-limit-is-needed-and-bounded",
    rock=[None, None, *["invalid_argument"] * 4],
    plain=[None, None, None, None, None, "invalid_argument"],
)
def _(side: Side) -> Any:
    limits = ("60000", "85000", "85001", "0", None, "soon")
    return [side.stream(side.shared, "true", limit=limit)[1] for limit in limits]


@rule(22, "there-is-no-input", rock="unimplemented", plain=None)
def _(side: Side) -> Any:
    return side.stream(side.shared, "true", stdin=True)[1]


@rule(22, "input-is-empty-where-nothing-is-said", rock=None, plain="deadline_exceeded")
def _(side: Side) -> Any:
    return side.stream(side.shared, "cat", stdin=None, limit="2000")[1]


@same(22, "missing-cwd-is-refused", "invalid_argument")
def _(side: Side) -> Any:
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", "pwd"], "cwd": "/none"}
    return side.stream(side.shared, "", process=process)[1]


@same(23, "start-output-end", [{"start"}, {"data"}, {"data"}, {"end"}])
def _(side: Side) -> Any:
    frames = side.start(side.shared, "echo out; sleep 0.2; echo err >&2; sleep 0.2")
    assert not isinstance(frames, str)
    return [set(frame["event"]) for frame in frames]


@same(23, "failure-is-an-end-and-no-error", 3)
def _(side: Side) -> Any:
    frames = side.start(side.shared, "exit 3")
    assert not isinstance(frames, str)
    return frames[-1]["event"]["end"]["exitCode"]


@same(23, "limit-is-told", "deadline_exceeded")
def _(side: Side) -> Any:
    return side.start(side.shared, "sleep 20", limit="200")


@rule(24, "envelope-is-bounded", rock=[None, "resource_exhausted"], plain=[None, None])
def _(side: Side) -> Any:
    room = 1024 * 1024 - len(start_body("true", padding=""))
    return [side.stream(side.shared, "true", padding="x" * size)[1] for size in (room, room + 100)]


@rule(25, "commands-are-bounded-and-places-come-back", rock=("resource_exhausted", True), plain=(None, True))
def _(side: Side) -> Any:
    made, held = side.create(), [_begin(side, command="sleep 1; echo over") for _ in range(COMMANDS)]
    one_more = side.stream(made, "true")[1]
    for connection in held:
        assert b"exit status 0" in connection.getresponse().read()
        connection.close()
    return one_more, changes(lambda: side.stream(made, "true")[1] is None, patience=10)


@rule(26, "command-without-a-client-runs-on-and-counts", rock=("resource_exhausted", True), plain=(None, True))
def _(side: Side) -> Any:
    made = side.create()
    for n in range(COMMANDS):
        connection = _begin(side, command=f"sleep 4; echo over > {n}", sandbox=made)
        # The start event: it runs.
        assert envelopes(_some(connection, 5 + _size(connection)))[0]["event"].keys() == {"start"}
        _leave(connection)
    counted = side.stream(side.shared, "true")[1]
    came_back = changes(lambda: side.stream(side.shared, "true")[1] is None, patience=20)
    # Long before the limit of sixty seconds: a place is free because its command has ended.
    assert changes(lambda: side.output(made, "cat ?") == "over\n" * COMMANDS, patience=20)
    return counted, came_back


def _begin(side: Side, *, command: str, sandbox: dict[str, Any] | None = None) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(*side.gateway.address, timeout=60)
    headers = {"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "60000"}
    made = side.shared if sandbox is None else sandbox
    connection.request(
        "POST", "/process.Process/Start", body=start_body(command), headers={**side.headers(made), **headers}
    )
    if sandbox is None:
        # It has its place when the gateway has read it, and its answer begins with the start event.
        connection.sock.recv(1, socket.MSG_PEEK)
    return connection


_STARTED: dict[http.client.HTTPConnection, tuple[http.client.HTTPResponse, bytes]] = {}


def _size(connection: http.client.HTTPConnection) -> int:
    response = connection.getresponse()
    head = response.read(5)
    _STARTED[connection] = (response, head)
    return int.from_bytes(head[1:], "big")


def _some(connection: http.client.HTTPConnection, size: int) -> bytes:
    response, head = _STARTED[connection]
    return head + response.read(size - len(head))


def _leave(connection: http.client.HTTPConnection) -> None:
    response, _ = _STARTED.pop(connection)
    response.close()
    connection.close()


@same(27, "pid-is-a-number", True)
def _(side: Side) -> Any:
    frames = side.start(side.shared, "true")
    assert not isinstance(frames, str)
    return frames[0]["event"]["start"]["pid"] > 0


# Files

PATHS = ("x", "./x", "a/../x", "a/./b", "~", "~/", "~/x", "/tmp/../x", "/tmp//y", "/", "../..")
CLEANED = ["/home/user/x"] * 3 + ["/home/user/a/b"] + ["/home/user"] * 2 + ["/home/user/x", "/x", "/tmp/y", "/", "/"]


@same(28, "paths-are-cleaned", CLEANED)
def _(side: Side) -> Any:
    made = side.create()
    side.start(made, "mkdir -p a; touch x a/b /tmp/y")
    side.rpc(made, "MakeDir", {"path": "/x"})
    found = []
    for path in PATHS:
        reply = side.rpc(made, "Stat", {"path": path})
        found.append(reply if isinstance(reply, str) else reply["entry"]["path"])
    return found


@rule(28, "empty-path-is-refused", rock=["invalid_argument", 400, 400, 400], plain=["/home/user", 400, 400, 200])
def _(side: Side) -> Any:
    reply = side.rpc(side.shared, "Stat", {"path": ""})
    return [
        reply if isinstance(reply, str) else reply["entry"]["path"],
        side.agent(side.shared, "GET", "/files?path=").status,
        side.agent(side.shared, "GET", "/files").status,
        side.upload(side.shared, "named-by-its-part", query="?path=").status,
    ]


@rule(28, "file-named-like-a-home-is-a-file", rock="/home/user/~root", plain="invalid_argument")
def _(side: Side) -> Any:
    reply = side.rpc(side.shared, "MakeDir", {"path": "~root"})
    if side.is_rock:
        assert side.rpc(side.shared, "Remove", {"path": "~root"}) == {}
    return reply if isinstance(reply, str) else reply["entry"]["path"]


@rule(29, "files-know-one-user", rock=[200, 200, 400, 400], plain=[200, 200, 200, 401])
def _(side: Side) -> Any:
    users = ("", "&username=user", "&username=root", "&username=no-such-user")
    return [side.agent(side.shared, "GET", f"/files?path=/etc/passwd{user}").status for user in users]


@rule(29, "calls-do-not-look-at-the-user", rock="user", plain="root")
def _(side: Side) -> Any:
    made = side.create()
    return side.rpc(made, "MakeDir", {"path": "/tmp/d"}, **AS_ROOT)["entry"]["owner"]


@rule(30, "uploads-are-forms", rock=(400, 200), plain=(200, 200))
def _(side: Side) -> Any:
    plain = side.agent(side.shared, "POST", "/files?path=octets", b"x", Content_Type="application/octet-stream")
    return plain.status, side.upload(side.shared, "form").status


@rule(30, "at-most-256-files-in-one-request", rock=(200, 256, 400), plain=(200, 256, 200))
def _(side: Side) -> Any:
    made = side.create()
    most = side.upload(made, *(f"m/{n}" for n in range(256)))
    return most.status, len(most.json()), side.upload(made, *(f"n/{n}" for n in range(257))).status


@rule(30, "reply-has-name-path-and-type", rock={"name", "path", "type"}, plain={"name", "path", "type", "metadata"})
def _(side: Side) -> Any:
    (item,) = side.upload(side.shared, "r/../s", X_Metadata_Colour="blue").json()
    assert (item["name"], item["path"], item["type"]) == ("s", "/home/user/s", "file")
    return set(item)


@same(31, "directories-are-made-with-parents", ["/home/user/p/q", "already_exists", "invalid_argument"])
def _(side: Side) -> Any:
    made = side.create()
    side.upload(made, "file")
    first = side.rpc(made, "MakeDir", {"path": "p/q"})
    return [first["entry"]["path"], *(side.rpc(made, "MakeDir", {"path": path}) for path in ("p/q", "file"))]


@rule(32, "depth-is-1-to-100", rock=[1, 1, 2, "invalid_argument"], plain=[1, 1, 2, 2])
def _(side: Side) -> Any:
    made = side.create()
    side.rpc(made, "MakeDir", {"path": "d/e/f"})
    replies = [side.rpc(made, "ListDir", {"path": "d", "depth": depth}) for depth in (0, 1, 100, 101)]
    return [reply if isinstance(reply, str) else len(reply["entries"]) for reply in replies]


@rule(32, "listing-is-by-path", rock=["a", "a-b", "a/c", "b"], plain=["a", "a/c", "a-b", "b"])
def _(side: Side) -> Any:
    made = side.create()
    for path in ("o/b", "o/a-b", "o/a/c"):
        side.rpc(made, "MakeDir", {"path": path})
    listed = side.rpc(made, "ListDir", {"path": "o", "depth": 2})["entries"]
    return [entry["path"].removeprefix("/home/user/o/") for entry in listed]


@rule(32, "listing-has-at-most-10000-entries", rock=(10_000, "invalid_argument"), plain=(10_000, 10_001))
def _(side: Side) -> Any:
    made, found = side.create(), []
    long = "n" * 100
    side.start(made, f"mkdir many && cd many && seq -f '{long}%g' 10000 | xargs touch")
    for _ in range(2):
        reply = side.rpc(made, "ListDir", {"path": "many"})
        found.append(reply if isinstance(reply, str) else len(reply["entries"]))
        side.start(made, "touch many/more")
    return tuple(found)


@rule(33, "listing-of-nothing", rock="invalid_argument", plain="not_found")
def _(side: Side) -> Any:
    return side.rpc(side.shared, "ListDir", {"path": "none"})


@same(33, "other-questions-about-nothing", "not_found")
def _(side: Side) -> Any:
    return side.rpc(side.shared, "Stat", {"path": "none"})


@same(34, "reading-what-cannot-be-read", (404, 400))
def _(side: Side) -> Any:
    return tuple(side.agent(side.shared, "GET", f"/files?path={path}").status for path in ("none", "/tmp"))


@same(34, "links-have-the-type-of-their-target", [("FILE_TYPE_DIRECTORY", "/tmp"), ("FILE_TYPE_FILE", "/etc/passwd")])
def _(side: Side) -> Any:
    made = side.create()
    side.start(made, "ln -s /tmp d; ln -s /etc/passwd f")
    entries = [side.rpc(made, "Stat", {"path": path})["entry"] for path in ("d", "f")]
    return [(entry["type"], entry["symlinkTarget"]) for entry in entries]


@rule(34, "entries-have-no-metadata", rock=[None, None, None], plain=[{"colour": "blue"}] * 3)
def _(side: Side) -> Any:
    made = side.create()
    side.upload(made, "m", X_Metadata_Colour="blue")
    if side.is_rock:
        # However it got there.
        side.start(made, "python3 -c \"import os; os.setxattr('m', 'user.e2b.colour', b'blue')\"")
    moved = side.rpc(made, "Move", {"source": "m", "destination": "w/m"})
    listed = side.rpc(made, "ListDir", {"path": "w"})["entries"][0]
    return [
        entry.get("metadata") for entry in (moved["entry"], listed, side.rpc(made, "Stat", {"path": "w/m"})["entry"])
    ]


@rule(35, "files-of-a-sandbox-that-is-gone", rock=[404, 404, 404], plain=[502, 502, 502])
def _(side: Side) -> Any:
    made = side.create()
    side.kill(made)
    answers = (
        side.agent(made, "GET", "/files?path=a"),
        side.upload(made, "a"),
        side.agent(made, "POST", "/filesystem.Filesystem/ListDir", b'{"path":"/"}', Content_Type="application/json"),
    )
    assert all("sandbox" in answer.json()["message"].lower() for answer in answers)
    return [answer.status for answer in answers]


@same(35, "commands-of-a-sandbox-that-is-gone", 502)
def _(side: Side) -> Any:
    made = side.create()
    side.kill(made)
    return side.agent(
        made, "POST", "/process.Process/Start", start_body("true"), Content_Type="application/connect+json"
    ).status


@same(36, "remove-and-move-may-be-there", [{}, "/home/user/to"])
def _(side: Side) -> Any:
    made = side.create()
    side.upload(made, "gone", "from")
    moved = side.rpc(made, "Move", {"source": "from", "destination": "to"})
    return [side.rpc(made, "Remove", {"path": "gone"}), moved["entry"]["path"]]


@pytest.mark.parametrize("probe", PROBES, ids=[probe.name for probe in PROBES])
def test_rule_holds_with_the_profile_and_not_without_it(probe: Probe, rock: Side, plain: Side) -> None:
    answers: dict[bool, Any] = {}
    errors: list[BaseException] = []

    def ask(side: Side) -> None:
        try:
            answers[side.is_rock] = probe.run(side)
        except BaseException as error:
            errors.append(error)

    # Side by side: neither waits for the other.
    threads = [threading.Thread(target=ask, args=(side,)) for side in (rock, plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert (answers[True], answers[False]) == (probe.rock, probe.plain)


def test_every_rule_has_a_probe() -> None:
    elsewhere = {"K3", "K5", "K7"}
    assert {probe.rule for probe in PROBES} | elsewhere == {f"K{number}" for number in range(1, 37)}
