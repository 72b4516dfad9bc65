"""Stat and ListDir tell what the kernel tells, on trees that nobody would make by hand (behaviour.md F6 to F23)."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_testing.agent_process import Agent, code_of

NAMES = [
    *(
        b"a",
        b"a-b",
        b"a b",
        b".hidden",
        b"-rf",
        b"~",
        b"...",
        b"new\nline",
        b"tab\t",
        b'quo"te',
        b"back\\slash",
        b"%41",
    ),
    *("ünï 日本 🎉".encode(), b"not \xff\xfe text", b"\x01\x1b[31m", b"n" * 255, b"A", b"a.txt", b"*", b"$HOME"),
]
MODES = [0o644, 0o600, 0o755, 0o777, 0o000, 0o4755, 0o2755, 0o1777, 0o7777]
TIMES = [0, 1, 1_796_059_783_123_456_789, 1_000_000_000_000_000_001, -1_000_000_000]


class Tree:
    """A random tree, made before the agent looks at it."""

    def __init__(self, root: Path, seed: int, *, owners: bool = False) -> None:
        self.dice = random.Random(seed)
        self.owners = owners
        self.root = os.fsencode(root)
        self.folders = [self.root]
        self.everything: list[bytes] = []
        for _ in range(150):
            self._add()
        for path in self.everything:
            self._adorn(path)

    def _add(self) -> None:
        folder = self.dice.choice(self.folders[-3:] if self.dice.random() < 0.5 else self.folders)
        path = os.path.join(folder, self.dice.choice(NAMES))
        if os.path.lexists(path) or len(path) > 3000:
            return
        kind = self.dice.choice(["file", "file", "folder", "folder", "link", "link", "pipe", "socket"])
        getattr(self, f"_{kind}")(path)
        self.everything.append(path)

    def _file(self, path: bytes) -> None:
        with open(path, "wb") as file:
            file.truncate(self.dice.choice([0, 1, 4096, 2**33]))

    def _folder(self, path: bytes) -> None:
        os.mkdir(path)
        self.folders.append(path)

    def _link(self, path: bytes) -> None:
        """To something that is there, to nothing, to itself, up the tree, or to a device."""
        something = self.dice.choice([*self.everything, self.root])
        relative = os.path.relpath(something, os.path.dirname(path))
        os.symlink(
            self.dice.choice([something, relative, b"nothing", os.path.basename(path), b"..", b"/dev/null"]), path
        )

    def _pipe(self, path: bytes) -> None:
        os.mkfifo(path)

    def _socket(self, path: bytes) -> None:
        # By a short name, because an address has 107 bytes.
        with socket.socket(socket.AF_UNIX) as sock:
            short = os.path.join(self.root, b".s")
            sock.bind(short)
            os.rename(short, path)

    def _adorn(self, path: bytes) -> None:
        if not os.path.islink(path):
            mode = self.dice.choice(MODES)
            # Without the right to look into it, an agent that is not root would be right to say less.
            os.chmod(path, mode | 0o700 if os.path.isdir(path) else mode)
        if self.owners and self.dice.random() < 0.3:
            os.chown(path, self.dice.choice([0, 65534, 54321]), self.dice.choice([0, 54321]), follow_symlinks=False)
        time = self.dice.choice(TIMES)
        os.utime(path, ns=(time, time), follow_symlinks=False)

    def walk(self, folder: bytes, depth: int) -> Iterator[bytes]:
        """Pre-order, names by their bytes."""
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            yield path
            if depth > 1 and stat.S_ISDIR(os.lstat(path).st_mode):
                yield from self.walk(path, depth - 1)


def text(path: bytes) -> str:
    return path.decode(errors="replace")


def truth(path: bytes) -> dict[str, Any]:
    """What is to be said about a path, from the kernel's answers alone."""
    own = os.lstat(path)
    is_link = stat.S_ISLNK(own.st_mode)
    try:
        target = os.stat(path)
        final = text(os.path.realpath(path, strict=True))
    except OSError:
        target, final = None, text(path)
    kind = pb.FILE_TYPE_SYMLINK
    if target is not None:
        kinds = {stat.S_IFREG: pb.FILE_TYPE_FILE, stat.S_IFDIR: pb.FILE_TYPE_DIRECTORY}
        kind = kinds.get(stat.S_IFMT(target.st_mode), pb.FILE_TYPE_UNSPECIFIED)
    return {
        "name": text(os.path.basename(path)),
        "path": text(path),
        "type": kind,
        "size": own.st_size,
        "mode": (own if target is None else target).st_mode & 0o777,
        "modified": own.st_mtime_ns,
        "target": final if is_link else None,
        "is_symlink": is_link,
        "bits": "".join(letter if own.st_mode & 1 << 8 - at else "-" for at, letter in enumerate("rwxrwxrwx")),
    }


def said(entry: pb.EntryInfo) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": entry.path,
        "type": entry.type,
        "size": entry.size,
        "mode": entry.mode,
        "modified": entry.modified_time.seconds * 1_000_000_000 + entry.modified_time.nanos,
        "target": entry.symlink_target if entry.HasField("symlink_target") else None,
        "is_symlink": entry.is_symlink,
        "bits": entry.permissions[-9:],
    }


@pytest.mark.parametrize("seed", range(4))
async def test_listings_are_the_kernels_truth(any_agent: Agent, seed: int) -> None:
    root = any_agent.home / "tree"
    root.mkdir()
    # Other owners exist only where the agent has their ids.
    tree = Tree(root, seed, owners=any_agent.identity == "switch")
    for depth in (1, 2, 3, 5, 100):
        listed = await any_agent.listing(str(root), depth=depth)
        assert [said(entry) for entry in listed] == [truth(path) for path in tree.walk(tree.root, depth)]
    assert len(tree.everything) > 60


@pytest.mark.parametrize("seed", range(2))
async def test_stat_is_the_kernels_truth(agent: Agent, seed: int) -> None:
    root = agent.home / "tree"
    root.mkdir()
    for path in Tree(root, seed + 100).everything:
        try:
            name = path.decode()
        except UnicodeDecodeError:
            continue  # no request can name it
        assert said(await agent.stat(name)) == truth(path)


async def test_owners_are_names_or_numbers(switching: Agent) -> None:
    """F11: in the agent's namespace, which is where the names are."""
    root = switching.home / "tree"
    root.mkdir()
    Tree(root, 7, owners=True)
    for entry in await switching.listing(str(root), depth=1):
        assert entry.owner in {"root", "nobody", "54321"}
        assert entry.group in {"root", "54321"}


async def test_links_in_the_middle_of_a_path_are_resolved_by_the_kernel_alone(agent: Agent) -> None:
    """``..`` is cleaned from the text before links are looked at (F5), and a loop is told as one."""
    (agent.home / "real/inner").mkdir(parents=True)
    (agent.home / "real/file").write_text("in real")
    (agent.home / "file").write_text("at home")
    (agent.home / "link").symlink_to("real/inner")
    (agent.home / "loop").symlink_to("loop/x")
    assert await agent.read(f"{agent.home}/link/../file") == b"at home"
    assert (await agent.stat("link/../file")).path == f"{agent.home}/file"
    async with code_of(grpc.StatusCode.FAILED_PRECONDITION):
        await agent.stat("loop/y")
    async with code_of(grpc.StatusCode.FAILED_PRECONDITION):
        await agent.listing("loop")
