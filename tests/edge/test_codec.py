"""Messages as JSON and protobuf: what the SDKs send, what they expect, and what nobody should send (W3, envd.md 2.1)."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_edge.connect.codec import JSON, PROTO
from sandgate_edge.rpc import METHODS
from sandgate_errors import InvalidArgument, ResourceExhausted

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/connect_frames.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["events"], ids=lambda vector: vector["name"])
@pytest.mark.parametrize("kind", [process_pb2.StartResponse, process_pb2.ConnectResponse])
def test_events_are_written_as_clients_expect_them(vector, kind):
    text = vector["json"].encode()
    assert JSON.encode(JSON.decode(kind, text)) == text


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda vector: vector["name"])
def test_requests_of_the_sdks_are_understood(vector):
    kind = getattr(process_pb2, vector["message"])
    message = JSON.decode(kind, json.dumps(vector["canonical"], indent=2).encode())
    assert JSON.decode(kind, bytes.fromhex(vector["frame"])[5:]) == message
    assert PROTO.decode(kind, PROTO.encode(message)) == message


@given(st.binary(max_size=200), st.sampled_from(["stdout", "stderr", "pty"]))
def test_output_bytes_pass_unchanged_and_as_the_library_would_write_them(data: bytes, stream: str):
    event = process_pb2.ProcessEvent(data=process_pb2.ProcessEvent.DataEvent(**{stream: data}))
    written = JSON.encode(process_pb2.StartResponse(event=event))
    assert JSON.decode(process_pb2.StartResponse, written).event == event
    # A wrapper of another type takes the library's way.
    by_library = json.loads(JSON.encode(event))
    assert json.loads(written) == {"event": by_library}


def test_empty_message_is_two_bytes():
    assert JSON.encode(process_pb2.SendInputResponse()) == b"{}"
    assert PROTO.encode(process_pb2.SendInputResponse()) == b""


def test_absent_start_flag_differs_from_false():
    assert not JSON.decode(process_pb2.StartRequest, b"{}").HasField("stdin")
    assert JSON.decode(process_pb2.StartRequest, b'{"stdin":false}').HasField("stdin")


def test_entries_are_written_in_camel_case_with_wide_numbers_as_text():
    entry = filesystem_pb2.EntryInfo(
        name="é",
        type=filesystem_pb2.FILE_TYPE_FILE,
        size=2**40,
        mode=0o644,
        modified_time=Timestamp(seconds=1769860800, nanos=500_000_000),
        symlink_target="/x",
        is_symlink=True,
    )
    assert json.loads(JSON.encode(filesystem_pb2.StatResponse(entry=entry)))["entry"] == {
        "name": "é",
        "type": "FILE_TYPE_FILE",
        "size": "1099511627776",
        "mode": 420,
        "modifiedTime": "2026-01-31T12:00:00.500Z",
        "symlinkTarget": "/x",
        "isSymlink": True,
    }


@pytest.mark.parametrize(
    "text",
    [
        '{"path":"/x","includeEntry":true,"allowNetworkMounts":true}',
        '{"path":"/x","include_entry":true,"allow_network_mounts":true}',
        '{"path":"/x","includeEntry":true,"allowNetworkMounts":true,"later":{"deep":[1,{"x":null}]},"recursive":null}',
    ],
)
def test_both_spellings_and_unknown_fields_are_accepted(text: str):
    expected = filesystem_pb2.WatchDirRequest(path="/x", include_entry=True, allow_network_mounts=True)
    assert JSON.decode(filesystem_pb2.WatchDirRequest, text.encode()) == expected


@pytest.mark.parametrize("signal", ['"SIGNAL_SIGKILL"', "9", "9.0"])
@pytest.mark.parametrize("pid", ["42", '"42"', "4.2e1"])
def test_enums_and_numbers_are_accepted_in_each_of_their_forms(signal: str, pid: str):
    text = f'{{"process":{{"pid":{pid}}},"signal":{signal}}}'
    message = JSON.decode(process_pb2.SendSignalRequest, text.encode())
    assert (message.process.pid, message.signal) == (42, process_pb2.SIGNAL_SIGKILL)


@pytest.mark.parametrize("text", ["+/8=", "+/8", "-_8=", "-_8", "+_8"])
def test_base64_is_accepted_standard_and_url_safe_padded_or_not(text: str):
    message = JSON.decode(process_pb2.SendInputRequest, f'{{"input":{{"stdin":"{text}"}}}}'.encode())
    assert message.input.stdin == b"\xfb\xff"


@pytest.mark.parametrize("text", ["!!", "YW I=", "Y", "YWI=YWI=", "YWI===", "Y\\n", "é"])
def test_what_is_not_base64_is_refused_and_never_becomes_other_bytes(text: str):
    for template in ('{{"input":{{"stdin":"{}"}}}}', '{{"input":{{"pty":"{}"}}}}'):
        with pytest.raises(InvalidArgument, match="base64"):
            JSON.decode(process_pb2.SendInputRequest, template.format(text).encode())
    with pytest.raises(InvalidArgument, match="base64"):
        JSON.decode(process_pb2.StreamInputRequest, f'{{"data":{{"input":{{"stdin":"{text}"}}}}}}'.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff",
        b'{"process":1}',
        b'{"process":{"pid":true}}',
        b'{"process":{"pid":1.5}}',
        b'{"process":{"pid":-1}}',
        b'{"process":{"pid":4294967296}}',
        b'{"process":{"pid":1e400}}',
        b'{"process":{"pid":' + b"9" * 5000 + b"}}",
        b'{"process":{"pid":1,"tag":"x"}}',
        b'{"process":{"tag":"\\ud800"}}',
        b'{"process":"\\ud800"}',
        b'{"process":{"\\uDFFF":1}}',
        b'{"\\ud800":1}',
        b'{"later":["\\udead\\ud83d"]}',
        b'{"later":NaN}',
        b'{"later":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"process":{"pid":1}}'.encode("utf-16"),
    ],
)
def test_what_is_no_message_is_invalid_argument_in_a_short_line(data: bytes):
    with pytest.raises(InvalidArgument) as caught:
        JSON.decode(process_pb2.SendInputRequest, data)
    assert len(caught.value.message) < 300
    assert caught.value.message.isascii()


def test_json_of_very_many_elements_is_refused_before_it_fills_the_memory():
    with pytest.raises(ResourceExhausted, match="elements"):
        JSON.decode(process_pb2.ListRequest, b'{"x":[' + b"{}," * 1_000_000 + b"{}]}")


def test_large_text_is_no_such_case():
    command = "x" * 20_000_000
    text = json.dumps({"process": {"cmd": command}}).encode()
    assert JSON.decode(process_pb2.StartRequest, text).process.cmd == command


def test_bytes_that_are_no_protobuf_are_invalid_argument():
    for method in METHODS:
        with pytest.raises(InvalidArgument, match="protobuf"):
            PROTO.decode(method.request, b"\xff\xff\xff")


_NAMES = [
    "process",
    "pid",
    "tag",
    "cmd",
    "args",
    "envs",
    "cwd",
    "pty",
    "size",
    "cols",
    "input",
    "stdin",
    "data",
    "path",
]
_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["YWI=", "-1"])
)
_DOCUMENTS = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=15,
)


@given(st.sampled_from(METHODS), st.dictionaries(st.sampled_from(_NAMES), _DOCUMENTS, max_size=4))
def test_any_document_becomes_a_message_or_a_client_error(method, document):
    # Any other exception would be the gateway's fault.
    with suppress(InvalidArgument):
        JSON.decode(method.request, json.dumps(document).encode())


def test_character_written_as_two_escapes_is_one():
    message = JSON.decode(filesystem_pb2.StatRequest, b'{"path":"/\\ud83d\\ude00\\\\ud800"}')
    assert message.path == "/\U0001f600\\ud800"
