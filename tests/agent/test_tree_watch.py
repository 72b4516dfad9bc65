"""Changes in a directory as the kernel tells them, without agent or network (behaviour.md F39-F42)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandgate_agent.inotify import Inotify, Mask
from sandgate_agent.shared_queue import SharedQueue
from sandgate_agent.tree_watch import Kind, TreeWatch
from sandgate_errors import InvalidArgument, NotFound

Watching = Callable[..., "Seen"]


class Seen:
    """A watch and what it has told, as text."""

    def __init__(self, path: Path, *, recursive: bool) -> None:
        self.watch = TreeWatch(str(path), recursive=recursive, cancelled=lambda: False, queue=SharedQueue())

    def new(self) -> list[str]:
        return [f"{change.kind.name} {os.fsdecode(change.name)}" for change in self.watch.changes()]


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    made: list[Seen] = []

    def make(path: Path = tmp_path, *, recursive: bool = False) -> Seen:
        made.append(Seen(path, recursive=recursive))
        return made[-1]

    yield make
    for seen in made:
        seen.watch.close()


def test_queue_gives_the_kernels_records(tmp_path: Path) -> None:
    queue = Inotify()
    try:
        watch = queue.add(os.fsencode(tmp_path), Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO)
        assert queue.add(os.fsencode(tmp_path), Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO) == watch
        assert list(queue.read()) == []
        (tmp_path / "a").touch()
        (tmp_path / "a").rename(tmp_path / ("n" * 255))
        created, away, to = queue.read()
        assert (created.watch, created.mask, created.name) == (watch, Mask.CREATE, b"a")
        assert (away.mask, away.name, to.mask, to.name) == (Mask.MOVED_FROM, b"a", Mask.MOVED_TO, b"n" * 255)
        assert away.cookie == to.cookie != 0
        queue.remove(watch)
        queue.remove(watch)
        assert [record.mask for record in queue.read()] == [Mask.IGNORED]
    finally:
        queue.close()
        queue.close()


def test_missing_directories_cannot_be_watched(tmp_path: Path, watching: Watching) -> None:
    """F34."""
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("none")
    for name in ("none", "nowhere", "file/below"):
        with pytest.raises(NotFound):
            watching(tmp_path / name)
    with pytest.raises(InvalidArgument, match="not a directory"):
        watching(tmp_path / "file")


def test_each_change_has_its_kind(tmp_path: Path, watching: Watching) -> None:
    """F39."""
    (tmp_path / "outside").mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    seen = watching(inside)
    (inside / "f").touch(mode=0o644)
    assert seen.new() == ["CREATE f"]
    with (inside / "f").open("a") as file:
        file.write("x")
    assert seen.new() == ["WRITE f"]
    (inside / "f").chmod(0o600)
    assert seen.new() == ["CHMOD f"]
    (inside / "f").rename(inside / "g")
    assert seen.new() == ["RENAME f", "CREATE g"]
    (inside / "g").rename(tmp_path / "outside/g")
    assert seen.new() == ["RENAME g"]
    (tmp_path / "outside/g").rename(inside / "h")
    assert seen.new() == ["CREATE h"]
    (inside / "h").unlink()
    assert seen.new() == ["REMOVE h"]


def test_directory_itself_is_a_dot(tmp_path: Path, watching: Watching) -> None:
    """F40."""
    folder = tmp_path / "folder"
    folder.mkdir()
    seen = watching(folder)
    folder.chmod(0o700)
    assert seen.new() == ["CHMOD ."]
    folder = folder.rename(tmp_path / "renamed")
    assert seen.new() == ["RENAME ."]
    folder.rmdir()
    assert seen.new() == ["REMOVE ."]
    assert seen.new() == []


@pytest.mark.parametrize("recursive", [False, True])
def test_flat_watch_sees_direct_children_only(tmp_path: Path, watching: Watching, recursive: bool) -> None:
    """F41, and a change of a directory inside is told once, though a recursive watch hears of it twice."""
    (tmp_path / "sub").mkdir()
    seen = watching(recursive=recursive)
    (tmp_path / "sub").chmod(0o700)
    (tmp_path / "sub/f").touch()
    assert seen.new() == ["CHMOD sub", *(["CREATE sub/f"] if recursive else [])]
    shutil.rmtree(tmp_path / "sub")
    assert seen.new() == [*(["REMOVE sub/f"] if recursive else []), "REMOVE sub"]


def test_new_directories_are_watched_at_any_depth_and_nothing_is_told_twice(tmp_path: Path, watching: Watching) -> None:
    """F42: some of these are made before their directory is watched, all after the watch began."""
    seen = watching(recursive=True)
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/f").symlink_to("x")
    assert seen.new() == ["CREATE a", "CREATE a/b", "CREATE a/b/c", "CREATE a/b/c/f"]
    (tmp_path / "a/b/c/g").symlink_to("x")
    assert seen.new() == ["CREATE a/b/c/g"]


def test_what_is_made_and_removed_before_its_directory_is_watched_keeps_its_order(
    tmp_path: Path, watching: Watching
) -> None:
    seen = watching(recursive=True)
    (tmp_path / "a").mkdir()
    told = seen.watch.changes()
    assert next(told).name == b"a"
    # The directory is read only when the next change is asked for: until then it is not watched.
    (tmp_path / "a/early").symlink_to("x")
    assert next(told).name == b"a/early"
    (tmp_path / "a/early").unlink()
    (tmp_path / "a/early").symlink_to("y")
    rest = [f"{change.kind.name} {os.fsdecode(change.name)}" for change in told]
    assert rest + seen.new() == ["REMOVE a/early", "CREATE a/early"]


def test_renamed_directory_is_followed(tmp_path: Path, watching: Watching) -> None:
    """F42: also for what happens in it before anybody has read of the renaming."""
    (tmp_path / "a/deep/er").mkdir(parents=True)
    seen = watching(recursive=True)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b/deep/er/f").symlink_to("x")
    assert seen.new() == ["RENAME a", "CREATE b", "CREATE b/deep", "CREATE b/deep/er", "CREATE b/deep/er/f"]
    (tmp_path / "b/deep/er/g").symlink_to("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/own").symlink_to("x")
    assert seen.new() == ["CREATE b/deep/er/g", "CREATE a", "CREATE a/own"]


def test_directory_that_left_the_tree_is_not_watched_any_more(tmp_path: Path, watching: Watching) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "sub/deep").mkdir(parents=True)
    outside.mkdir()
    seen = watching(inside, recursive=True)
    (inside / "sub").rename(outside / "sub")
    (outside / "sub/deep/f").touch()
    seen.new()
    (outside / "sub/deep/g").touch()
    (outside / "sub/h").touch()
    assert seen.new() == []
    (outside / "sub").rename(inside / "again")
    assert seen.new()[0] == "CREATE again"
    (inside / "again/deep/i").symlink_to("x")
    assert seen.new() == ["CREATE again/deep/i"]


def test_links_to_directories_are_not_entered(tmp_path: Path, watching: Watching) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "old").symlink_to(outside)
    seen = watching(inside, recursive=True)
    (inside / "new").symlink_to(outside)
    assert seen.new() == ["CREATE new"]
    (outside / "f").touch()
    assert seen.new() == []


def test_names_need_not_be_text(tmp_path: Path, watching: Watching) -> None:
    seen = watching(recursive=True)
    odd = os.path.join(os.fsencode(tmp_path), b"d\xff\n")
    os.mkdir(odd)
    os.symlink("x", os.path.join(odd, b"\xfe"))
    assert [change.name for change in seen.watch.changes()] == [b"d\xff\n", b"d\xff\n/\xfe"]


def test_closing_ends_every_watch(tmp_path: Path) -> None:
    """B34: neither descriptors nor watches remain."""
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "a/b").mkdir(parents=True)
    for _ in range(200):
        TreeWatch(str(tmp_path), recursive=True, cancelled=lambda: False, queue=SharedQueue()).close()
        with pytest.raises(NotFound):
            TreeWatch(str(tmp_path / "none"), recursive=True, cancelled=lambda: False, queue=SharedQueue())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seed", range(6))
def test_events_retell_any_history_of_a_tree(tmp_path: Path, watching: Watching, seed: int) -> None:
    """Whoever plays CREATE, RENAME and REMOVE back has the names that are there, whenever the queue was read."""
    dice = random.Random(seed)
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    seen = watching(inside, recursive=True)
    known: set[str] = set()
    for turn in range(400):
        _act(dice, inside, outside, turn)
        if dice.random() < 0.1:
            _replay(known, seen.new())
    _replay(known, seen.new())
    _replay(known, seen.new())
    real = subprocess.run(["find", ".", "-mindepth", "1"], cwd=inside, capture_output=True, text=True, check=True)
    assert known == {line[2:] for line in real.stdout.splitlines()}


def _act(dice: random.Random, inside: Path, outside: Path, turn: int) -> None:
    folders = [inside, *(path for path in inside.rglob("*") if path.is_dir())]
    everything = list(inside.rglob("*"))
    away = list(outside.iterdir())
    place = dice.choice(folders) / f"n{dice.randrange(6)}"
    what = dice.randrange(6)
    try:
        if what == 0:
            place.mkdir()
        elif what == 1:
            place.touch()
        elif what == 2 and everything:
            dice.choice(everything).rename(place)
        elif what == 3 and everything:
            dice.choice(everything).rename(outside / f"t{turn}")
        elif what == 4 and away:
            dice.choice(away).rename(place)
        elif everything and dice.random() < 0.4:
            victim = dice.choice(everything)
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    except OSError:
        pass  # what the kernel refuses has no effect


def _replay(known: set[str], told: list[str]) -> None:
    for line in told:
        kind, name = line.split(" ", 1)
        if kind == Kind.CREATE.name:
            # Over an existing name: a renaming that replaced it.
            known -= {other for other in known if other.startswith(name + "/")}
            known.add(name)
        elif kind in {Kind.REMOVE.name, Kind.RENAME.name}:
            known -= {other for other in known if other == name or other.startswith(name + "/")}
