"""The log: children's lines pass, and nothing in them reaches a terminal as a command."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate.logs import Lines, Log, printable


@given(st.lists(st.binary(max_size=40)), st.binary())
def test_lines_are_the_same_however_they_arrive(pieces, tail):
    lines, whole = Lines(), b"".join(pieces) + tail
    found = [line for piece in [*pieces, tail] for line in lines.feed(piece)]
    assert [*found, lines.end()] == whole.split(b"\n")


def test_an_endless_line_is_not_kept():
    lines = Lines()
    passed = b"".join(line for _ in range(64) for line in lines.feed(b"x" * 65536))
    rest = lines.end()
    assert len(passed + rest) == 64 * 65536
    assert len(rest) <= 320 * 1024


def _log(form, level="debug") -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    return Log(form=form, level=level, stream=stream), stream


def test_json_passes_through_with_its_process():
    log, stream = _log("json")
    log.line(b'{"event":"x","a":"\xc3\xa9"}', process="core")
    log.say("warning", "y", count=1)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {"event": "x", "a": "é", "process": "core"}
    assert (second["event"], second["level"], second["process"], second["count"]) == ("y", "warning", "front", 1)


def test_not_a_terminal_means_json():
    log, stream = _log("auto")
    log.say("info", "x")
    assert json.loads(stream.getvalue())["event"] == "x"


@pytest.mark.parametrize(
    "raw", [b"Traceback (most recent call last):", b"[1]", b'{"no":1}', b'"x"', b"\xff", b"[" * 5000]
)
def test_what_is_no_log_line_passes_as_it_is(raw):
    log, stream = _log("json")
    log.line(raw, process="core")
    assert stream.getvalue() == raw.decode("utf-8", "replace") + "\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_reaches_the_terminal_as_a_command(form):
    log, stream = _log(form)
    evil = "\x1b]0;owned\x07\r\n\x9b31m\u202e\ud800"
    log.line(json.dumps({"event": evil, evil: evil, "level": "info", "nested": {"x": evil}}).encode(), process="edge")
    log.line(evil.encode("utf-8", "surrogatepass"), process="edge")
    stream.getvalue().encode()
    assert not any(mark in stream.getvalue().rstrip("\n").replace("\n", "") for mark in "\x1b\x07\r\x9b")


def test_text_shows_event_level_and_fields():
    log, stream = _log("text")
    log.line(b'{"event":"request","level":"info","timestamp":"2026-01-31T12:00:00Z","status":200}', process="edge")
    shown = stream.getvalue()
    assert all(part in shown for part in ("request", "info", "status", "200", "edge"))
    assert shown.count("\n") == 1


def test_a_traceback_in_an_event_keeps_its_lines():
    log, stream = _log("text")
    log.line(json.dumps({"event": "x", "level": "error", "exception": "one\ntwo\x1b"}).encode(), process="core")
    assert "one\ntwo\\x1b" in stream.getvalue()


def test_lower_levels_are_left_out():
    log, stream = _log("json", level="warning")
    log.say("info", "x")
    assert stream.getvalue() == ""


def test_a_lost_stream_does_not_stop_the_gateway():
    log, stream = _log("json")
    stream.close()
    log.say("info", "x")
    log.line(b"x", process="core")


def test_printable_keeps_ordinary_text():
    assert printable("naïve – 漢字 100 %") == "naïve – 漢字 100 %"


@pytest.mark.parametrize("value", [None, True, 7, [], {"a": 1}, "x", 1e400])
@pytest.mark.parametrize("key", ["event", "level", "logger", "timestamp", "exception", "exc_info", "stack", "other"])
def test_no_line_of_a_child_can_break_the_text_form(key, value):
    log, stream = _log("text")
    log.line(json.dumps({"event": "e", "level": "info", key: value}).encode(), process="core")
    assert stream.getvalue().endswith("\n")
