"""Which hierarchies of control groups this machine has, and where in each the gateway may make groups for its boxes.

Below the gateway's own group, so that what limits the gateway limits its sandboxes too (cgroups(7)). Version 2 lets a group
divide its resources only when no process is in it, so a gateway that was given a group for itself (``Delegate=`` of
systemd, a container of its own) moves into a leaf of that group, and boxes become the leaf's neighbours. A group that nobody
gave it stays as it is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Hierarchy", "enable", "hierarchies", "settle"]

#: The group into which a gateway moves, out of the way of its boxes.
_LEAF = "sandgate-gateway"
#: How systemd marks a group that it has given away.
_DELEGATED = ("trusted.delegate", "user.delegate")
#: A process that is moved may just have forked: its child is then found by the next look.
_MOST_LOOKS = 20


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy."""

    version: int
    #: Of version 1: those that are bound to it. Of version 2: those of the gateway's own group, until it is settled.
    controllers: frozenset[str]
    mount: Path
    #: The gateway's own group, as a path below ``/``.
    own: Path

    @property
    def place(self) -> Path:
        """The group in which the groups of boxes are made."""
        return self.own.parent if _is_leaf(self) else self.own

    @property
    def is_everybodys(self) -> bool:
        """Whether groups made here stand beside all that the machine does, and not beside the gateway alone."""
        if self.version == 2:
            # The root of all has no weight among others.
            return not (self.place / "cpu.weight").exists()
        return (self.place / "release_agent").exists()


def hierarchies() -> list[Hierarchy]:
    """All that are mounted where this process can see its own group."""
    paths = _own_paths()
    found = []
    for version, options, mount, root in _mounts():
        controllers = next((name for name in paths if name and set(name.split(",")) <= options), "")
        path = paths.get("" if version == 2 else controllers)
        # Outside of what this process may see of the hierarchy, the path climbs.
        if path is None or ".." in path.parts or not path.is_relative_to(root):
            continue
        own = mount / path.relative_to(root)
        names = _words(own / "cgroup.controllers") if version == 2 else frozenset(controllers.split(","))
        found.append(Hierarchy(version, names, mount, own))
    return found


def _mounts() -> Iterator[tuple[int, set[str], Path, Path]]:
    """(version, options, mount point, which group is mounted there)"""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        place, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind in {"cgroup", "cgroup2"}:
            _, _, _, root, mount = place.split(" ")[:5]
            yield 2 if kind == "cgroup2" else 1, set(options.split(",")), Path(mount), Path(root)


def _own_paths() -> dict[str, Path]:
    """Controllers, as the kernel lists them, to the group of this process; "" for version 2."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
        number, controllers, path = line.split(":", 2)
        found["" if number == "0" else controllers] = Path(path)
    return found


def settle(hierarchy: Hierarchy, wanted: frozenset[str]) -> Hierarchy:
    """Have groups made in :attr:`Hierarchy.place` get the controllers ``wanted``, as far as there are such.

    Version 2 only. Moves the processes of the gateway's own group into a leaf where that is needed and allowed. The
    result's controllers are those that boxes get.
    """
    # A leaf itself has none, as long as its group passes nothing on.
    available = _words(hierarchy.place / "cgroup.controllers") & wanted
    try:
        enable(hierarchy.place, available)
    except OSError as error:
        if error.errno != errno.EBUSY or not _is_given(hierarchy.place, hierarchy.mount):
            return replace(hierarchy, controllers=frozenset())
        return _moved(hierarchy, available)
    return replace(hierarchy, controllers=available)


def enable(group: Path, controllers: frozenset[str]) -> None:
    """Have the children of a group of version 2 divide ``controllers``. Raises OSError."""
    missing = controllers - _words(group / "cgroup.subtree_control")
    if missing:
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _moved(hierarchy: Hierarchy, controllers: frozenset[str]) -> Hierarchy:
    group = hierarchy.place
    try:
        _empty(group, controllers)
    except OSError:
        return replace(hierarchy, controllers=frozenset())
    own = group / _LEAF if hierarchy.own == group else hierarchy.own
    return replace(hierarchy, controllers=controllers, own=own)


def _empty(group: Path, controllers: frozenset[str]) -> None:
    """Move whatever is in a group into a leaf of it, until the group can be divided."""
    leaf = group / _LEAF
    leaf.mkdir(exist_ok=True)
    for _ in range(_MOST_LOOKS):
        for pid in (group / "cgroup.procs").read_text("ascii").split():
            try:
                (leaf / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        try:
            enable(group, controllers)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    raise OSError(errno.EBUSY, "its processes cannot be moved", str(group))


def _is_leaf(hierarchy: Hierarchy) -> bool:
    """Whether the gateway sits in a leaf of a group that is its own: its own doing, or ``DelegateSubgroup=``."""
    if hierarchy.version != 2 or hierarchy.own == hierarchy.mount:
        return False
    return hierarchy.own.name == _LEAF or (not _is_marked(hierarchy.own) and _is_marked(hierarchy.own.parent))


def _is_given(group: Path, mount: Path) -> bool:
    """Whether the group is the gateway's to divide: it was delegated, or is all that a container sees."""
    return _is_marked(group) or group == mount


def _is_marked(group: Path) -> bool:
    for name in _DELEGATED:
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text("ascii").split())
    except OSError:
        return frozenset()
