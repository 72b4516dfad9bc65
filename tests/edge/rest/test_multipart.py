"""The form parser on literal bytes, cut at every position (RFC 7578, RFC 2046; behaviour D16, D30, D33)."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate_edge.rest.file_metadata import metadata_of
from sandgate_edge.rest.header_parameters import inline_disposition, parse_parameters, unescape_form_name
from sandgate_edge.rest.media_types import by_content, by_extension
from sandgate_edge.rest.multipart import MultipartParser, PartEnd, PartStart, boundary_of
from sandgate_errors import InvalidArgument

BODY = (
    b"preamble, ignored\r\n"
    b"--B\r\n"
    b'Content-Disposition: form-data; name="file"; filename="/home/user/a b.txt"\r\n'
    b"Content-Type: text/plain\r\n\r\n"
    b"hello\r\n--Bogus\r\n--B-\r\n--\r\n\r\n"
    b"\r\n--B \t\r\n"
    b'Content-Disposition: form-data; name="other"\r\n\r\n'
    b"\r\n--B\r\n"
    b'content-disposition: form-data; name="file"; filename="b"\r\n\r\n'
    b"\r"
    b"\r\n--B--\r\nepilogue --B\r\n"
)
PARTS = [
    (PartStart("file", "/home/user/a b.txt"), b"hello\r\n--Bogus\r\n--B-\r\n--\r\n\r\n"),
    (PartStart("other", None), b""),
    (PartStart("file", "b"), b"\r"),
]


def parsed(chunks, boundary=b"B"):
    parser = MultipartParser(boundary)
    parts = []
    for chunk in chunks:
        for event in parser.feed(chunk):
            if isinstance(event, PartStart):
                parts.append([event, b"", False])
            elif isinstance(event, PartEnd):
                parts[-1][2] = True
            else:
                assert event, "content events are never empty"
                assert not parts[-1][2]
                parts[-1][1] += event
    parser.end()
    assert all(ended for _, _, ended in parts)
    return [(start, content) for start, content, _ in parts]


@pytest.mark.parametrize("at", range(len(BODY) + 1))
def test_cut_at_every_position(at):
    assert parsed([BODY[:at], BODY[at:]]) == PARTS


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_cut_into_small_pieces(step):
    assert parsed(BODY[at : at + step] for at in range(0, len(BODY), step)) == PARTS


@given(
    st.lists(st.lists(st.sampled_from([b"\r", b"\n", b"--", b"-", b"B", b"\r\n--B", b"x"]), max_size=12)),
    st.integers(1, 9),
)
def test_any_content_comes_back(contents, step):
    contents = [b"".join(parts) for parts in contents]
    # A delimiter line in the content would be one: a client picks another boundary then.
    if any(b"\r\n--B\r\n" in b"\r\n%b\r\n" % content or b"\r\n--B--" in b"\r\n%b" % content for content in contents):
        return
    body = b"".join(b'--B\r\nContent-Disposition: form-data; name="f"\r\n\r\n%b\r\n' % content for content in contents)
    body += b"--B--"
    assert [content for _, content in parsed(body[at : at + step] for at in range(0, len(body), step))] == contents


def test_many_small_parts_in_one_piece_take_no_quadratic_time():
    body = b'--B\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' * 40_000 + b"--B--"
    started = time.monotonic()
    assert len(parsed([body])) == 40_000
    # Cutting the rest off for each part would move 45 GB. Seconds only guard against that.
    assert time.monotonic() - started < 20


def test_no_parts():
    assert parsed([b"--B--\r\n"]) == []


@pytest.mark.parametrize("at", range(BODY.rindex(b"--B--") + 4))
def test_a_body_that_ends_early_is_refused(at):
    with pytest.raises(InvalidArgument, match="ends too early"):
        parsed([BODY[:at]])


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Content-Type: text/plain",
        b"Content-Disposition: attachment; name=file",
        b"Content-Disposition: form-data",
        b'Content-Disposition: form-data; name="file',
        b'Content-Disposition: form-data; name="a"; name="b"',
        b"Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b",
        b"Content-Disposition: form-data;\r\n name=a",
        b"no colon",
        b": empty",
        b"Content-Disposition : form-data; name=a",
        b'Content-Disposition: form-data; name="\xff"',
        b"Content-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64",
        b"X: " + b"a" * 20_000,
    ],
)
def test_broken_part_headers_are_refused(headers):
    with pytest.raises(InvalidArgument):
        parsed([b"--B\r\n" + headers + b"\r\n\r\ncontent\r\n--B--"])


def test_headers_without_end_are_not_gathered():
    parser = MultipartParser(b"B")
    list(parser.feed(b"--B\r\n"))
    for _ in range(15):
        assert list(parser.feed(b"a" * 1024)) == []
    with pytest.raises(InvalidArgument, match="too long"):
        list(parser.feed(b"a" * 1024))


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_read_or_refused(chunks):
    try:
        parsed([b"--B\r\n", *chunks])
    except InvalidArgument:
        pass


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('filename="a.txt"', "a.txt"),
        ("filename=a.txt", "a.txt"),
        ("filename=/a/b.txt ", "/a/b.txt"),
        ('FileName="//x//y"', "//x//y"),
        ('filename="ünï 日本 🎉"', "ünï 日本 🎉"),
        ('filename="a%22b%0D%0Ac"', 'a"b\r\nc'),
        ('filename="a%09b%01%1F%7F"', "a\tb\x01\x1f%7F"),
        ('filename="%2209%%0A0D"', '"09%\n0D'),
        ('filename="100%25 %41 %zz %0a"', "100%25 %41 %zz %0a"),
        ('filename="a;b=c; d"', "a;b=c; d"),
        (r'filename="a\\b"', r"a\b"),
        (r'filename="a\b\"c"', r'a\b"c'),
        ("filename*=UTF-8''%2Fa%20%C3%BC", "/a ü"),
        ("filename=\"plain\"; filename*=utf-8'en'b%22", 'b"'),
        ('filename=""', ""),
        ('filename="  spaced  "', "  spaced  "),
        ("x=1", None),
    ],
)
def test_file_names(written, name):
    """envd.md 6.3 and D33."""
    header = f'Content-Disposition: form-data; name="file"; {written}'.encode()
    assert parsed([b"--B\r\n" + header + b"\r\n\r\n\r\n--B--"]) == [(PartStart("file", name), b"")]


@pytest.mark.parametrize("written", ["a*=x", "a*=utf-7''x", "a*=utf-8''%ff", 'a="', "a=b; a=c", "; =x", "a b=c"])
def test_parameters_that_can_be_read_in_two_ways_are_refused(written):
    with pytest.raises(InvalidArgument):
        parse_parameters("form-data; " + written)


@given(st.text())
def test_any_header_is_read_or_refused(text):
    try:
        parse_parameters(text)
    except InvalidArgument:
        pass


def test_content_types():
    assert parse_parameters('Multipart/Form-Data; boundary="a b"') == ("multipart/form-data", {"boundary": "a b"})
    assert parse_parameters("application/octet-stream") == ("application/octet-stream", {})
    assert parse_parameters("") == ("", {})
    assert boundary_of({"boundary": "x" * 256}) == b"x" * 256
    for boundary in ("", "x" * 257, "ü", "a\tb"):
        with pytest.raises(InvalidArgument, match="boundary"):
            boundary_of({"boundary": boundary})


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.txt", "inline; filename=a.txt"),
        ("a b.txt", 'inline; filename="a b.txt"'),
        ('a"b\\c', r'inline; filename="a\"b\\c"'),
        ("ü.txt", "inline; filename*=utf-8''%C3%BC.txt"),
        ("a\r\nX-Evil: 1", "inline; filename*=utf-8''a%0D%0AX-Evil%3A%201"),
        ("", 'inline; filename=""'),
    ],
)
def test_disposition_of_downloads(name, header):
    """D6."""
    assert inline_disposition(name) == header


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_disposition_reads_back_as_its_name(name):
    _, parameters = parse_parameters(inline_disposition(name))
    assert parameters.get("filename*", parameters.get("filename")) == name
    assert unescape_form_name("%22%0D%0A") == '"\r\n'


def test_metadata_headers():
    """D35: lower case, first value, other headers not looked at."""
    headers = [("X-Metadata-Author", "me"), ("x-metadata-author", "you"), ("X-Meta", "no"), ("X-METADATA-B", "")]
    assert metadata_of(_Pairs(headers)) == {"author": "me", "b": ""}


class _Pairs:
    """A header list with repeated names, as the server gives it."""

    def __init__(self, pairs):
        self._pairs = pairs

    def items(self):
        return self._pairs


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("", "x"),
        ("k" * 247, "x"),
        ("k", "ü"),
        ("k", "a\tb"),
        ("k", "\udcff"),
        ("k", "v" * 4087),
        ("k" * 246, "v" * 3842),
    ],
)
def test_metadata_beyond_its_limits_is_refused(key, value):
    with pytest.raises(InvalidArgument, match="metadata"):
        metadata_of({"X-Metadata-" + key: value})


def test_metadata_at_its_limits_is_taken():
    assert metadata_of({"X-Metadata-k": "v" * 4086})
    assert metadata_of({"X-Metadata-" + "k" * 246: "v" * 3841})


def test_media_types():
    """D7; a page is never guessed from content."""
    assert by_extension("a.TXT") == "text/plain; charset=utf-8"
    assert by_extension("a.png") == "image/png"
    assert by_extension("a.tar.gz") == "application/gzip"
    assert by_extension("noext") is None
    assert by_extension(".bashrc") is None
    assert by_content(b"\x89PNG\r\n\x1a\nrest") == "image/png"
    assert by_content(b"<html><script>") == "text/plain; charset=utf-8"
    assert by_content(b"") == "text/plain; charset=utf-8"
    assert by_content(bytes(range(256))) == "application/octet-stream"
