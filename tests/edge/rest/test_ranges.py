"""Range, conditions and encodings of downloads (RFC 9110; behaviour D7 to D10)."""

import gzip as reference
import random

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from sandgate_edge.rest.conditions import Verdict, check_conditions, http_date, is_conditional, range_holds
from sandgate_edge.rest.encodings import NoAcceptableEncoding, choose_encoding
from sandgate_edge.rest.gzip_stream import PIECE, Gunzip, Gzip
from sandgate_edge.rest.ranges import ByteRange, UnsatisfiableRange, parse_ranges
from sandgate_errors import InvalidArgument

MODIFIED = 1769860800
DATE, EARLIER, LATER = (http_date(MODIFIED + d) for d in (0, -1, 1))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", [(0, 1)]),
        ("bytes=0-", [(0, 100)]),
        ("bytes=10-19", [(10, 10)]),
        ("bytes=90-1000", [(90, 10)]),
        ("bytes=-5", [(95, 5)]),
        ("bytes=-500", [(0, 100)]),
        ("Bytes = 1-2 , 5-6,", [(1, 2), (5, 2)]),
        ("bytes=5-6,200-", [(5, 2)]),
        ("bytes=" + "9" * 18 + "-,0-0", [(0, 1)]),
        # Overlapping to more than the file, or far too many: the whole file instead.
        ("bytes=0-,0-", []),
        ("bytes=" + ",".join(["0-0"] * 33), []),
        ("lines=1-2", []),
    ],
)
def test_ranges(header, expected):
    assert parse_ranges(header, 100) == [ByteRange(*pair) for pair in expected]


@pytest.mark.parametrize(
    "header",
    [
        "bytes=100-",
        "bytes=100-200,300-",
        "bytes=-0",
        "bytes=5-4",
        "bytes=x",
        "bytes=",
        "bytes=-",
        "bytes=1-2-3",
        "bytes=--1",
    ],
)
def test_unsatisfiable_ranges(header):
    with pytest.raises(UnsatisfiableRange):
        parse_ranges(header, 100)


def test_an_empty_file_is_sent_whole():
    assert parse_ranges("bytes=0-5", 0) == []


@given(st.text(alphabet="bytes=0123456789-, x"), st.integers(1, 50))
def test_any_range_lies_within_the_file(text, size):
    try:
        ranges = parse_ranges("bytes=" + text, size)
    except UnsatisfiableRange:
        return
    for found in ranges:
        assert 0 <= found.start < size
        assert 1 <= found.length <= size - found.start


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ({}, Verdict.SEND),
        ({"If-Modified-Since": DATE}, Verdict.NOT_MODIFIED),
        ({"If-Modified-Since": LATER}, Verdict.NOT_MODIFIED),
        ({"If-Modified-Since": EARLIER}, Verdict.SEND),
        ({"If-Modified-Since": "never"}, Verdict.SEND),
        ({"If-Unmodified-Since": DATE}, Verdict.SEND),
        ({"If-Unmodified-Since": EARLIER}, Verdict.FAILED),
        ({"If-None-Match": "*"}, Verdict.NOT_MODIFIED),
        ({"If-None-Match": '"tag"', "If-Modified-Since": DATE}, Verdict.SEND),
        ({"If-Match": "*"}, Verdict.SEND),
        ({"If-Match": '"tag"'}, Verdict.FAILED),
    ],
)
def test_conditions(headers, verdict):
    request = make_mocked_request("GET", "/files", headers=headers)
    assert check_conditions(request, MODIFIED) is verdict
    assert is_conditional(request) is bool(headers)


@pytest.mark.parametrize(
    ("if_range", "holds"),
    [(None, True), (DATE, True), (EARLIER, False), (LATER, False), ('"tag"', False), ("?", False)],
)
def test_if_range_holds_for_the_exact_date_only(if_range, holds):
    request = make_mocked_request("GET", "/files", headers={} if if_range is None else {"If-Range": if_range})
    assert range_holds(request, MODIFIED) is holds


def test_times_that_no_calendar_shows_have_no_date():
    assert http_date(10**16) is None
    assert http_date(-(10**16)) is None


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("GZip ; Q=0.5", "gzip"),
        ("x-gzip", "gzip"),
        ("*", "gzip"),
        ("br, zstd", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=nonsense", "identity"),
        ("*;q=0, gzip", "gzip"),
        ("identity;q=0, gzip;q=0.1", "gzip"),
        ("gzip;q=0.5, identity", "identity"),
        ("gzip;q=0.5, identity;q=0.5", "gzip"),
        ("identity;q=0.2, gzip;q=0.1", "identity"),
        ("*;q=0, identity;q=0.5", "identity"),
    ],
)
def test_quality_values(header, encoding):
    """D9."""
    assert choose_encoding(header) == encoding


@pytest.mark.parametrize("header", ["identity;q=0", "*;q=0", "identity;q=0, gzip;q=0", "br, identity;q=0.0"])
def test_nothing_acceptable(header):
    with pytest.raises(NoAcceptableEncoding):
        choose_encoding(header)


def packed(pieces):
    stream = Gzip()
    return b"".join([stream.header(), *(stream.piece(piece) for piece in pieces), stream.end()])


@given(st.lists(st.binary(max_size=2000)))
def test_pieces_make_one_gzip_member(pieces):
    assert reference.decompress(packed(pieces)) == b"".join(pieces)


def test_what_does_not_shrink_is_stored_and_what_does_is_not():
    noise = [random.Random(n).randbytes(PIECE) for n in range(20)]
    text = [b"all work and no play " * 10_000] * 20
    content = [*noise, *text]
    result = packed(content)
    assert reference.decompress(result) == b"".join(content)
    assert sum(map(len, noise)) < len(result) < sum(map(len, noise)) * 1.001 + sum(map(len, text))
    assert len(packed(text)) < sum(map(len, text)) / 20


def gunzipped(chunks):
    stream = Gunzip()
    pieces = [piece for chunk in chunks for piece in stream.feed(chunk)]
    stream.end()
    assert all(0 < len(piece) <= PIECE for piece in pieces)
    return b"".join(pieces)


@given(st.binary(max_size=3000), st.integers(1, 50))
def test_gzip_is_undone_however_it_is_cut(content, step):
    body = reference.compress(content) + reference.compress(content)
    assert gunzipped(body[at : at + step] for at in range(0, len(body), step)) == content * 2


def test_a_bomb_comes_out_in_bounded_pieces():
    content = bytes(50 * 1024 * 1024)
    assert gunzipped([reference.compress(content)]) == content


@pytest.mark.parametrize("cut", [1, 5, 12, -1, -4, -8, -9])
def test_cut_off_gzip_is_not_taken_for_whole(cut):
    body = reference.compress(b"content" * 100)
    with pytest.raises(InvalidArgument, match="gzip"):
        gunzipped([body[:cut]])


@pytest.mark.parametrize(
    "damage", [lambda b: b"plain text", lambda b: b + b"junk", lambda b: b[:-6] + b"\0" * 6, lambda b: b""]
)
def test_what_is_not_gzip_is_refused(damage):
    with pytest.raises(InvalidArgument, match="gzip"):
        gunzipped([damage(reference.compress(b"content" * 100))])
