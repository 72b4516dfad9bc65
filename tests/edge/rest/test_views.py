"""Sandbox objects of rest.md 3: required members, exact timestamps, and never a null."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.rest.views import detail_view, listed_view, sandbox_view, timestamp_text
from sandgate_errors import Internal


def sandbox(**members):
    return sandboxes_pb2.Sandbox(
        **{
            "id": "iabc",
            "template_id": "base",
            "state": sandboxes_pb2.SANDBOX_STATE_RUNNING,
            "started_at": Timestamp(seconds=1769860800, nanos=123_999_999),
            "end_at": Timestamp(seconds=1769861100),
            "resources": sandboxes_pb2.Resources(cpu_count=2, memory_mb=512, disk_size_mb=1024),
            "envd_version": "0.6.13",
            "allow_internet_access": True,
            **members,
        }
    )


def test_create_answer_of_an_unsecured_sandbox():
    assert sandbox_view(sandbox(), domain=None) == {
        "sandboxID": "iabc",
        "templateID": "base",
        "clientID": "sandgate",
        "envdVersion": "0.6.13",
    }


def test_create_answer_with_everything():
    view = sandbox_view(sandbox(access_token="tok", alias="name"), domain="box.example")
    assert view["envdAccessToken"] == "tok"
    assert view["alias"] == "name"
    assert view["domain"] == "box.example"


def test_listed_sandbox():
    """rest.md 3.3; tokens are not in lists."""
    assert listed_view(sandbox(access_token="tok", metadata={"a": "b"})) == {
        "sandboxID": "iabc",
        "templateID": "base",
        "clientID": "sandgate",
        "envdVersion": "0.6.13",
        "startedAt": "2026-01-31T12:00:00.123Z",
        "endAt": "2026-01-31T12:05:00.000Z",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "state": "running",
        "metadata": {"a": "b"},
    }


def test_detail():
    """C13."""
    view = detail_view(
        sandbox(
            access_token="tok",
            state=sandboxes_pb2.SANDBOX_STATE_PAUSED,
            on_timeout=sandboxes_pb2.ON_TIMEOUT_PAUSE,
            auto_resume=True,
        ),
        domain=None,
    )
    assert view["state"] == "paused"
    assert view["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    assert view["network"] == {}
    assert view["allowInternetAccess"] is True
    assert view["volumeMounts"] == []
    assert view["envdAccessToken"] == "tok"
    assert None not in view.values()


def test_detail_shows_the_rules_that_hold():
    rules = sandboxes_pb2.NetworkRules(
        allow_out=["1.1.1.1"], deny_out=["0.0.0.0/0"], allow_public_traffic=False, mask_request_host="h"
    )
    assert detail_view(sandbox(network=rules), domain=None)["network"] == {
        "allowOut": ["1.1.1.1"],
        "denyOut": ["0.0.0.0/0"],
        "allowPublicTraffic": False,
        "maskRequestHost": "h",
    }


def test_a_state_that_clients_do_not_know_is_never_shown():
    with pytest.raises(Internal):
        listed_view(sandbox(state=sandboxes_pb2.SANDBOX_STATE_UNSPECIFIED))


def test_timestamps_have_milliseconds_and_z():
    assert timestamp_text(Timestamp()) == "1970-01-01T00:00:00.000Z"
    assert timestamp_text(Timestamp(seconds=1769860800, nanos=999_999_999)) == "2026-01-31T12:00:00.999Z"
