"""Parts of the native client that need no gateway: what is kept, how arguments are read, what errors become."""

from __future__ import annotations

import itertools
import pickle

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sandgate
from sandgate.client.address import resolve
from sandgate.client.exceptions import SandboxException, exception_of
from sandgate.client.faults import fault_of
from sandgate.client.limits import request_limit, seconds_of
from sandgate.client.process_calls import Program, Target
from sandgate.client.records import Output, PtySize
from sandgate.client.retained import Decoder, Tail
from sandgate.client.steps import Cut
from sandgate.client.transcript import Transcript
from sandgate_errors import (
    Canceled,
    CapabilityMissing,
    FailedPrecondition,
    InvalidArgument,
    NoSpace,
    SandboxNotFound,
    SandgateError,
    Unavailable,
    all_errors,
)
from sandgate_errors.grpc import status_of, trailers_of


@given(pieces=st.lists(st.binary(max_size=50)), limit=st.integers(0, 100))
def test_the_tail_of_a_stream_is_kept(pieces, limit):
    """X15."""
    tail = Tail(limit)
    for piece in pieces:
        tail.add(piece)
    whole = b"".join(pieces)
    assert bytes(tail) == whole[len(whole) - min(limit, len(whole)) :]
    assert tail.truncated == (len(whole) > limit)


@given(text=st.text(max_size=200), limit=st.integers(0, 100))
def test_a_cut_character_is_left_out_whole(text, limit):
    tail = Tail(limit)
    tail.add(text.encode())
    assert text.endswith(tail.text())
    assert "\ufffd" not in tail.text() or "\ufffd" in text


@given(text=st.text(max_size=50), cuts=st.lists(st.integers(0, 200), max_size=10))
def test_characters_that_were_cut_in_two_are_joined(text, cuts):
    """O2."""
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    decoder = Decoder()
    parts = [decoder.feed(raw[start:stop]) for start, stop in itertools.pairwise(places)]
    assert "".join(parts) + decoder.finish() == text


def test_what_is_no_text_is_marked_and_kept_as_bytes():
    transcript = Transcript(100)
    assert transcript.add(Output(stdout=b"a\xffb")).stdout == "a\ufffdb"
    assert transcript.add(Output(stdout=b"\xe2\x82")) is None
    assert [text.stdout for text in transcript.finish()] == ["\ufffd"]
    assert transcript.stdout_bytes == b"a\xffb\xe2\x82"


def test_many_small_pieces_cost_what_their_bytes_cost():
    tail = Tail(1000)
    for _ in range(200_000):
        tail.add(b"x")
    assert bytes(tail) == b"x" * 1000


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_what_is_no_length_of_time_is_refused(timeout):
    with pytest.raises(InvalidArgument):
        seconds_of(timeout)


def test_times_are_read_as_the_sdks_read_them():
    assert [seconds_of(given) for given in (None, 0, 0.5)] == [None, None, 0.5]
    assert [request_limit(given) for given in (None, 0, 0.5)] == [60, None, 0.5]


def test_a_program_asks_for_the_extensions():
    program = Program(argv=("a", "b"), timeout=0.0001, kill_tree=True, user="ü", tag="t")
    request = program.request()
    assert (request.process.cmd, list(request.process.args), request.tag) == ("a", ["b"], "t")
    assert (request.kill_tree, request.term_grace.seconds, request.stdin) == (True, 5, False)
    assert dict(program.metadata()) == {"timeout-ms": "1", "acting-user-bin": "ü".encode()}


@pytest.mark.parametrize(
    "program",
    [
        Program(argv=()),
        Program(argv=("\udcff",)),
        Program(argv=("a",), envs={"a": 1}),
        Program(argv=("a",), size=PtySize(rows=0, cols=1)),
        Program(argv=("a",), size=PtySize(rows=1, cols=70_000)),
    ],
)
def test_a_program_that_cannot_be_sent_is_refused(program):
    with pytest.raises(InvalidArgument):
        program.request()


def test_a_time_limit_that_no_agent_reads_is_refused():
    with pytest.raises(InvalidArgument, match="too long"):
        Program(argv=("a",), timeout=1e8).metadata()


@pytest.mark.parametrize("sandbox_id", ["i\n", "ü", "i\0"])
def test_a_sandbox_id_that_no_header_carries_is_refused(sandbox_id):
    with pytest.raises(InvalidArgument):
        _ = Target(sandbox_id=sandbox_id).metadata


@pytest.mark.parametrize("pid", [-1, 1 << 32])
def test_a_pid_that_cannot_be_is_refused(pid):
    with pytest.raises(InvalidArgument):
        Target(sandbox_id="i1").connect(pid, None)


#: Of the taxonomy itself: a worker may have loaded parts of the gateway that have kinds of their own.
KINDS = [cls for cls in all_errors() if cls.__module__ == "sandgate_errors"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_an_exception_that_keeps_what_it_says(kind):
    error = kind("text", error_code="slug", retry_after=2.5)
    exception = exception_of(error)
    assert isinstance(exception, SandboxException)
    assert (str(exception), exception.error_code, exception.retry_after) == ("text", "slug", 2.5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CapabilityMissing, "InvalidArgumentException"),
        (SandboxNotFound, "NotFoundException"),
        (NoSpace, "SandboxException"),
        (Unavailable, "SandboxException"),
    ],
)
def test_kinds_are_told_by_their_nearest_class(kind, name):
    assert type(exception_of(kind("x"))).__name__ == name


# Canceled is what a core that stops leaves behind, and nobody refuses anything with it.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {SandgateError, Canceled}])
def test_what_the_core_refused_is_never_taken_for_a_broken_connection(kind):
    error = kind("text")
    assert type(fault_of(status_of(error), "text", trailers_of(error), target="x")) is kind


def test_a_broken_connection_is_told_without_the_transports_text():
    fault = fault_of(grpc.StatusCode.UNAVAILABLE, "ipv4:1.2.3.4:5 recvmsg", None, target="host:1")
    assert isinstance(fault, Cut)
    assert "recvmsg" not in fault.message
    assert "host:1" in fault.message


def test_an_exit_exception_can_be_pickled():
    error = sandgate.CommandExitException(stdout="o", stderr="e", exit_code=3, error="exit status 3", truncated=True)
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == str(error)


KEY = "e2b_" + "0" * 40


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("SANDGATE_CORE", "SANDGATE_API_KEY", "SANDGATE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def state_dir(tmp_path):
    (tmp_path / "internal.token").write_text("secret")
    (tmp_path / "internal.token").chmod(0o600)
    return tmp_path


def test_a_named_core_gets_the_key_and_nothing_else(monkeypatch, state_dir):
    monkeypatch.setenv("SANDGATE_STATE_DIR", str(state_dir))
    monkeypatch.setenv("SANDGATE_CORE", "one:1")
    monkeypatch.setenv("SANDGATE_API_KEY", KEY)
    for address, target in ((resolve(), "one:1"), (resolve(core="two:2"), "two:2")):
        assert (address.target, address.credentials) == (target, (("api-key", KEY),))
    assert KEY not in repr(resolve())


def test_a_named_core_needs_a_key(monkeypatch, state_dir):
    monkeypatch.setenv("SANDGATE_STATE_DIR", str(state_dir))
    with pytest.raises(InvalidArgument, match="SANDGATE_API_KEY"):
        resolve(core="one:1")


def test_the_gateway_of_this_machine_takes_the_key_or_the_token(monkeypatch, state_dir):
    monkeypatch.setenv("SANDGATE_STATE_DIR", str(state_dir))
    assert resolve().credentials == (("internal-token", "secret"),)
    assert resolve(api_key=KEY).credentials == (("api-key", KEY),)
    monkeypatch.setenv("SANDGATE_CORE", "one:1")
    assert resolve(state_dir=state_dir).target == f"unix:{state_dir}/run/core.sock"


def test_two_places_at_once_are_refused(state_dir):
    with pytest.raises(InvalidArgument):
        resolve(core="one:1", api_key=KEY, state_dir=state_dir)


@pytest.mark.parametrize("key", ["", "a b\n", "ü", " x"])
def test_a_key_that_no_header_carries_is_refused_without_its_text(key):
    with pytest.raises(InvalidArgument) as caught:
        resolve(core="one:1", api_key=key)
    assert not key.strip() or key not in str(caught.value)


def test_a_folder_without_a_gateway_is_told_as_one(tmp_path):
    with pytest.raises(FailedPrecondition):
        resolve(state_dir=tmp_path)
    with pytest.raises(SandboxException):
        sandgate.Sandbox.create(state_dir=tmp_path)


@pytest.mark.parametrize("name", sandgate.__all__)
def test_every_offered_name_is_there(name):
    assert getattr(sandgate, name).__name__ == name


def test_a_name_that_is_not_offered_is_refused():
    with pytest.raises(AttributeError, match="Sandbux"):
        _ = sandgate.Sandbux
