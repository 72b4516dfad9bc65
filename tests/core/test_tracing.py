"""Spans of agents, which may be in the hands of their sandboxes."""

from __future__ import annotations

import time

import pytest

from sandgate_tracing import AGENT_SPAN, Tracing


@pytest.fixture
def tracing(monkeypatch):
    # Nobody listens there, and nothing is sent within the time of a test.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing = Tracing("test")
    ended = []
    monkeypatch.setattr(tracing._processor, "on_end", ended.append)
    yield tracing, ended
    tracing.close()


@pytest.mark.parametrize("told", ["", "1", "2-1", "x-y", "1-2-3", f"{10**18}-{9 * 10**18}", "٣-٤"])
def test_agents_span_lies_within_its_call_or_is_none(tracing, told):
    tracing, ended = tracing
    before = time.time_ns()
    tracing.outgoing("call").end(code="OK", trailing=[(AGENT_SPAN, told)])
    for span in ended:
        assert before <= span.start_time <= span.end_time <= time.time_ns()


def test_agent_tells_of_one_span_for_a_call(tracing):
    tracing, ended = tracing
    tracing.outgoing("call").end(code="OK", trailing=[(AGENT_SPAN, "1-2")] * 1000)
    assert len(ended) == 2
