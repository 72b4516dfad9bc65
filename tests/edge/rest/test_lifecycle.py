"""Pausing, resuming, measurements, events and repeated creates over REST (rest.md 1.4 and 4.5, behaviour.md 13.4)."""

import asyncio
import json
import time

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

ID = "i" + "0" * 20


async def until(ask, wanted):
    """What ``ask`` answers once that is ``wanted``; the bound is against hangs only."""
    async with asyncio.timeout(30):
        while True:
            if wanted(answer := await ask()):
                return answer
            await asyncio.sleep(0.1)


async def state_of(edge, box):
    status, detail, _ = await edge.rest("GET", "/sandboxes/" + box["sandboxID"])
    assert status == 200, detail
    return detail


async def health(edge, box, token=None):
    headers = {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": "49983"}
    if token is not None:
        headers["X-Access-Token"] = token
    async with edge.session.get(edge.url + "/health", headers=headers) as answer:
        return answer.status


async def test_pause_and_connect(edge):
    # C39, C41, C42, C44, S9
    box = await edge.create()
    path = "/sandboxes/" + box["sandboxID"]
    assert (await edge.rest("POST", path + "/pause", {}))[:2] == (204, None)
    status, error, _ = await edge.rest("POST", path + "/pause", {"memory": True})
    assert (status, error["code"]) == (409, 409)
    detail = await state_of(edge, box)
    assert (detail["state"], detail["pauseMode"]) == ("paused", "full")
    assert "envdUnresponsiveAtPause" not in detail
    assert await health(edge, box) == 502
    status, again, _ = await edge.rest("POST", "/v2" + path + "/connect", {"timeout": 60})
    assert status == 201
    assert again == box
    detail = await state_of(edge, box)
    assert detail["state"] == "running"
    assert "pauseMode" not in detail
    assert await health(edge, box) == 204
    assert (await edge.rest("POST", path + "/connect", {"timeout": 60}))[0] == 200


async def test_pause_without_a_body_and_chunked(edge):
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}/pause"

    async def chunks():
        yield b'{"memory"'
        yield b": false}"

    assert (await edge.rest("POST", path, raw=chunks()))[0] == 204
    # B44: never accepted and ignored
    assert (await state_of(edge, box))["pauseMode"] == "filesystem"
    assert (await edge.rest("POST", path.replace("pause", "resume")))[0] == 201
    assert (await edge.rest("POST", path))[0] == 204


async def test_several_pauses_at_once_join_one(edge):
    # C39
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}/pause"
    answers = await asyncio.gather(*(edge.rest("POST", path, {}) for _ in range(5)))
    assert {status for status, *_ in answers} <= {204, 409}
    assert 204 in {status for status, *_ in answers}
    assert (await state_of(edge, box))["state"] == "paused"


async def test_old_resume(edge):
    # C45, C49
    box = await edge.create()
    path = "/sandboxes/" + box["sandboxID"]
    assert (await edge.rest("POST", path + "/resume", {}))[0] == 409
    await edge.rest("POST", path + "/pause", {})
    began = time.time()
    status, again, _ = await edge.rest("POST", path + "/resume", {"timeout": 100, "autoPause": True})
    assert (status, again) == (201, box)
    detail = await state_of(edge, box)
    assert detail["lifecycle"]["onTimeout"] == "pause"
    assert detail["startedAt"] >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began))


async def test_paused_sandbox_has_no_timeout_to_set_and_can_be_killed(edge):
    # C31, C34
    box = await edge.create()
    path = "/sandboxes/" + box["sandboxID"]
    await edge.rest("POST", path + "/pause", {})
    assert (await edge.rest("POST", path + "/timeout", {"timeout": 60}))[0] == 404
    assert (await edge.rest("DELETE", path))[0] == 204
    for method, route in (("POST", "/pause"), ("POST", "/connect"), ("POST", "/resume"), ("GET", "")):
        status, error, _ = await edge.rest(method, path + route, {} if method == "POST" else None)
        assert (status, error["code"]) == (404, 404), route


async def test_auto_pause_keeps_its_mode(edge):
    # C8, C33
    box = await edge.create(timeout=1, autoPause=True, autoPauseMemory=False)
    detail = await until(lambda: state_of(edge, box), lambda detail: detail["state"] == "paused")
    assert (detail["pauseMode"], detail["lifecycle"]) == ("filesystem", {"autoResume": False, "onTimeout": "pause"})
    assert await health(edge, box, box["envdAccessToken"]) == 502
    assert (await edge.rest("POST", f"/v2/sandboxes/{box['sandboxID']}/connect", {}))[0] == 201


async def test_traffic_wakes_with_the_right_token_only(edge):
    # R15, C48
    box = await edge.create(timeout=20, autoPause=True, autoResume={"enabled": True})
    other = await edge.create()
    path = "/sandboxes/" + box["sandboxID"]
    await edge.rest("POST", path + "/pause", {})
    for token in (None, "wrong", other["envdAccessToken"]):
        assert await health(edge, box, token) == 403
    headers = {"X-Access-Token": "wrong"}
    assert (await edge.read(box, "x", headers=headers))[0] == 403
    async with edge.files("GET", box, path="x", query={"signature": "v1_x"}, token=False) as answer:
        assert answer.status == 403
    assert (await state_of(edge, box))["state"] == "paused"
    assert (await edge.write(box, "woken", b"yes"))[0] == 200
    detail = await state_of(edge, box)
    assert detail["state"] == "running"
    left = time.mktime(time.strptime(detail["endAt"][:19], "%Y-%m-%dT%H:%M:%S")) - time.mktime(
        time.strptime(detail["startedAt"][:19], "%Y-%m-%dT%H:%M:%S")
    )
    assert left == 300


async def test_many_requests_wake_once_and_all_are_served(edge):
    # C46
    box = await edge.create(autoPause=True, autoResume={"enabled": True})
    path = "/sandboxes/" + box["sandboxID"]
    await edge.rest("POST", path + "/pause", {})
    answers = await asyncio.gather(*(health(edge, box, box["envdAccessToken"]) for _ in range(10)))
    assert set(answers) == {204}
    _, logs, _ = await edge.rest("GET", path + "/logs")
    assert [entry["fields"]["to"] for entry in logs["logEntries"]].count("resuming") == 1


async def test_healthy_guest_required(edge):
    # rest.md 4.5: 503 when it does not respond
    box = await edge.create()
    edge.backend.stop_agent(box["sandboxID"])
    path = "/sandboxes/" + box["sandboxID"]
    status, error, _ = await edge.rest("POST", path + "/pause", {"requireHealthyGuest": True})
    assert (status, error["code"]) == (503, 503)
    assert (await state_of(edge, box))["state"] == "running"
    assert (await edge.rest("POST", path + "/pause", {}))[0] == 204
    assert (await state_of(edge, box))["envdUnresponsiveAtPause"] is True


async def test_capability_that_is_missing_is_named(edge):
    edge.backend.capabilities = frozenset()
    try:
        box = await edge.create()
        status, error, _ = await edge.rest("POST", f"/sandboxes/{box['sandboxID']}/pause", {})
        assert status == 400
        assert "backend 'local' does not offer pause" in error["message"]
        assert (await state_of(edge, box))["state"] == "running"
    finally:
        del edge.backend.capabilities


async def test_metrics(edge):
    # C25, C26
    box, quiet = await edge.create(), await edge.create()
    path = f"/sandboxes/{box['sandboxID']}/metrics"
    await edge.rest("POST", f"/sandboxes/{quiet['sandboxID']}/pause", {})
    _, samples, _ = await until(lambda: edge.rest("GET", path), lambda answer: bool(answer[1]))
    sample = samples[0]
    assert sample.keys() == {
        "timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed", "diskTotal",
    }  # fmt: skip
    assert abs(sample["timestampUnix"] - time.time()) < 60
    assert 0 < sample["memUsed"] < sample["memTotal"]
    at = sample["timestampUnix"]
    assert (await edge.rest("GET", f"{path}?start={at}&end={at}"))[1][0] == sample
    assert (await edge.rest("GET", f"{path}?start={at + 3600}"))[:2] == (200, [])
    assert (await edge.rest("GET", f"{path}?end={at - 3600}"))[:2] == (200, [])
    both = f"{box['sandboxID']},{quiet['sandboxID']},{ID}"
    _, several, _ = await edge.rest("GET", f"/sandboxes/metrics?sandbox_ids={both}")
    assert set(several["sandboxes"]) >= {box["sandboxID"]}
    assert ID not in several["sandboxes"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/sandboxes/{ID}/metrics", 404),
        ("/sandboxes/metrics", 400),
        ("/sandboxes/metrics?sandbox_ids=" + ",".join([ID] * 101), 400),
        ("/sandboxes/metrics?sandbox_ids=../x", 400),
        (f"/sandboxes/{ID}/metrics?start=-1", 400),
        (f"/sandboxes/{ID}/metrics?start=999999999999", 400),
        (f"/sandboxes/{ID}/metrics?start=2&end=1", 400),
        (f"/sandboxes/{ID}/logs", 404),
        (f"/sandboxes/{ID}/logs?limit=0", 400),
        (f"/v2/sandboxes/{ID}/logs?direction=up", 400),
        (f"/v2/sandboxes/{ID}/logs?level=loud", 400),
        (f"/v2/sandboxes/{ID}/logs?cursor=x", 400),
    ],
)
async def test_wrong_questions(edge, path, status):
    found, error, _ = await edge.rest("GET", path)
    assert (found, error["code"]) == (status, status)
    assert (await edge.rest("GET", path, key="e2b_" + "f" * 40))[0] == 401


async def test_logs_say_what_happened(edge):
    box = await edge.create()
    path = f"/sandboxes/{box['sandboxID']}"
    await edge.rest("POST", path + "/pause", {})
    _, logs, _ = await edge.rest("GET", path + "/logs")
    assert [entry["fields"]["to"] for entry in logs["logEntries"]] == ["creating", "running", "pausing", "paused"]
    for line in logs["logs"]:
        assert {"level", "logger", "message"} <= json.loads(line["line"]).keys()
    _, newest, _ = await edge.rest("GET", f"/v2{path}/logs?direction=backward&limit=1")
    assert [entry["fields"]["to"] for entry in newest["logs"]] == ["paused"]
    assert (await edge.rest("GET", f"/v2{path}/logs?level=error"))[1] == {"logs": []}
    later = int(time.time() * 1000) + 60_000
    assert (await edge.rest("GET", f"{path}/logs?start={later}"))[1] == {"logs": [], "logEntries": []}
    # What became of it can be asked afterwards.
    await edge.rest("DELETE", path)
    _, logs, _ = await edge.rest("GET", path + "/logs")
    assert logs["logEntries"][-1]["fields"]["to"] == "killed"


async def create_with(edge, key, body=None, path="/v2/sandboxes"):
    return await edge.rest("POST", path, {"templateID": "base", **(body or {})}, headers={"Idempotency-Key": key})


async def test_repeated_create_answers_with_the_same_sandbox(edge):
    # rest.md 1.4
    status, box, _ = await create_with(edge, "call-1", {"metadata": {"b": "1", "a": "2"}})
    assert status == 201
    assert (await create_with(edge, "call-1", {"metadata": {"a": "2", "b": "1"}}))[:2] == (201, box)
    _, listed, _ = await edge.rest("GET", "/v2/sandboxes?metadata=" + "a%253D2")
    assert [item["sandboxID"] for item in listed] == [box["sandboxID"]]
    status, error, headers = await create_with(edge, "call-1", {"metadata": {"a": "3"}})
    assert (status, error["code"], error["error_code"]) == (422, 422, "idempotency_request_mismatch")
    assert headers["Should-Retry"] == "false"
    # It does not come back to life, and the answer is still the first one.
    await edge.rest("DELETE", "/sandboxes/" + box["sandboxID"])
    assert (await create_with(edge, "call-1", {"metadata": {"b": "1", "a": "2"}}))[:2] == (201, box)
    assert (await edge.rest("GET", "/sandboxes/" + box["sandboxID"]))[0] == 404


async def test_create_without_a_key_makes_another_sandbox_each_time(edge):
    # C60
    made = [(await edge.rest("POST", "/v2/sandboxes", {"templateID": "base"}))[1]["sandboxID"] for _ in range(2)]
    assert len(set(made)) == 2
    for name in made:
        assert (await edge.rest("GET", f"/sandboxes/{name}"))[0] == 200


async def test_creates_with_one_key_at_once_make_one_sandbox(edge):
    answers = await asyncio.gather(*(create_with(edge, "call-2") for _ in range(6)))
    made = {answer["sandboxID"] for status, answer, _ in answers if status == 201}
    assert len(made) == 1
    for status, answer, headers in answers:
        if status != 201:
            assert (status, answer["error_code"]) == (409, "idempotency_in_progress")
            assert (headers["Should-Retry"], headers["Retry-After"]) == ("true", "1")
    assert (await create_with(edge, "call-2"))[1]["sandboxID"] in made


async def test_failed_create_leaves_its_key_to_the_next_attempt(edge):
    status, _, headers = await create_with(edge, "call-3", {"templateID": "broken"})
    assert status == 500
    assert "Should-Retry" not in headers  # with a key a repeat is safe, so the client's own rules hold
    assert (await create_with(edge, "call-3"))[0] == 201


async def test_client_that_went_away_finds_its_sandbox_again(edge):
    """The answer was lost; without a key the sandbox would be taken back."""
    creating = asyncio.create_task(create_with(edge, "call-4"))
    await asyncio.sleep(0.1)
    creating.cancel()
    await asyncio.wait({creating})
    answer = await until(lambda: create_with(edge, "call-4"), lambda answer: answer[0] != 409)
    assert answer[0] == 201
    assert (await state_of(edge, answer[1]))["state"] == "running"


@pytest.mark.parametrize("key", ["", "UPPER", "a_b", "a" * 256, "ä"])
async def test_wrong_key_is_refused(edge, key):
    status, error, _ = await create_with(edge, key)
    assert (status, error["code"]) == (400, 400)
