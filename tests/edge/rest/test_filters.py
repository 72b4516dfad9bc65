"""The list routes' query: the metadata filter of rest.md 4.4 and behaviour C17 to C21."""

from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_edge.rest.filters import list_request, parse_limit, parse_metadata, parse_states, parse_time
from sandgate_edge.rest.query import parse
from sandgate_errors import InvalidArgument

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def python_way(pairs):
    """As the Python SDKs do it: quote leaves `/`, the form and the query layer do not."""
    form = urlencode({quote(key): quote(value) for key, value in pairs.items()})
    return urlencode({"metadata": form})


def javascript_way(pairs):
    """encodeURIComponent for the parts, URLSearchParams for the form, encodeURIComponent for the query value."""
    form = urlencode({quote(k, safe="!'()*~"): quote(v, safe="!'()*~") for k, v in pairs.items()}, safe="*")
    return "metadata=" + quote(form, safe="!'()*~")


def decoded(raw):
    return parse_metadata(parse(raw)["metadata"][0])


@pytest.mark.parametrize(
    "raw",
    [
        "metadata=a%252520b%252Fc%3Dx%252526%25253Dy",
        "metadata=a%252520b%25252Fc%3Dx%252526%25253Dy",
    ],
)
def test_python_and_javascript_vectors_name_the_same_pair(raw):
    assert decoded(raw) == {"a b/c": "x&=y"}


def test_vector_of_behaviour_16():
    assert decoded("metadata=a%252520b%3Dc%252526d%25253D%2525C3%2525A9%26k%3Dv") == {"a b": "c&d=é", "k": "v"}


@given(st.dictionaries(TEXT, TEXT, min_size=1))
def test_any_pairs_survive_both_encodings(pairs):
    assert decoded(python_way(pairs)) == pairs
    assert decoded(javascript_way(pairs)) == pairs


def test_no_pairs_filter_nothing():
    assert parse_metadata("") == {}
    assert decoded(python_way({})) == {}


@pytest.mark.parametrize(
    "value", ["a", "a=b&c", "a=b=c", "=b=", "a=b&", "&", "a=%zz", "a=%", "a=%ff", "a=b&a=c", "a=%00"]
)
def test_malformed_filters_are_refused(value):
    """C21: a part without exactly one `=`, and whatever no client can have written."""
    with pytest.raises(InvalidArgument, match="metadata"):
        parse_metadata(value)


@given(st.text())
def test_any_filter_text_is_read_or_refused(value):
    try:
        parse_metadata(value)
    except InvalidArgument:
        pass


@pytest.mark.parametrize(("value", "limit"), [("1", 1), ("100", 100), ("101", 100), ("1000", 100), ("9" * 900, 100)])
def test_limits_are_cut_to_a_page(value, limit):
    assert parse_limit(value) == limit


@pytest.mark.parametrize("value", ["0", "-1", "", "x", "1.5", "1e2", " 1", "0x1", "٣", "9" * 5000])
def test_limits_below_one_or_not_numbers_are_refused(value):
    with pytest.raises(InvalidArgument, match="limit"):
        parse_limit(value)


def test_states():
    running, paused = sandboxes_pb2.SANDBOX_STATE_RUNNING, sandboxes_pb2.SANDBOX_STATE_PAUSED
    assert parse_states("running,paused,running") == [running, paused]
    assert parse_states("") == []
    for value in ("creating", "running,killed", "Running"):
        with pytest.raises(InvalidArgument, match="state"):
            parse_states(value)


@pytest.mark.parametrize(
    ("text", "seconds", "nanos"),
    [
        ("2026-01-31T12:00:00Z", 1769860800, 0),
        ("2026-01-31T12:00:00.123Z", 1769860800, 123_000_000),
        ("2026-01-31T14:00:00.123456+02:00", 1769860800, 123_456_000),
        ("2026-01-31T14:00:00 02:00", 1769860800, 0),
        ("2026-01-31t06:30:00-05:30", 1769860800, 0),
        ("2026-01-31T12:00:00.1234567899999Z", 1769860800, 123_456_789),
        ("1969-12-31T23:59:59.5Z", -1, 500_000_000),
    ],
)
def test_times_with_offsets(text, seconds, nanos):
    moment = parse_time(text)
    assert (moment.seconds, moment.nanos) == (seconds, nanos)


@pytest.mark.parametrize(
    "text",
    [
        "yesterday",
        "2026-01-31",
        "2026-01-31T12:00:00",
        "2026-02-30T12:00:00Z",
        "2026-01-31T25:00:00Z",
        "2026-01-31T12:00:00+25:00",
        "2026-01-31T12:00:00+01:60",
        "0001-01-01T00:00:00+10:00",
        "9999-12-31T23:59:59-10:00",
        "٢026-01-31T12:00:00Z",
        "2026-01-31T12:00:00Zjunk",
    ],
)
def test_other_times_are_refused(text):
    with pytest.raises(InvalidArgument, match="startedAfter"):
        parse_time(text)


def test_a_whole_query():
    request = list_request(
        parse(
            "state=running&state=paused&limit=7&nextToken=a%26b&order=asc&template=base&startedAfter=2026-01-31T12:00:00%2B00:00"
        )
    )
    assert request.page_size == 7
    assert request.page_token == "a&b"
    assert request.order == sandboxes_pb2.ORDER_ASC
    assert request.template == "base"
    assert len(request.states) == 2
    assert request.started_after.seconds == 1769860800


def test_an_empty_query_asks_for_everything_newest_first():
    request = list_request({})
    assert request.page_size == 100
    assert request.order == sandboxes_pb2.ORDER_DESC
    assert not request.states
    assert not request.HasField("started_after")


@pytest.mark.parametrize("raw", ["order=up", "nextToken=%00", "template=a%00", "x=%ff", "&".join(["a=1"] * 101)])
def test_bad_queries_are_refused(raw):
    with pytest.raises(InvalidArgument):
        list_request(parse(raw))


def test_bytes_that_are_no_utf8_are_refused_unescaped_too():
    with pytest.raises(InvalidArgument, match="UTF-8"):
        parse(b"path=\xff".decode(errors="surrogateescape"))
    assert parse("path=é") == {"path": ["é"]}
