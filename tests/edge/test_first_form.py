"""What the Python SDK before 1.7 gets: no field, and no name of a value, that it does not know (W3, envd.md 2.1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.envd.v1 import filesystem_pb2, process_pb2
from sandgate_edge.connect.first_form import FIRST_FORM_JSON

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/connect_frames.json").read_text())
REQUEST = bytes.fromhex(VECTORS["requests"][0]["frame"])
ENTRY = filesystem_pb2.EntryInfo(
    name="a",
    type=filesystem_pb2.FILE_TYPE_FILE,
    path="/home/user/a",
    size=5,
    mode=0o644,
    permissions="-rw-r--r--",
    owner="user",
    group="user",
    modified_time=Timestamp(seconds=1),
    symlink_target="/b",
    metadata={"k": "v"},
    is_symlink=True,
)
FIRST_ENTRY = {"name": "a", "type": "FILE_TYPE_FILE", "path": "/home/user/a"}
EVENT = filesystem_pb2.FilesystemEvent(name="a", type=filesystem_pb2.EVENT_TYPE_WRITE, entry=ENTRY)
CONFIG = process_pb2.ProcessConfig(cmd="sh", args=["-c"], envs={"A": "1"}, cwd="/")


def started(**event: object) -> process_pb2.StartResponse:
    return process_pb2.StartResponse(event=process_pb2.ProcessEvent(**event))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (filesystem_pb2.StatResponse(entry=ENTRY), {"entry": FIRST_ENTRY}),
        (filesystem_pb2.ListDirResponse(entries=[ENTRY, ENTRY]), {"entries": [FIRST_ENTRY, FIRST_ENTRY]}),
        (
            filesystem_pb2.GetWatcherEventsResponse(events=[EVENT]),
            {"events": [{"name": "a", "type": "EVENT_TYPE_WRITE"}]},
        ),
        (
            filesystem_pb2.WatchDirResponse(filesystem=EVENT),
            {"filesystem": {"name": "a", "type": "EVENT_TYPE_WRITE"}},
        ),
        (
            started(start=process_pb2.ProcessEvent.StartEvent(pid=7, seq=1, incarnation=9)),
            {"event": {"start": {"pid": 7}}},
        ),
        (
            started(data=process_pb2.ProcessEvent.DataEvent(stdout=b"hi", seq=2)),
            {"event": {"data": {"stdout": "aGk="}}},
        ),
        (
            started(end=process_pb2.ProcessEvent.EndEvent(exit_code=-1, status="signal: killed", timed_out=True)),
            {"event": {"end": {"exitCode": -1, "status": "signal: killed"}}},
        ),
        (
            process_pb2.ListResponse(
                processes=[
                    process_pb2.ProcessInfo(config=CONFIG, pid=7, tag="t", kind=process_pb2.PROCESS_KIND_COMMAND)
                ]
            ),
            {
                "processes": [
                    {"config": {"cmd": "sh", "args": ["-c"], "envs": {"A": "1"}, "cwd": "/"}, "pid": 7, "tag": "t"}
                ]
            },
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_fields_that_came_later_are_left_out(message, expected):
    before = type(message).FromString(message.SerializeToString())
    assert json.loads(FIRST_FORM_JSON.encode(message)) == expected
    assert message == before


def test_kind_of_file_that_came_later_has_no_name():
    link = filesystem_pb2.EntryInfo(name="l", type=filesystem_pb2.FILE_TYPE_SYMLINK, path="/l")
    written = FIRST_FORM_JSON.encode(filesystem_pb2.StatResponse(entry=link))
    assert json.loads(written) == {"entry": {"name": "l", "path": "/l"}}


@pytest.mark.parametrize(
    ("user_agent", "whole"),
    [("connect-python", False), ("connect-python/0.12", True), ("e2b-python-sdk/1.7.0", True), ("", True)],
)
async def test_only_the_old_client_gets_less(edge, user_agent, whole):
    async def stat(_request, _context):
        return filesystem_pb2.StatResponse(entry=ENTRY)

    edge.agent.on["Stat"] = stat
    reply = await edge.unary("/filesystem.Filesystem/Stat", b'{"path":"a"}', user_agent=user_agent)
    assert reply.status == 200
    assert (reply.json() != {"entry": FIRST_ENTRY}) is whole


async def test_command_of_the_old_client_is_answered_in_what_it_knows(edge):
    async def echo(_request, _context):
        yield started(start=process_pb2.ProcessEvent.StartEvent(pid=7, seq=1))
        yield started(data=process_pb2.ProcessEvent.DataEvent(stdout=b"hi", seq=2))

    edge.agent.on["Start"] = echo
    reply = await edge.stream("/process.Process/Start", REQUEST, user_agent="connect-python")
    assert b'"pid":7' in reply.body
    assert b"seq" not in reply.body
