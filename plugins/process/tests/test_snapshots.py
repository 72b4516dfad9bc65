"""Snapshots: what is copied, from when, and what is left where one breaks off (behaviour.md C51; the contract's own suite
covers the rest)."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sandgate_errors import CapabilityMissing, FailedPrecondition, NoSpace, NotFound
from sandgate_plugin_api import Capability
from sandgate_plugin_process import copying, snapshots
from sandgate_plugin_process.boxes import Shelf
from sandgate_plugin_process.copying import Owners, Stopped, copy_tree

PYTHON = "/usr/bin/env python3 -c"


@pytest.fixture
async def kept(gateway, backend):
    if Capability.SNAPSHOT not in backend.capabilities:
        pytest.skip("without isolation there are no snapshots")
    yield backend
    for name in folder_of(gateway):
        await backend.delete_snapshot({"snapshot_id": name})


def folder_of(gateway):
    return sorted(path.name for path in (gateway.state / "snapshots").iterdir())


async def from_snapshot(gateway, backend, snapshot, **fields):
    return await gateway.create(backend, snapshot=snapshot, **fields)


async def test_backend_without_isolation_keeps_no_snapshots_and_says_so(gateway, backend):
    if gateway.isolation != "none":
        pytest.skip("it does")
    placement = await gateway.create(backend)
    with pytest.raises(CapabilityMissing, match="snapshots"):
        await backend.snapshot(placement.handle, snapshot_id="s1")
    with pytest.raises(CapabilityMissing, match="snapshots"):
        await from_snapshot(gateway, backend, {"snapshot_id": "s1"})


async def test_files_are_what_they_were_to_their_owners(gateway, kept, run):
    """Owners, modes, times, several names of one file, links, pipes, attributes, changes to the system."""
    placement = await gateway.create(kept)
    make = (
        "mkdir -p deep/er && echo text > deep/er/file && chmod 640 deep/er/file && ln deep/er/file twin && ln -s /etc link"
        " && mkfifo pipe && touch -d 2001-02-03 old && setfattr -n user.e2b -v kept old 2>/dev/null"
        ' || python3 -c \'import os; os.setxattr("old", "user.e2b", b"kept")\''
    )
    assert await run(placement, make) == (0, "")
    assert (await run(placement, "echo root > /root/mine; mkdir /srv/data; chmod 4755 /root/mine", "root"))[0] == 0
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    await kept.destroy(placement.handle)
    copy = await from_snapshot(gateway, kept, snapshot)
    listing = "stat -c '%n %U %G %a %h' deep/er/file twin pipe link; readlink link; stat -c %Y old; cat twin"
    code, text = await run(copy, listing)
    assert code == 0, text
    lines = text.splitlines()
    owner = lines[0].split()[1:3]
    assert lines[0] == f"deep/er/file {owner[0]} {owner[1]} 640 2"
    assert owner == ["user", "user"]
    assert lines[1] == "twin user user 640 2"
    assert lines[2].startswith("pipe user user")
    assert lines[4:7] == ["/etc", "981158400", "text"]
    assert await run(copy, 'python3 -c \'import os; print(os.getxattr("old", "user.e2b").decode())\'') == (0, "kept\n")
    assert (await run(copy, "stat -c '%U %a' /root/mine /srv/data; cat /root/mine", "root"))[1] == (
        "root 4755\nroot 755\nroot\n"
    )
    # Both names are one file in the copy too, and the copy's user may write what is its own.
    assert await run(copy, "echo more >> twin && tail -n 1 deep/er/file") == (0, "more\n")


async def test_several_sandboxes_of_one_snapshot_share_nothing(gateway, kept, run):
    placement = await gateway.create(kept)
    await run(placement, "echo before > mark")
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    copies = await asyncio.gather(*(from_snapshot(gateway, kept, snapshot) for _ in range(3)))
    for number, copy in enumerate(copies):
        assert await run(copy, f"cat mark; echo {number} > mark") == (0, "before\n")
    assert [(await run(copy, "cat mark"))[1] for copy in copies] == ["0\n", "1\n", "2\n"]
    boots = {(await run(copy, "cat /proc/sys/kernel/random/boot_id"))[1] for copy in copies}
    assert len(boots) == 3


async def test_copy_is_of_one_moment_and_the_sandbox_goes_on(gateway, kept, run):
    """Two files that are written one after the other never differ by more than the one step between the writes."""
    placement = await gateway.create(kept)
    writer = "i=0; while :; do i=$((i+1)); echo $i >> a; echo $i >> b; done"
    await run(placement, "for n in $(seq 400); do echo $n > file$n; done")
    await run(
        placement, f"(setsid bash -c '{writer}' >/dev/null 2>&1 </dev/null &); until [ -s b ]; do sleep 0.01; done"
    )
    for number in range(3):
        snapshot = await kept.snapshot(placement.handle, snapshot_id=f"s{number}")
        copy = await from_snapshot(gateway, kept, snapshot)
        first, second = (await run(copy, "wc -l < a; wc -l < b"))[1].split()
        assert int(first) - int(second) in {0, 1}
    before = int((await run(placement, "wc -l < b"))[1])
    assert (await run(placement, f"until [ $(wc -l < b) -gt {before} ]; do sleep 0.01; done"))[0] == 0


async def test_holes_stay_holes(gateway, kept, run):
    """A file of a terabyte without content must not fill the disk."""
    placement = await gateway.create(kept)
    assert (await run(placement, "truncate -s 1T huge && echo end | dd of=huge bs=1 seek=1000000 conv=notrunc"))[0] == 0
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    copy = await from_snapshot(gateway, kept, snapshot)
    code, text = await run(copy, "stat -c '%s %b' huge; dd if=huge bs=1 skip=1000000 count=3 status=none")
    size, blocks = text.split()[:2]
    assert (code, size) == (0, str(2**40))
    assert int(blocks) < 100_000
    assert text.endswith("end")


async def test_hostile_tree_is_copied_and_leads_nowhere(gateway, kept, run, tmp_path):
    """Deeper than paths may be, closed to their owner, links in every place that the gateway mounts on."""
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    placement = await gateway.create(kept, allow_internet_access=False)
    deep = "import os\nfor n in range(1500):\n os.mkdir('d' * 50)\n os.chdir('d' * 50)\nopen('end', 'w').write('x')"
    assert await run(placement, f'{PYTHON} "{deep}"') == (0, "")
    assert await run(placement, "mkdir closed && echo in > closed/file && chmod 0 closed/file closed") == (0, "")
    assert await run(placement, f"ln -s {secret} out") == (0, "")
    assert await run(placement, f"ln -sf {secret} /etc/resolv.conf", "root") == (0, "")
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    copy = await from_snapshot(gateway, kept, snapshot)
    assert secret.read_text() == "of the host"
    assert (await run(copy, "cat out"))[0] != 0
    assert (await run(copy, "stat -c %a closed"))[1] == "0\n"
    assert await run(copy, "chmod 700 closed; chmod 600 closed/file; cat closed/file") == (0, "in\n")
    walk = "import os\nfor n in range(1500): os.chdir('d' * 50)\nprint(open('end').read())"
    assert await run(copy, f'{PYTHON} "{walk}"') == (0, "x\n")
    # Nothing was changed in the source but for the moment.
    assert (await run(placement, "stat -c %a closed"))[1] == "0\n"


async def test_network_of_a_copy_is_its_own(gateway, kept, run):
    placement = await gateway.create(kept, allow_internet_access=False)
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    copy = await from_snapshot(gateway, kept, snapshot)
    assert (await run(placement, "wc -c < /etc/resolv.conf"))[1] == "0\n"
    assert (await run(copy, "cat /etc/resolv.conf"))[1] == Path("/etc/resolv.conf").read_text()
    closed = await from_snapshot(gateway, kept, snapshot, allow_internet_access=False)
    assert (await run(closed, "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '"))[1] == "lo\n"


async def test_cancelled_snapshot_leaves_nothing_and_the_sandbox_runs(gateway, kept, run, monkeypatch):
    placement = await gateway.create(kept)
    reached, asked = threading.Event(), threading.Event()

    def slow(source, target, *, owners, stop):
        os.mkdir(target)
        reached.set()
        assert stop.wait(30)
        asked.set()
        raise Stopped

    monkeypatch.setattr(snapshots, "copy_tree", slow)
    taking = asyncio.create_task(kept.snapshot(placement.handle, snapshot_id="s1"))
    assert await asyncio.to_thread(reached.wait, 30)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert asked.is_set()
    assert folder_of(gateway) == []
    assert await run(placement, "echo runs") == (0, "runs\n")


async def test_snapshot_that_does_not_fit_is_told_and_leaves_nothing(gateway, kept, run, monkeypatch):
    placement = await gateway.create(kept)
    await run(placement, "echo x > file")

    def full(self, source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying._Copy, "_copy_content", full)
    with pytest.raises(NoSpace):
        await kept.snapshot(placement.handle, snapshot_id="s1")
    assert folder_of(gateway) == []
    assert await run(placement, "echo runs") == (0, "runs\n")


async def test_crash_in_the_middle_of_a_copy_lets_the_sandbox_go_on(gateway, kept, run, monkeypatch):
    """What the next start finds: a sandbox that stands still, and half a copy."""
    placement = await gateway.create(kept)
    box = Shelf(state=gateway.state, runtime=gateway.runtime).box(placement.handle["box"])
    record = box.read()
    kept._standstill.freeze(box, record, kept="copy")
    (gateway.state / "snapshots" / "s1.new" / "rootfs").mkdir(parents=True)
    async with gateway.backend() as after:
        assert folder_of(gateway) == []
        found = await after.locate(placement.handle)
        assert found == placement
        assert await run(found, "echo runs") == (0, "runs\n")
        assert box.read().paused == ""
        await after.delete_snapshot({"snapshot_id": "s1"})


async def test_pause_after_a_crash_in_a_copy_keeps_what_is_asked_for(gateway, kept, run):
    placement = await gateway.create(kept)
    box = Shelf(state=gateway.state, runtime=gateway.runtime).box(placement.handle["box"])
    kept._standstill.freeze(box, box.read(), kept="copy")
    await kept.pause(placement.handle, memory=True)
    assert box.read().paused == "memory"
    placement = await kept.resume(placement.handle)
    assert await run(placement, "echo runs") == (0, "runs\n")


async def test_only_a_running_sandbox_can_be_copied(gateway, kept):
    placement = await gateway.create(kept)
    await kept.pause(placement.handle, memory=True)
    with pytest.raises(FailedPrecondition, match="paused"):
        await kept.snapshot(placement.handle, snapshot_id="s1")
    await kept.destroy(placement.handle)
    with pytest.raises(NotFound):
        await kept.snapshot(placement.handle, snapshot_id="s1")
    assert folder_of(gateway) == []


async def test_snapshot_that_is_read_is_deleted_after_its_reader(gateway, kept, run, monkeypatch):
    placement = await gateway.create(kept)
    await run(placement, "echo kept > mark")
    snapshot = await kept.snapshot(placement.handle, snapshot_id="s1")
    reached, go_on = threading.Event(), threading.Event()

    def slow(source, target, **how):
        reached.set()
        assert go_on.wait(30)
        copy_tree(source, target, **how)

    monkeypatch.setattr(snapshots, "copy_tree", slow)
    making = asyncio.create_task(from_snapshot(gateway, kept, snapshot))
    assert await asyncio.to_thread(reached.wait, 30)
    deleting = asyncio.create_task(kept.delete_snapshot(snapshot))
    await asyncio.sleep(0)
    assert not deleting.done()
    go_on.set()
    assert await run(await making, "cat mark") == (0, "kept\n")
    await deleting
    assert folder_of(gateway) == []
    with pytest.raises(NotFound):
        await from_snapshot(gateway, kept, snapshot)
    # A create that failed has left no box.
    assert len(await kept.survey()) == 2


def test_file_may_have_as_many_names_as_there_can_be(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "inner").mkdir(parents=True)
    (source / "first").write_text("x")
    for number in range(300):
        os.link(source / "first", source / ("inner" if number % 2 else ".") / f"name{number}")
    copy_tree(source, target, owners=Owners(None, None), stop=threading.Event())
    copies = [path for path in target.rglob("*") if path.is_file()]
    assert {path.stat().st_ino for path in copies} == {copies[0].stat().st_ino}
    # None of ours is left among them.
    assert (len(copies), copies[0].stat().st_nlink) == (301, 301)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_ids_of_one_sandbox_become_those_of_another():
    owners = Owners(1000, 200_000)
    assert [owners.of(number) for number in (1000, 2000, 1000 + 65535)] == [200_000, 201_000, 265_535]
    # Nobody's of the sandbox: it cannot have made that.
    assert owners.of(0) == 0
    assert replace(owners, source=None).of(5) == 5
