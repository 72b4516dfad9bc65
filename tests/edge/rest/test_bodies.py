"""JSON bodies: whatever arrives is read or refused with the member's name; nothing escapes as another exception."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.rest.bodies import Members, parse_object
from sandgate_edge.rest.create import create_request
from sandgate_errors import InvalidArgument


def create(**members):
    return create_request(Members({"templateID": "base", **members}), secure=True, default_timeout=300)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{} {}",
    ],
)
def test_what_is_not_one_json_object_is_refused(raw):
    with pytest.raises(InvalidArgument, match="request body"):
        parse_object(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw):
    try:
        assert isinstance(parse_object(raw), dict)
    except InvalidArgument:
        pass


def test_minimal_bodies_of_the_clients():
    """rest.md 4.1 and 4.2, and behaviour 16."""
    for raw in (
        (
            b'{"templateID":"base","allow_internet_access":true,"autoPause":false,"autoResume":{"enabled":false},'
            b'"envVars":{},"metadata":{},"secure":true,"timeout":300}'
        ),
        b'{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":true,"metadata":{},"envVars":{}}',
        b'{"templateID":"base","metadata":{},"envVars":{}}',
        b'{"templateID":"base"}',
    ):
        request = create_request(Members(parse_object(raw)), secure=True, default_timeout=300)
        assert request.template_id == "base"
        assert request.timeout.seconds == 300
        assert request.on_timeout == sandboxes_pb2.ON_TIMEOUT_KILL
        assert not request.auto_resume
        # "No rules" to the core, which refuses rules its backend cannot keep.
        assert request.network == sandboxes_pb2.NetworkRules()


def test_every_member_arrives():
    request = create(
        timeout=7,
        metadata={"a": "ä"},
        envVars={"A": "x=y\n"},
        allow_internet_access=False,
        autoPause=True,
        autoPauseMemory=False,
        autoResume={"enabled": True, "later": 1},
        network={
            "allowOut": ["1.1.1.1"],
            "denyOut": ["0.0.0.0/0"],
            "allowPublicTraffic": False,
            "maskRequestHost": "h:${PORT}",
        },
        mcp={"server": {}},
        unknown={"anything": [1]},
    )
    assert request.timeout.seconds == 7
    assert dict(request.metadata) == {"a": "ä"}
    assert dict(request.envs) == {"A": "x=y\n"}
    assert request.HasField("allow_internet_access")
    assert not request.allow_internet_access
    assert request.on_timeout == sandboxes_pb2.ON_TIMEOUT_PAUSE
    assert request.HasField("pause_memory")
    assert not request.pause_memory
    assert request.auto_resume
    assert list(request.network.allow_out) == ["1.1.1.1"]
    assert list(request.network.deny_out) == ["0.0.0.0/0"]
    assert request.network.HasField("allow_public_traffic")
    assert request.network.mask_request_host == "h:${PORT}"


@pytest.mark.parametrize("members", [{}, {"autoPause": None}, {"autoPause": False}])
def test_sandbox_is_killed_at_its_end_unless_a_pause_is_asked_for(members):
    """C9; that it is killed then is C33."""
    assert create(**members).on_timeout == sandboxes_pb2.ON_TIMEOUT_KILL


def test_null_is_absent():
    request = create(
        timeout=None, metadata=None, envVars=None, mcp=None, iam=None, network=None, volumeMounts=None, autoResume=None
    )
    assert request == create()


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"templateID": None}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({"templateID": 5}, "templateID"),
        ({"templateID": "a\0b"}, "templateID"),
        ({"templateID": "\ud800"}, "templateID"),
        ({"timeout": "300"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": 1.0}, "timeout"),
        ({"timeout": 2**31}, "timeout"),
        ({"timeout": -(2**31) - 1}, "timeout"),
        ({"timeout": 10**300}, "timeout"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": None}}, "metadata"),
        ({"metadata": {"a": "\0"}}, "metadata"),
        ({"metadata": {"\udc00": "a"}}, "metadata"),
        ({"envVars": {"": "x"}}, "envVars"),
        ({"envVars": {"A=B": "x"}}, "envVars"),
        ({"envVars": {"A\0": "x"}}, "envVars"),
        ({"envVars": {"A": "x\0"}}, "envVars"),
        ({"envVars": {"A": True}}, "envVars"),
        ({"envVars": "A=B"}, "envVars"),
        ({"allow_internet_access": "yes"}, "allow_internet_access"),
        ({"autoPause": 1}, "autoPause"),
        ({"autoPauseMemory": "true"}, "autoPauseMemory"),
        ({"autoResume": True}, "autoResume"),
        ({"autoResume": {"enabled": "x"}}, "autoResume.enabled"),
        ({"network": []}, "network"),
        ({"network": {"allowOut": "1.1.1.1"}}, "network.allowOut"),
        ({"network": {"denyOut": [1]}}, "network.denyOut"),
        ({"network": {"allowPublicTraffic": 0}}, "network.allowPublicTraffic"),
        ({"network": {"maskRequestHost": {}}}, "network.maskRequestHost"),
        ({"network": {"rules": {"h": []}, "x": []}}, None),
        ({"network": {"denyIn": ["10.0.0.0/8"]}}, "network.denyIn"),
        ({"network": {"rules": {"h": [{"transform": {"headers": {"a": "b"}}}]}}}, "network.rules"),
        ({"network": {"egressProxy": {"address": "a:1"}}}, "network.egressProxy"),
        ({"network": {"dnsServers": ["1.1.1.1"]}}, "network.dnsServers"),
        ({"network": {"httpsPorts": [443]}}, "network.httpsPorts"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"volumeMounts": "v"}, "volumeMounts"),
        ({"iam": {"tokens": {"t": {"audience": "a", "tokenType": "JWT-SVID"}}}}, "iam"),
        ({"iam": {"tokens": {}}}, None),
        ({"iam": {}, "volumeMounts": [], "network": {"rules": {}, "egressProxy": None, "dnsServers": []}}, None),
        ({"mcp": "server"}, "mcp"),
    ],
)
def test_wrong_members_are_refused_by_name(members, named):
    if named is None:
        create(**members)
        return
    with pytest.raises(InvalidArgument) as caught:
        create(**members)
    assert named in caught.value.message


def test_deep_values_of_unsupported_members_are_no_trouble():
    """The depth is the caller's choice; json stops at the interpreter's limit, so this is the most there can be."""
    deep = parse_object(b'{"iam":' + b"[" * 900 + b"]" * 900 + b"}")
    create(**deep)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "timeout",
        "metadata",
        "envVars",
        "allow_internet_access",
        "autoPause",
        "autoPauseMemory",
        "autoResume",
        "network",
        "mcp",
        "volumeMounts",
        "iam",
        "templateID",
    ]
)


@given(st.dictionaries(NAMES, JSON))
def test_any_members_make_a_message_or_a_refusal(members):
    try:
        request = create(**json.loads(json.dumps(members)))
    except InvalidArgument:
        return
    request.SerializeToString()
