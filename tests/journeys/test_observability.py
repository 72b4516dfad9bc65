"""What an operator sees of a gateway: metrics that docs/operations.md explains, and traces from the client to the agent."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandgate_api.envd.v1 import process_pb2, process_pb2_grpc
from sandgate_edge.connect.envelope import pack
from sandgate_testing.collector import Collector, Span, collecting
from sandgate_testing.gateway import Gateway, wait_until

ROOT = Path(__file__).resolve().parents[2]
MakeGateway = Callable[..., Gateway]
EDGES = 2


@pytest.fixture
def metrics_port(reserve_port: Callable[[], int]) -> int:
    return reserve_port()


@pytest.fixture
def measured(make_gateway: MakeGateway, metrics_port: int) -> Gateway:
    gateway = make_gateway(options=("--metrics-listen", str(metrics_port), "--workers", str(EDGES)))
    gateway.start()
    return gateway


def scrape(port: int) -> dict[tuple[Any, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def total(series: dict[tuple[Any, ...], float], name: str, **labels: str) -> float:
    return sum(value for key, value in series.items() if key[0] == name and set(labels.items()) <= set(key[1:]))


def to_agent(sandbox: dict[str, Any], **more: str) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
        **more,
    }


def run(gateway: Gateway, sandbox: dict[str, Any], command: str, *, user: str = "user", **headers: str) -> bytes:
    body = pack(0, json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode())
    answer = gateway.call(
        "POST", "/process.Process/Start", body,
        headers=to_agent(sandbox, **{"Content-Type": "application/connect+json", **headers}),
    )  # fmt: skip
    assert answer.status == 200, answer
    return answer.body


def documented() -> set[str]:
    """The series in the tables of docs/operations.md, written without labels; a name in `*` stands for a library's."""
    section = (ROOT / "docs/operations.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)(?:\{[a-z,]*\})?`", cell)}


def test_metrics_show_what_happened_and_the_documents_explain_each_of_them(
    measured: Gateway, metrics_port: int
) -> None:
    sandbox = measured.create_sandbox()
    assert b"out" in run(measured, sandbox, "echo out")
    content = b"x" * 100_000
    for method in ("POST", "GET"):
        answer = measured.call(
            method, "/files?path=a", content if method == "POST" else None,
            headers=to_agent(sandbox, **{"Content-Type": "application/octet-stream"}),
        )  # fmt: skip
        assert answer.status == 200, answer
    limited = run(measured, sandbox, "sleep 60", **{"Connect-Timeout-Ms": "100"})
    assert b"deadline_exceeded" in limited
    assert measured.rest("GET", "/sandboxes/" + "i" + "0" * 20).status == 404
    assert measured.rest("PROPFIND", "/no/such/route").status == 404

    series = scrape(metrics_port)
    start = {"route": "/process.Process/Start", "method": "POST"}
    assert total(series, "sandgate_edge_requests_total", **start, code="200") == 1
    assert total(series, "sandgate_edge_requests_total", **start, code="deadline_exceeded") == 1
    # To the beginning of the answer: the one that ran into its limit began at once.
    assert total(series, "sandgate_edge_request_seconds_count", **start) == 2
    assert total(series, "sandgate_edge_requests_total", route="/sandboxes/{id}", method="GET", code="404") == 1
    assert total(series, "sandgate_edge_requests_total", route="unmatched", method="other", code="404") == 1
    assert total(series, "sandgate_edge_file_bytes_total", direction="up") == len(content)
    assert total(series, "sandgate_edge_file_bytes_total", direction="down") == len(content)
    assert total(series, "sandgate_edges") == EDGES
    assert total(series, "sandgate_edge_requests_in_flight") == total(series, "sandgate_edge_streams") == 0
    assert total(series, "sandgate_core_call_seconds_count", method="SandboxService/Create") == 1
    assert total(series, "sandgate_core_backend_calls_total", operation="create", outcome="OK") == 1
    assert total(series, "sandgate_sandboxes", state="running") == 1
    wait_until(lambda: total(scrape(metrics_port), "sandgate_edge_loop_lag_seconds_count") > EDGES)
    assert total(series, "sandgate_core_loop_lag_seconds_count") >= 0

    shown = {re.sub(r"_(bucket|count|sum)$", "", key[0]) for key in series}
    shown = {name for name in shown if not name.startswith(("process_", "python_"))}
    known = {name for name in documented() if not name.startswith("process_")}
    assert shown - known == set(), "not documented"
    assert known - shown == set(), "documented, and not there"
    text = json.dumps([*map(str, series)])
    assert sandbox["sandboxID"] not in text
    assert measured.api_key not in text


def test_requests_are_counted_once_by_whichever_edge_took_them_and_again_after_its_death(
    measured: Gateway, metrics_port: int
) -> None:
    for _ in range(60):
        assert measured.call("GET", "/health", headers={}).status == 200
    healthy = {"route": "/health", "code": "200"}
    for _ in range(2):
        series = scrape(metrics_port)
        assert total(series, "sandgate_edge_requests_total", **healthy) == 60
    started = total(series, "sandgate_edge_start_time_seconds")
    victim = measured.child("sandgate_edge")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        now = scrape(metrics_port)
        return total(now, "sandgate_edges") == EDGES and total(now, "sandgate_edge_start_time_seconds") > started

    wait_until(replaced)
    before = total(scrape(metrics_port), "sandgate_edge_requests_total", **healthy)
    assert before <= 60
    for _ in range(10):
        assert measured.call("GET", "/health", headers={}).status == 200
    assert total(scrape(metrics_port), "sandgate_edge_requests_total", **healthy) == before + 10


def test_metrics_survive_the_core(measured: Gateway, metrics_port: int) -> None:
    assert measured.call("GET", "/health", headers={}).status == 200
    measured.wait_for_new_core(measured.kill_core())
    wait_until(lambda: total(scrape(metrics_port), "sandgate_edges") == EDGES)
    assert total(scrape(metrics_port), "sandgate_edge_requests_total", route="/health") == 1


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


@pytest.fixture
def traced(make_gateway: MakeGateway, collector: Collector) -> Gateway:
    gateway = make_gateway(options=("--traces", "otlp"))
    gateway.start()
    return gateway


def context() -> tuple[str, str, dict[str, str]]:
    """A trace of the client's: its id, the id of the span in which the client calls, and the header."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-01"}


def tree_of(collector: Collector, trace: str, root: str, *names: str) -> dict[str, Span]:
    """Waits until spans of these names are there; checks that all hang together below the client's."""
    wait_until(lambda: set(names) <= {span.name for span in collector.of(trace)})
    spans = {span.id: span for span in collector.of(trace)}

    def whole() -> bool:
        spans.update({span.id: span for span in collector.of(trace)})
        return all(span.parent in spans or span.parent == root for span in spans.values())

    wait_until(whole)
    return {span.name if span.service != "sandgate-agent" else f"{span.name} there": span for span in spans.values()}


def chain(spans: dict[str, Span], name: str) -> list[tuple[str, str]]:
    """From a span up to the one below the client's."""
    by_id = {span.id: span for span in spans.values()}
    found: list[tuple[str, str]] = []
    span: Span | None = spans[name]
    while span is not None:
        found.append((span.service, span.name))
        span = by_id.get(span.parent)
    return found


def test_one_trace_leads_from_the_client_over_core_and_backend_to_the_agent(
    traced: Gateway, collector: Collector
) -> None:
    trace, root, header = context()
    answer = traced.rest(
        "POST", "/v2/sandboxes", {"templateID": "base"}, headers={"X-API-Key": traced.api_key, **header}
    )
    assert answer.status == 201
    sandbox = answer.json()
    spans = tree_of(collector, trace, root, "backend create", "agent Init", "POST /v2/sandboxes")
    assert chain(spans, "agent Init there") == [
        ("sandgate-agent", "agent Init"),
        ("sandgate-core", "agent Init"),
        ("sandgate-core", "Create"),
        ("sandgate-edge", "core Create"),
        ("sandgate-edge", "POST /v2/sandboxes"),
    ]
    assert chain(spans, "backend create")[1] == ("sandgate-core", "Create")

    for command in ("echo out", "exit 3"):
        trace, root, header = context()
        run(traced, sandbox, command, **header)
        spans = tree_of(collector, trace, root, "agent Start", "Locate", "POST /process.Process/Start")
        assert chain(spans, "agent Start there") == [
            ("sandgate-agent", "agent Start"),
            ("sandgate-edge", "agent Start"),
            ("sandgate-edge", "POST /process.Process/Start"),
        ]
        assert chain(spans, "Locate")[-2:] == [
            ("sandgate-edge", "core Locate"),
            ("sandgate-edge", "POST /process.Process/Start"),
        ]
        there, here = spans["agent Start there"], spans["agent Start"]
        assert here.start <= there.start <= there.end <= here.end
        # How a command ends is not how the call does.
        assert not there.failed
        assert spans["POST /process.Process/Start"].attributes["sandgate.sandbox_id"] == sandbox["sandboxID"]
        # The log leads to the trace.
        wait_until(lambda trace=trace: trace in traced.log())


def test_relayed_call_is_in_its_callers_trace(traced: Gateway, collector: Collector) -> None:
    sandbox = traced.create_sandbox()
    trace, root, header = context()
    target = f"unix:{traced.state_dir / 'run' / 'core.sock'}"
    with grpc.insecure_channel(target) as channel:
        stub = process_pb2_grpc.ProcessStub(channel)
        metadata = (
            ("api-key", traced.api_key), ("sandbox-id", sandbox["sandboxID"]), ("traceparent", header["traceparent"]),
        )  # fmt: skip
        _, call = stub.List.with_call(process_pb2.ListRequest(), metadata=metadata, timeout=30)
    # Made into a span by the relay, and by nobody else.
    assert "agent-span" not in {key for key, _ in call.trailing_metadata()}
    spans = tree_of(collector, trace, root, "agent List", "List")
    assert chain(spans, "agent List there") == [
        ("sandgate-agent", "agent List"),
        ("sandgate-core", "agent List"),
        ("sandgate-core", "List"),
    ]
    assert len(collector.of(trace)) == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "nonsense"},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "k=" + "v" * 7000},
        {"traceparent": "\u00ff" * 55},
    ],
)
def test_context_that_is_none_harms_no_request(traced: Gateway, headers: dict[str, str], collector: Collector) -> None:
    sandbox = traced.create_sandbox()
    assert b"out" in run(traced, sandbox, "echo out", **headers)
    wait_until(lambda: any(span.name == "agent Start" for span in collector.spans))


def test_client_that_asks_for_no_recording_is_not_recorded(traced: Gateway, collector: Collector) -> None:
    sandbox = traced.create_sandbox()
    trace, _, header = context()
    run(traced, sandbox, "true", traceparent=header["traceparent"][:-2] + "00")
    seen, root, header = context()
    run(traced, sandbox, "true", **header)
    tree_of(collector, seen, root, "agent Start")
    assert collector.of(trace) == []


def test_collector_that_is_gone_costs_requests_and_the_end_nothing(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    gateway = make_gateway(options=("--traces", "otlp"))
    gateway.start()
    assert b"out" in run(gateway, gateway.create_sandbox(), "echo out")
    gateway.stop()
    assert gateway.remains() == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf only"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "may be otlp or none"),
    ],
)
def test_setting_that_cannot_be_followed_stops_the_start_and_is_found_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("SANDGATE_TRACES", "otlp")
    for command in ("serve", "doctor"):
        done = subprocess.run(
            [sys.executable, "-m", "sandgate", command, "--state-dir", str(tmp_path), "--port", "0"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert said in done.stdout + done.stderr


def test_nothing_of_traces_is_loaded_while_they_are_off() -> None:
    program = "import sys, sandgate_edge.app, sandgate_core.server, sandgate.serve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert [name for name in done.stdout.split() if name.startswith("opentelemetry")] == []


def test_what_commands_write_is_in_their_sandboxs_logs_over_pause_restart_and_end(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gateway, "_environment", with_variable("SANDGATE_LOG_COMMANDS", "tagged"))
    gateway = make_gateway(on_exit="keep")
    gateway.start()
    sandbox = gateway.create_sandbox()
    name = sandbox["sandboxID"]

    def say(text: str, tag: str | None = "job") -> None:
        process = {"process": {"cmd": "/bin/sh", "args": ["-c", f"echo {text}; echo {text}! >&2"]}, "tag": tag}
        answer = gateway.call(
            "POST", "/process.Process/Start", pack(0, json.dumps(process).encode()),
            headers=to_agent(sandbox, **{"Content-Type": "application/connect+json"}),
        )  # fmt: skip
        assert answer.status == 200

    def written() -> set[str]:
        lines = gateway.rest("GET", f"/v2/sandboxes/{name}/logs?search=wrote").json()["logs"]
        assert {line["fields"]["logger"] for line in lines} <= {"process"}
        return {line["message"] for line in lines}

    say("wrote-secretly", tag=None)
    say("wrote-one")
    expected = {"wrote-one", "wrote-one!"}
    wait_until(lambda: written() == expected)
    assert gateway.rest("POST", f"/sandboxes/{name}/pause", {"memory": False}).status == 204
    assert written() == expected
    assert gateway.rest("POST", f"/sandboxes/{name}/connect", {"timeout": 300}).status in {200, 201}
    say("wrote-two")
    expected |= {"wrote-two", "wrote-two!"}
    wait_until(lambda: written() == expected)
    gateway.wait_for_new_core(gateway.kill_core())
    say("wrote-three")
    expected |= {"wrote-three", "wrote-three!"}
    wait_until(lambda: written() == expected)

    # As the command line of E2B reads it: JSON within JSON, from a time on.
    older = gateway.rest("GET", f"/sandboxes/{name}/logs?limit=1000").json()["logs"]
    lines = [json.loads(line["line"]) for line in older]
    assert {"level", "logger"} <= set.intersection(*map(set, lines))
    levels = {line["message"]: line["level"] for line in lines}
    assert (levels["wrote-two"], levels["wrote-two!"]) == ("info", "warn")
    newest = gateway.rest("GET", f"/v2/sandboxes/{name}/logs?direction=backward&limit=1&level=warn").json()["logs"]
    assert [line["message"] for line in newest] == ["wrote-three!"]
    assert newest[0]["fields"]["tag"] == "job"
    assert newest[0]["fields"]["stream"] == "stderr"

    assert gateway.rest("DELETE", f"/sandboxes/{name}").status == 204
    assert written() == expected
    gateway.stop()
    assert gateway.remains() == []


def with_variable(name: str, value: str) -> Callable[[Gateway], dict[str, str]]:
    def environment(self: Gateway) -> dict[str, str]:
        kept = {key: text for key, text in os.environ.items() if not key.startswith(("SANDGATE_", "E2B_"))}
        return {**kept, name: value}

    return environment
