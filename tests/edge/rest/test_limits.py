"""Limits that a gateway's settings put on files: what passes, what is refused, in whose words (behaviour K30, K32)."""

import asyncio
import gzip
import io

import aiohttp
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def edge_settings():
    return {"max_upload_bytes": 100_000, "max_upload_files": 3, "max_list_depth": 2, "max_list_entries": 5}


async def listing(edge, box, **request):
    headers = {
        "E2b-Sandbox-Id": box["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": box["envdAccessToken"],
    }
    async with edge.session.post(f"{edge.url}/filesystem.Filesystem/ListDir", json=request, headers=headers) as answer:
        return answer.status, await answer.json()


async def upload_several(edge, box, count):
    form = aiohttp.FormData()
    for number in range(count):
        form.add_field("file", b"x", filename=f"{count}-{number}")
    async with edge.files("POST", box, data=form) as answer:
        return answer.status, await answer.json()


async def test_an_upload_of_the_largest_size_passes(edge, box):
    assert (await edge.write(box, "fits", io.BytesIO(bytes(100_000))))[0] == 200
    assert (edge.home(box) / "fits").stat().st_size == 100_000


async def test_an_announced_larger_one_is_refused_before_anything_is_written(edge, box):
    status, error = await edge.write(box, "larger", bytes(100_001))
    assert (status, error) == (413, {"code": 413, "message": "an upload may have at most 100000 bytes on this gateway"})
    assert not (edge.home(box) / "larger").exists()


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_one_that_says_no_size_is_refused_when_it_passes_the_limit(edge, box, encoding, ended):
    """The limit is for what the body unpacks to, and the bomb is not unpacked beyond it."""

    async def content():
        body = bytes(40_000_000)
        yield gzip.compress(body) if encoding == "gzip" else body

    status, error = await edge.write(box, "endless", content(), headers={"Content-Encoding": encoding})
    assert (status, error["code"]) == (413, 413)
    written = edge.home(box) / "endless"
    assert not written.exists() or written.stat().st_size <= 1_000_000
    assert await ended(edge.home(box) / "endless")


async def test_one_file_too_many_refuses_the_rest(edge, box):
    """Files before it stay written (D28)."""
    assert (await upload_several(edge, box, 3))[0] == 200
    status, error = await upload_several(edge, box, 4)
    assert (status, error["code"]) == (400, 400)
    assert "at most 3 files" in error["message"]
    assert sorted(path.name for path in edge.home(box).glob("4-*")) == ["4-0", "4-1", "4-2"]


async def test_listings_beyond_the_limits_are_refused_whole(edge, box):
    (edge.home(box) / "tree/a/b/c").mkdir(parents=True)
    for number in range(3):
        (edge.home(box) / f"tree/{number}").touch()
    for request, entries in (({}, 4), ({"depth": 0}, 4), ({"depth": 2}, 5)):
        status, reply = await listing(edge, box, path="tree", **request)
        assert (status, len(reply["entries"])) == (200, entries)
    status, error = await listing(edge, box, path="tree", depth=3)
    assert (status, error["code"]) == (400, "invalid_argument")
    assert "at most 2" in error["message"]
    (edge.home(box) / "tree/one-more").touch()
    status, error = await listing(edge, box, path="tree", depth=2)
    assert (status, error["code"]) == (400, "invalid_argument")
    assert "at most 5 entries" in error["message"]
    assert (await listing(edge, box, path="tree"))[0] == 200


async def test_the_gateway_serves_on_after_refusals(edge, box):
    refusals = [edge.write(box, f"burst-{number}", bytes(200_000)) for number in range(20)]
    assert {status for status, _ in await asyncio.gather(*refusals)} == {413}
    status, content, _ = await edge.read(box, "fits")
    assert (status, len(content)) == (200, 100_000)
    assert not list(edge.home(box).glob("burst-*"))
