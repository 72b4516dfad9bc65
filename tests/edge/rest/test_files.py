"""``/files`` over HTTP, against the real agent (behaviour 9 and 11; envd.md 6; traps B26, B28, B29)."""

import asyncio
import gzip
import io
import json
import os
import random
import time
import urllib.parse
import zlib
from email.utils import formatdate
from pathlib import Path

import aiohttp
import pytest

from sandgate_edge.rest.access import signature_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = "i" + "0" * 20
BIG = random.Random(1).randbytes(3 * 1024 * 1024 + 17)
NAMES = ["a b.txt", 'quo"te', "100%", "%41%zz", "a+b", "ünï 日本 🎉", "semi;colon", "back\\slash", "-", "…"]


def form(*parts, boundary="b0undary"):
    """A body as the SDKs write it: raw UTF-8, only quote and line ends escaped. Parts are (name, file name, content)."""
    body = b""
    for name, filename, content in parts:
        escaped = filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{escaped}"\r\n'.encode()
        body += b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


async def post_form(edge, box, *parts, path=None, body=None, **options):
    headers = {"Content-Type": "multipart/form-data; boundary=b0undary", **options.pop("headers", {})}
    data = io.BytesIO(form(*parts) if body is None else body)
    async with edge.files("POST", box, path=path, headers=headers, data=data, **options) as answer:
        return answer.status, await answer.json()


async def chunks(*pieces):
    for piece in pieces:
        yield piece


# Content


@pytest.mark.parametrize("content", [b"", b"hello", bytes(range(256)) * 4096, BIG], ids=len)
async def test_content_comes_back_byte_for_byte(edge, box, content):
    """D11, D34; trap B26: whatever the encoding of the way back."""
    status, reply = await edge.write(box, "dir/content", io.BytesIO(content))
    home = edge.home(box)
    assert (status, reply) == (200, [{"name": "content", "path": f"{home}/dir/content", "type": "file"}])
    assert (home / "dir/content").read_bytes() == content
    status, body, headers = await edge.read(box, "dir/content")
    assert (status, body) == (200, content)
    assert headers["Content-Length"] == str(len(content))
    assert headers["Accept-Ranges"] == "bytes"
    assert headers["Vary"] == "Accept-Encoding"
    assert "ETag" not in headers
    status, body, headers = await edge.read(box, "dir/content", headers={"Accept-Encoding": "gzip, deflate"})
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Content-Type"] == "application/octet-stream"
    assert "Content-Length" not in headers
    assert gzip.decompress(body) == content


async def test_chunked_upload_without_a_length(edge, box):
    """Trap B35's last line: text-mode file objects are sent that way."""
    status, _ = await edge.write(box, "chunked", chunks(b"a", b"b" * 100_000, b"c"))
    assert status == 200
    assert (await edge.read(box, "chunked"))[1] == b"a" + b"b" * 100_000 + b"c"


async def test_one_great_chunk_is_no_great_message(edge, box):
    content = bytes(12 * 1024 * 1024)
    assert (await edge.write(box, "zeros", io.BytesIO(content)))[0] == 200
    _, body, _ = await edge.read(box, "zeros", headers={"Accept-Encoding": "gzip"})
    assert len(body) < len(content) / 100
    assert gzip.decompress(body) == content


@pytest.mark.parametrize("name", NAMES)
async def test_names_work_as_path_and_as_part_name(edge, box, name):
    """D33."""
    path = f"{edge.home(box)}/names/{name}"
    assert (await edge.write(box, path, b"by path"))[1] == [{"name": name, "path": path, "type": "file"}]
    status, reply = await post_form(edge, box, ("file", path, b"by part"))
    assert (status, reply) == (200, [{"name": name, "path": path, "type": "file"}])
    status, body, headers = await edge.read(box, path)
    assert (status, body) == (200, b"by part")
    assert headers["Content-Disposition"].startswith("inline; filename")


async def test_uploads_at_once_into_one_new_directory(edge, box):
    """D32; trap B28."""
    answers = await asyncio.gather(*(edge.write(box, f"p/{n % 5}/x/y/{n}", str(n).encode()) for n in range(40)))
    assert {status for status, _ in answers} == {200}
    assert (edge.home(box) / "p/0/x/y/35").read_text() == "35"


async def test_an_existing_file_is_replaced_in_place(edge, box):
    """D24: a hard link sees it, and nothing of a longer predecessor stays."""
    await edge.write(box, "old", b"long content")
    os.link(edge.home(box) / "old", edge.home(box) / "link")
    await edge.write(box, "old", b"new")
    assert (edge.home(box) / "link").read_bytes() == b"new"


# Forms


async def test_several_files_in_their_order(edge, box):
    """D16, D20: only parts named `file` count; D4: paths are absolute, relative or below the home."""
    home = edge.home(box)
    status, reply = await post_form(
        edge, box, ("file", f"{home}/m/2", b"two"), ("note", "x", b"no"), ("file", "m/1", b""), ("file", "~/m/3", BIG)
    )
    assert status == 200
    assert reply == [{"name": n, "path": f"{home}/m/{n}", "type": "file"} for n in ("2", "1", "3")]
    assert (home / "m/2").read_bytes() == b"two"
    assert (home / "m/1").read_bytes() == b""
    assert (home / "m/3").read_bytes() == BIG
    assert not (home / "x").exists()


async def test_the_path_wins_over_the_part_name(edge, box):
    status, reply = await post_form(edge, box, ("file", "/elsewhere", b"x"), path="won")
    assert (status, reply[0]["path"]) == (200, f"{edge.home(box)}/won")


@pytest.mark.parametrize("second", ["twice", "./twice", "~/twice", "{home}/twice", "{home}/./x/../twice"])
async def test_the_same_destination_twice(edge, box, second):
    """D27: the first stays written, however the second is spelt."""
    second = second.format(home=edge.home(box))
    status, error = await post_form(edge, box, ("file", "twice", b"first"), ("file", second, b"second"))
    assert (status, error["code"]) == (400, 400)
    assert (edge.home(box) / "twice").read_bytes() == b"first"


async def test_a_path_with_two_parts_is_the_same_destination(edge, box):
    assert (await post_form(edge, box, ("file", "a", b"1"), ("file", "b", b"2"), path="both"))[0] == 400
    assert (edge.home(box) / "both").read_bytes() == b"1"


async def test_files_before_a_failure_stay(edge, box):
    """D28."""
    status, error = await post_form(edge, box, ("file", "stays", b"1"), ("file", ".", b"2"), ("file", "never", b"3"))
    assert status == 400
    assert "is a directory" in error["message"]
    assert (edge.home(box) / "stays").exists()
    assert not (edge.home(box) / "never").exists()


async def test_no_file_part_is_an_empty_list(edge, box):
    """D21."""
    assert await post_form(edge, box) == (200, [])
    assert await post_form(edge, box, ("other", "x", b"y")) == (200, [])
    status, error = await post_form(edge, box, query={"username": "nobody-here"})
    assert (status, error["code"]) == (401, 401)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not a form",
        form(("file", "cut", b"content"))[:-15],
        form(("file", "cut", b"content"))[:40],
        b"--b0undary\r\nContent-Disposition: form-data; name=file\r\n\r\nno name\r\n--b0undary--",
        b"--b0undary\r\n" + b"X" * 100_000,
    ],
)
async def test_broken_forms(edge, box, body):
    """D30."""
    status, error = await post_form(edge, box, body=body)
    assert (status, error["code"]) == (400, 400)
    assert set(error) == {"code", "message"}


@pytest.mark.parametrize(
    ("content_type", "path"),
    [
        ("application/octet-stream", None),
        ("application/octet-stream", ""),
        ("application/json", "x"),
        ("", "x"),
        ("multipart/mixed; boundary=b", "x"),
        ("multipart/form-data", "x"),
        ('multipart/form-data; boundary="', "x"),
    ],
)
async def test_content_types_that_are_not_accepted(edge, box, content_type, path):
    """D17, D18."""
    headers = {"Content-Type": content_type}
    skip = () if content_type else ("Content-Type",)
    async with edge.files("POST", box, path=path, headers=headers, data=b"x", skip_auto_headers=skip) as answer:
        assert answer.status == 400
        assert set(await answer.json()) == {"code", "message"}


# Encodings of uploads


@pytest.mark.parametrize("content", [b"", b"hello", BIG, bytes(20_000_000)], ids=len)
async def test_gzip_of_uploads_is_undone(edge, box, content):
    """D19, both forms."""
    headers = {"Content-Encoding": "gzip"}
    status, _ = await edge.write(box, "unzipped", io.BytesIO(gzip.compress(content, 1)), headers=headers)
    assert status == 200
    assert (edge.home(box) / "unzipped").read_bytes() == content
    body = gzip.compress(form(("file", "unzipped2", content)), 1)
    assert (await post_form(edge, box, body=body, headers=headers))[0] == 200
    assert (edge.home(box) / "unzipped2").read_bytes() == content


async def test_what_is_not_gzip_is_refused(edge, box):
    body = b"this is no gzip"
    status, error = await edge.write(box, "broken", io.BytesIO(body), headers={"Content-Encoding": "gzip"})
    assert (status, error["code"]) == (400, 400)


async def test_gzip_of_several_members_is_undone(edge, box):
    """RFC 1952 2.2: what `cat a.gz b.gz` makes."""
    body = gzip.compress(b"first ") + gzip.compress(b"second")
    assert (await edge.write(box, "members", io.BytesIO(body), headers={"Content-Encoding": "gzip"}))[0] == 200
    assert (edge.home(box) / "members").read_bytes() == b"first second"


@pytest.mark.parametrize("cut", [1, -1, -5, -12])
async def test_cut_off_gzip_is_refused(edge, box, cut):
    body = gzip.compress(BIG[:10_000])[:cut]
    status, error = await edge.write(box, "cut", io.BytesIO(body), headers={"Content-Encoding": "gzip"})
    assert (status, error["code"]) == (400, 400)


@pytest.mark.parametrize("at", [0, 2, 3, 200, -8, -1])
async def test_damaged_gzip_is_refused(edge, box, at):
    """In its head, its data, its checksum, its length."""
    body = bytearray(gzip.compress(BIG[:10_000]))
    body[at] ^= 0xFF
    status, error = await edge.write(box, "damaged", io.BytesIO(body), headers={"Content-Encoding": "gzip"})
    assert (status, error["code"]) == (400, 400)


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_refused(edge, box, encoding):
    body = zlib.compress(b"x")
    status, error = await edge.write(box, "other", io.BytesIO(body), headers={"Content-Encoding": encoding})
    assert (status, error["code"]) == (400, 400)


# Metadata


async def test_metadata_is_stored_and_returned(edge, box):
    """D20, D35, D36: where the file system keeps none, none is told."""
    status, reply = await edge.write(
        box, "meta", b"x", headers={"X-Metadata-Author": "me", "x-metadata-b": "two words"}
    )
    assert status == 200
    assert reply[0].get("metadata") in ({"author": "me", "b": "two words"}, None)


@pytest.mark.parametrize(
    "headers", [{"X-Metadata-" + "k" * 247: "x"}, {"X-Metadata-A": "ü"}, {"X-Metadata-A": "v" * 4096}]
)
async def test_metadata_beyond_its_limits(edge, box, headers):
    assert (await edge.write(box, "meta2", b"x", headers=headers))[0] == 400
    assert not (edge.home(box) / "meta2").exists()


# Downloads


@pytest.mark.parametrize(
    ("ranges", "content_range", "expected"),
    [
        ("bytes=0-4", "bytes 0-4/3145745", BIG[:5]),
        ("bytes=3145740-", "bytes 3145740-3145744/3145745", BIG[-5:]),
        ("bytes=-7", "bytes 3145738-3145744/3145745", BIG[-7:]),
        ("bytes=1000-1500000", "bytes 1000-1500000/3145745", BIG[1000:1500001]),
        ("bytes=5-99999999", "bytes 5-3145744/3145745", BIG[5:]),
    ],
)
async def test_one_range(edge, box, ranges, content_range, expected):
    """D7, D10: plain, though gzip is allowed."""
    await edge.write(box, "big", io.BytesIO(BIG))
    status, body, headers = await edge.read(box, "big", headers={"Range": ranges, "Accept-Encoding": "gzip"})
    assert (status, headers["Content-Range"]) == (206, content_range)
    assert body == expected
    assert headers["Content-Length"] == str(len(expected))
    assert "Content-Encoding" not in headers


async def test_several_ranges(edge, box):
    await edge.write(box, "digits.txt", b"0123456789")
    status, body, headers = await edge.read(box, "digits.txt", headers={"Range": "bytes=0-1,-2"})
    assert status == 206
    kind, _, boundary = headers["Content-Type"].partition("; boundary=")
    assert kind == "multipart/byteranges"
    head = "\r\n--{}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Range: bytes {}/10\r\n\r\n{}"
    parts = head.format(boundary, "0-1", "01") + head.format(boundary, "8-9", "89")
    assert body.decode() == f"{parts}\r\n--{boundary}--\r\n"
    assert headers["Content-Length"] == str(len(body))


async def test_ranges_that_cannot_be_satisfied(edge, box):
    await edge.write(box, "short", b"0123456789")
    status, body, headers = await edge.read(box, "short", headers={"Range": "bytes=10-"})
    assert (status, headers["Content-Range"]) == (416, "bytes */10")
    assert json.loads(body)["code"] == 416
    assert (await edge.read(box, "short", headers={"Range": "lines=1-2"}))[:2] == (200, b"0123456789")
    await edge.write(box, "empty", b"")
    assert (await edge.read(box, "empty", headers={"Range": "bytes=0-5"}))[:2] == (200, b"")


async def test_conditions_by_date(edge, box):
    await edge.write(box, "dated", b"0123456789")
    os.utime(edge.home(box) / "dated", (1769860800.5, 1769860800.5))
    date, earlier = formatdate(1769860800, usegmt=True), formatdate(1769860799, usegmt=True)
    assert (await edge.read(box, "dated"))[2]["Last-Modified"] == date

    async def status(**headers):
        return (await edge.read(box, "dated", headers={k.replace("_", "-"): v for k, v in headers.items()}))[0]

    assert await status(If_Modified_Since=date) == 304
    assert await status(If_Modified_Since=date, Range="bytes=0-1") == 304
    assert await status(If_Modified_Since=earlier, Accept_Encoding="gzip") == 200
    assert await status(If_Unmodified_Since=earlier) == 412
    assert await status(If_Range=date, Range="bytes=0-1") == 206
    assert await status(If_Range=earlier, Range="bytes=0-1") == 200


async def test_a_file_from_a_time_no_calendar_shows(edge, box):
    await edge.write(box, "ancient", b"x")
    os.utime(edge.home(box) / "ancient", (0, -(2**33)))
    assert (await edge.read(box, "ancient"))[0] == 200


@pytest.mark.parametrize(
    ("accepted", "status", "encoding"),
    [("gzip;q=0", 200, None), ("identity;q=0", 406, None), ("*;q=0", 406, None), ("identity;q=0, gzip", 200, "gzip")],
)
async def test_quality_values(edge, box, accepted, status, encoding):
    """D9."""
    await edge.write(box, "quality", b"x")
    found, body, headers = await edge.read(box, "quality", headers={"Accept-Encoding": accepted})
    assert (found, headers.get("Content-Encoding")) == (status, encoding)
    if status == 406:
        assert set(json.loads(body)) == {"code", "message"}


@pytest.mark.parametrize("accepted", ["identity", "gzip"])
@pytest.mark.parametrize("path", ["/proc/sys/kernel/random/boot_id", "/sys/kernel/mm/transparent_hugepage/enabled"])
async def test_virtual_files_are_read_to_their_end(edge, box, path, accepted):
    """D12; in /sys the reported size is too large instead of 0."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        pytest.skip("this kernel has no such file")
    status, body, _ = await edge.read(box, path, headers={"Accept-Encoding": accepted})
    assert status == 200
    assert (gzip.decompress(body) if accepted == "gzip" else body) == content


async def test_a_large_virtual_file_has_no_length(edge, box):
    status, body, headers = await edge.read(box, "/proc/kallsyms")
    assert status == 200
    assert len(body) > 256 * 1024
    assert "Content-Length" not in headers


async def test_content_types_of_downloads(edge, box):
    for name, content, expected in (
        ("page.html", b"x", "text/html; charset=utf-8"),
        ("data.json", b"{}", "application/json"),
        ("README", b"text", "text/plain; charset=utf-8"),
        ("blob", b"\0\1", "application/octet-stream"),
    ):
        await edge.write(box, name, content)
        assert (await edge.read(box, name))[2]["Content-Type"] == expected
        assert (await edge.read(box, name, headers={"Range": "bytes=0-0"}))[2]["Content-Type"] == expected


async def test_missing_files_and_other_things(edge, box):
    """D3, D4, D5, D14; trap B29."""
    home = edge.home(box)
    os.mkfifo(home / "pipe")
    (home / "loop").symlink_to("loop")
    for accept in ("identity", "gzip"):
        for path, status, message in (
            ("demo/test.txt", 404, f"path '{home}/demo/test.txt' does not exist"),
            (".", 400, f"path '{home}' is a directory"),
            (None, 400, f"path '{home}' is a directory"),
            ("", 400, f"path '{home}' is a directory"),
            ("a\0b", 400, None),
            ("x" * 5000, 400, None),
            ("~nobody/x", 400, None),
        ):
            found, body, headers = await edge.read(box, path, headers={"Accept-Encoding": accept})
            error = json.loads(body)
            assert found == status
            assert error == {"code": status, "message": message or error["message"]}
            assert headers["Content-Type"] == "application/json; charset=utf-8"
        for path in ("pipe", "/dev/zero", "loop"):
            assert (await edge.read(box, path, headers={"Accept-Encoding": accept}))[0] >= 400
    (home / "file").write_text("x")
    assert (await edge.write(box, "file/below", b"x"))[0] == 500
    assert (await edge.write(box, ".", b"x"))[0] == 400
    assert (await edge.write(box, "pipe", b"x"))[0] >= 400


async def test_final_links_are_followed(edge, box):
    """D13, D25."""
    (edge.home(box) / "target").write_text("old")
    (edge.home(box) / "alias").symlink_to("target")
    assert (await edge.write(box, "alias", b"new"))[0] == 200
    assert (edge.home(box) / "alias").is_symlink()
    assert (await edge.read(box, "alias"))[1] == b"new"


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH"])
async def test_other_methods(edge, box, method):
    """D15."""
    async with edge.files(method, box, path="x") as answer:
        assert answer.status == 405
        assert method == "HEAD" or (await answer.json())["code"] == 405


# Access


async def test_a_token_in_the_header_decides_alone(edge, box):
    """S1, S4: a good signature does not save a wrong token."""
    await edge.write(box, "secret", b"x")
    token = box["envdAccessToken"]
    good = {"signature": signature_of(path="secret", operation="read", user="", token=token, expiration=None)}
    assert (await edge.read(box, "secret", token=False, query=good))[0] == 200
    for wrong in ("", "x", token[:-1], token + "x", "ü"):
        status, body, _ = await edge.read(box, "secret", query=good, headers={"X-Access-Token": wrong})
        assert (status, json.loads(body)["code"]) == (401, 401)


async def test_signatures(edge, box):
    """D1, S4 to S7, S11: what the query may say, messages, order, and what a signature is for."""
    token = box["envdAccessToken"]
    other = (await edge.create())["envdAccessToken"]
    now = int(time.time())

    async def outcome(method="GET", *, path="a b", user=None, expiration=None, secret=token, operation="read", **query):
        signature = signature_of(path=path, operation=operation, user=user or "", token=secret, expiration=expiration)
        query = {"signature": signature, **({"username": user} if user else {}), **query}
        if expiration is not None:
            query.setdefault("signature_expiration", str(expiration))
        headers = {"Content-Type": "application/octet-stream"}
        options = {"path": path, "query": query, "token": False, "headers": headers}
        async with edge.files(method, box, data=b"x" if method == "POST" else None, **options) as answer:
            return answer.status if answer.status == 200 else (await answer.json())["message"]

    assert await outcome("POST", operation="write") == 200
    assert await outcome() == 200
    assert await outcome(user="user", expiration=now + 100) == 200
    assert await outcome(expiration=now - 100) == "signature is already expired"
    assert await outcome(expiration=now - 100, secret=other) == "invalid signature"
    assert await outcome("POST") == "invalid signature"
    assert await outcome(secret=other) == "invalid signature"
    assert await outcome(signature_expiration="x") == "invalid signature"
    status, body, _ = await edge.read(box, "a b", token=False)
    assert (status, json.loads(body)) == (401, {"code": 401, "message": "missing signature query parameter"})


async def test_signed_urls_need_no_header(edge, box):
    """S8: what names the sandbox is whose token it was signed with. Two sandboxes with the same file are told apart."""
    other = await edge.create()

    def url(of, operation, path, *, expiration=None, **extra):
        signature = signature_of(
            path=path, operation=operation, user="", token=of["envdAccessToken"], expiration=expiration
        )
        query = {"path": path, "signature": signature, **extra}
        if expiration is not None:
            query["signature_expiration"] = str(expiration)
        return edge.url + "/files?" + urllib.parse.urlencode({key: value for key, value in query.items() if value})

    for of, content in ((box, b"of the first"), (other, b"of the second")):
        form = aiohttp.FormData({"file": io.BytesIO(content)})
        async with edge.session.post(url(of, "write", "signed é", expiration=2**40), data=form) as answer:
            assert answer.status == 200, await answer.text()
    for of, content in ((box, b"of the first"), (other, b"of the second")):
        headers = {"Accept-Encoding": "identity"}
        async with edge.session.get(url(of, "read", "signed é"), headers=headers) as answer:
            assert (answer.status, await answer.read()) == (200, content)
    # JS signs the empty path when none is given, and the name in the form decides.
    form = aiohttp.FormData()
    form.add_field("file", b"x", filename="named-by-form")
    async with edge.session.post(url(other, "write", ""), data=form) as answer:
        assert answer.status == 200, await answer.text()
    assert (edge.home(other) / "named-by-form").exists()

    async def refusal(address, **headers):
        async with edge.session.get(address, headers=headers) as answer:
            return answer.status, (await answer.json())["message"]

    assert await refusal(url(box, "read", "f", expiration=1)) == (401, "signature is already expired")
    assert await refusal(url(box, "write", "f")) == (401, "invalid signature")
    assert await refusal(url({"envdAccessToken": "no such token"}, "read", "f")) == (401, "invalid signature")
    assert await refusal(url(box, "read", "f", username="root")) == (401, "invalid signature")
    good = url(box, "read", "f")
    for bad in ("v1_x", "x", "v2_" + good.partition("v1_")[2], "v1_%C3%A9", good.partition("v1_")[2]):
        assert await refusal(f"{edge.url}/files?path=f&signature={bad}") == (401, "invalid signature")
    # A token decides alone (S4), which sandbox it is too.
    assert (await refusal(good, **{"X-Access-Token": other["envdAccessToken"]}))[0] == 404
    assert (await refusal(good, **{"X-Access-Token": "no such token"}))[0] == 401
    assert (await refusal(f"{edge.url}/files?path=f"))[0] == 400


async def test_an_unsecured_sandbox_checks_nothing(edge):
    """S2."""
    _, box, _ = await edge.rest("POST", "/sandboxes", {"templateID": "base", "timeout": 60})
    for headers, query in (({}, {}), ({"X-Access-Token": "any"}, {}), ({}, {"signature": "any"})):
        assert (await edge.write(box, "open", b"x", headers=headers, query=query))[0] == 200


@pytest.mark.parametrize("user", ["nobody-here", "x" * 300, "x" * 4000, "a\0b", "ü"])
async def test_unknown_users(edge, box, user):
    """U3; D2: before the path is looked at."""
    for path in ("x", "a\0b"):
        status, body, _ = await edge.read(box, path, query={"username": user})
        assert (status, json.loads(body)["code"]) == (401, 401)
    assert (await edge.write(box, "x", b"x", query={"username": user}))[0] == 401


async def test_the_sandbox_must_be_named_and_there(edge, box):
    """R3, R4; the rest of the contract's answers are the frame's tests."""
    async with edge.session.get(edge.url + "/files?path=x") as answer:
        assert answer.status == 400
        assert set(await answer.json()) == {"code", "message"}
    status, body, _ = await edge.read({"sandboxID": UNKNOWN}, "x")
    assert (status, json.loads(body)) == (
        502,
        {"sandboxId": UNKNOWN, "message": "The sandbox was not found", "code": 502},
    )


# Broken ways


async def test_a_refused_client_sees_the_answer_and_the_connection_serves_on(edge, box):
    """Not a reset, although most of the body was not wanted."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for _ in range(2):
            async with session.post(
                edge.url + "/files?path=x", data=io.BytesIO(bytes(30_000_000)), headers={"Content-Type": "text/plain"}
            ) as answer:
                assert answer.status == 400


async def test_a_client_that_leaves_closes_the_file(edge, box, ended):
    """D24: what arrived stays; nobody waits for more."""
    path = edge.home(box) / "left"
    head = ["POST /files?path=left HTTP/1.1", "Content-Type: application/octet-stream", "Content-Length: 10000000"]
    async with edge.raw(head, box) as (_, writer):
        writer.write(b"x" * 1_000_000)
        await writer.drain()
        for _ in range(200):
            if path.exists() and path.stat().st_size:
                break
            await asyncio.sleep(0.02)
    assert await ended(path)
    assert 0 < path.stat().st_size <= 1_000_000


async def test_a_client_that_stops_reading_and_leaves_closes_the_file(edge, box, ended):
    path = edge.home(box) / "unread"
    path.write_bytes(bytes(50_000_000))
    async with edge.raw(["GET /files?path=unread HTTP/1.1"], box) as (reader, _):
        await reader.readexactly(100_000)
    assert await ended(path)


async def test_broken_chunked_framing_is_answered(edge, box, ended):
    head = ["POST /files?path=framing HTTP/1.1", "Content-Type: application/octet-stream", "Transfer-Encoding: chunked"]
    async with edge.raw(head, box) as (reader, writer):
        writer.write(b"5\r\nhello\r\nnonsense\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.split()[1] == b"400"
    assert await ended(edge.home(box) / "framing")


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_file_that_shrinks_is_never_passed_off_as_whole(edge, box, encoding):
    """Plain: less than was promised is a reset. gzip: no length was promised, what is there is whole."""
    path = edge.home(box) / "shrinks"
    path.write_bytes(random.Random(2).randbytes(40_000_000))
    head = ["GET /files?path=shrinks HTTP/1.1", f"Accept-Encoding: {encoding}", "Connection: close"]
    async with edge.raw(head, box) as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        os.truncate(path, 0)
        if encoding == "identity":
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 20)
        else:
            assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"0\r\n\r\n")


async def test_a_file_that_grows_keeps_its_framing(edge, box):
    path = edge.home(box) / "grows"
    path.write_bytes(bytes(5_000_000))
    async with edge.raw(["GET /files?path=grows HTTP/1.1"], box) as (reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 5000000" in head.lower()
        with path.open("ab") as file:
            file.write(b"more" * 1000)
        await reader.readexactly(5_000_000)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("end", ["sandbox", "agent"])
async def test_the_end_of_the_sandbox_resets_a_download(edge, end, encoding):
    """R13: an orderly end would pass the part off as the whole, and gzip announces no length to compare with."""
    box = await edge.create()
    (edge.home(box) / "big").write_bytes(random.Random(3).randbytes(60_000_000))
    async with edge.raw(["GET /files?path=big HTTP/1.1", f"Accept-Encoding: {encoding}"], box) as (reader, _):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.readexactly(100_000)
        if end == "agent":
            edge.backend.end_agent(box["sandboxID"])
        else:
            assert (await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}"))[0] == 204
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)


async def test_killing_the_sandbox_ends_an_upload(edge):
    """No answer has begun, so the one of R4 can be given."""
    box = await edge.create()
    head = ["POST /files?path=x HTTP/1.1", "Content-Type: application/octet-stream", "Content-Length: 10000000"]
    async with edge.raw(head, box) as (reader, writer):
        writer.write(b"x" * 500_000)
        await writer.drain()
        assert (await edge.rest("DELETE", f"/sandboxes/{box['sandboxID']}"))[0] == 204
        try:
            for _ in range(100):
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.01)
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 502")
        except ConnectionError:
            pass


async def test_a_dead_agent_of_a_living_sandbox_is_502(edge):
    box = await edge.create()
    edge.backend.end_agent(box["sandboxID"])
    status, body, _ = await edge.read(box, "x")
    assert (status, json.loads(body)["code"]) == (502, 502)


async def test_an_old_client_gets_a_body_without_chunks(edge, box):
    """HTTP/1.0: the end of the connection is the end of the body."""
    await edge.write(box, "old.txt", b"content")
    async with edge.raw(["GET /files?path=old.txt HTTP/1.0", "Accept-Encoding: gzip"], box) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), 20)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert gzip.decompress(body) == b"content"
