"""One kernel queue for all watches: each sees it as if it had it alone (behaviour.md F39-F46)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_agent import shared_queue
from sandgate_agent.inotify import Inotify, Mask, Record
from sandgate_agent.shared_queue import Share, SharedQueue

MASK = Mask.CREATE | Mask.DELETE | Mask.MODIFY | Mask.ONLYDIR


@pytest.fixture
def queue() -> Iterator[SharedQueue]:
    before = queues()
    queue = SharedQueue()
    yield queue
    assert queues() == before, "a kernel queue is left"


def queues() -> int:
    """The inotify instances of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "inotify" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass  # the one that the list was read from
    return found


def names(share: Share) -> list[str]:
    return [os.fsdecode(record.name) for record in share.read() if record.name]


def add(share: Share, path: Path, mask: int = MASK) -> int:
    return share.add(os.fsencode(path), mask)


def test_all_shares_are_one_kernel_queue_that_ends_with_the_last(queue: SharedQueue, tmp_path: Path) -> None:
    before = queues()
    shares = [queue.share() for _ in range(300)]
    for share in shares:
        add(share, tmp_path)
    assert queues() == before + 1
    (tmp_path / "f").symlink_to("x")
    assert all(names(share) == ["f"] for share in shares)
    for share in shares:
        share.close()
        share.close()
    assert queues() == before
    with pytest.raises(ValueError, match="closed"):
        add(shares[0], tmp_path)


def test_one_directory_is_told_to_all_and_leaving_it_takes_it_from_nobody_else(
    queue: SharedQueue, tmp_path: Path
) -> None:
    first, second = queue.share(), queue.share()
    numbers = add(first, tmp_path), add(second, tmp_path)
    assert add(first, tmp_path) == numbers[0]
    (tmp_path / "a").symlink_to("x")
    first.remove(numbers[0])
    first.remove(numbers[0])
    (tmp_path / "b").symlink_to("x")
    assert (names(first), names(second)) == (["a"], ["a", "b"])
    assert add(first, tmp_path) not in numbers
    first.close()
    (tmp_path / "c").symlink_to("x")
    assert names(second) == ["c"]
    second.close()


def test_whoever_comes_later_sees_nothing_of_what_was_before(queue: SharedQueue, tmp_path: Path) -> None:
    first, second = queue.share(), queue.share()
    add(first, tmp_path)
    (tmp_path / "before").symlink_to("x")
    add(second, tmp_path)
    (tmp_path / "after").symlink_to("x")
    assert (names(first), names(second)) == (["before", "after"], ["after"])
    first.close()
    second.close()


def test_each_is_told_what_it_asked_for(queue: SharedQueue, tmp_path: Path) -> None:
    creations, deletions = queue.share(), queue.share()
    add(creations, tmp_path, Mask.CREATE)
    add(deletions, tmp_path, Mask.DELETE)
    (tmp_path / "f").symlink_to("x")
    (tmp_path / "f").unlink()
    assert [record.mask for record in creations.read()] == [Mask.CREATE]
    assert [record.mask for record in deletions.read()] == [Mask.DELETE]
    creations.close()
    deletions.close()


def test_repeated_records_are_one_although_others_came_between(queue: SharedQueue, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = queue.share(), queue.share()
    add(first, tmp_path / "a")
    add(second, tmp_path / "b")
    with (tmp_path / "a/f").open("wb", buffering=0) as here, (tmp_path / "b/f").open("wb", buffering=0) as there:
        for _ in range(10):
            here.write(b"x")
            there.write(b"x")
    assert [record.mask for record in first.read()] == [Mask.CREATE, Mask.MODIFY]
    assert [record.mask for record in second.read()] == [Mask.CREATE, Mask.MODIFY]
    first.close()
    second.close()


def test_share_that_is_not_read_loses_its_own_records_only(
    queue: SharedQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F46."""
    monkeypatch.setattr(shared_queue, "_MOST_RECORDS", 10)
    busy, quiet = tmp_path / "busy", tmp_path / "quiet"
    busy.mkdir()
    quiet.mkdir()
    unread, other = queue.share(), queue.share()
    add(unread, busy)
    add(other, quiet)
    for number in range(30):
        (busy / str(number)).symlink_to("x")
    (quiet / "f").symlink_to("x")
    assert names(other) == ["f"]
    records = list(unread.read())
    assert len(records) == 11
    assert records[-1].mask == Mask.Q_OVERFLOW
    assert list(unread.read()) == []
    unread.close()
    other.close()


def test_records_that_the_kernel_lost_are_missed_by_all(queue: SharedQueue, tmp_path: Path) -> None:
    """F46."""
    longest = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if longest > 50_000:
        pytest.skip("this system's queue is too long to be filled here")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    shares = [queue.share(), queue.share()]
    add(shares[0], tmp_path / "a")
    add(shares[1], tmp_path / "b")
    for _ in range(longest // 2 + 10):
        (tmp_path / "a/f").symlink_to("x")
        (tmp_path / "a/f").unlink()
    assert all(list(share.read())[-1].mask == Mask.Q_OVERFLOW for share in shares)
    for share in shares:
        share.close()


def test_end_of_a_great_share_does_not_fill_the_queue_of_the_others(
    queue: SharedQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each watch that ends makes a record in the kernel's queue."""
    monkeypatch.setattr(shared_queue, "_REMOVED_AT_ONCE", 10)
    longest: list[int] = []
    read = Inotify.read

    def measured(kernel: Inotify) -> Iterator[Record]:
        longest.append(kernel.waiting)
        return read(kernel)

    great, other = queue.share(), queue.share()
    add(other, tmp_path)
    for number in range(200):
        folder = tmp_path / str(number)
        folder.mkdir()
        add(great, folder)
    assert len(names(other)) == 200
    monkeypatch.setattr(Inotify, "read", measured)
    great.close()
    (tmp_path / "f").symlink_to("x")
    assert names(other) == ["f"]
    assert max(longest) <= 11 * 32
    other.close()


def test_directory_that_vanishes_is_ended_for_all(queue: SharedQueue, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    shares = [queue.share(), queue.share()]
    numbers = [add(share, folder) for share in shares]
    folder.rmdir()
    for share, number in zip(shares, numbers, strict=True):
        assert [(record.watch, record.mask) for record in share.read()] == [(number, Mask.IGNORED)]
        share.remove(number)
        share.close()


def test_links_are_followed_or_not_as_asked(queue: SharedQueue, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "file").touch()
    share = queue.share()
    assert add(share, tmp_path / "link") == add(share, tmp_path / "d")
    for path, mask in (("link", MASK | Mask.DONT_FOLLOW), ("file", MASK), ("none/x", MASK)):
        with pytest.raises(OSError, match=r"directory"):
            add(share, tmp_path / path, mask)
    share.close()


@pytest.mark.parametrize("seed", range(4))
def test_shares_see_what_queues_of_their_own_would(queue: SharedQueue, tmp_path: Path, seed: int) -> None:
    """Whatever happens, and whoever is read when: each share's records are those of a kernel queue that it does not share.

    But for repetitions: a queue of one's own is told of watches that were removed, and that may stand between two records.
    """
    dice = random.Random(seed)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    pairs: list[tuple[Share | Inotify, ...]] = [(queue.share(), Inotify()) for _ in range(4)]
    known: list[tuple[dict[int, Path], dict[int, Path]]] = [({}, {}) for _ in pairs]
    seen: list[tuple[list[object], list[object]]] = [([], []) for _ in pairs]

    def read(index: int) -> None:
        for source, watches, into in zip(pairs[index], known[index], seen[index], strict=True):
            for record in source.read():
                known_as = (watches.get(record.watch), record.mask, record.name)
                if record.watch in watches and record.name and into[-1:] != [known_as]:
                    into.append(known_as)

    for turn in range(400):
        folder, index = dice.choice(folders), dice.randrange(len(pairs))
        what = dice.randrange(5)
        if what == 0:
            for source, watches in zip(pairs[index], known[index], strict=True):
                watches[source.add(os.fsencode(folder), MASK)] = folder
        elif what == 1:
            for source, watches in zip(pairs[index], known[index], strict=True):
                for number in [number for number, path in watches.items() if path == folder]:
                    source.remove(number)
                    del watches[number]
        elif what == 2:
            read(index)
        elif what == 3:
            (folder / f"n{turn}").symlink_to("x")
        else:
            (folder / "same").write_bytes(b"x")
    for index, (share, own) in enumerate(pairs):
        read(index)
        assert seen[index][0] == seen[index][1]
        share.close()
        own.close()
